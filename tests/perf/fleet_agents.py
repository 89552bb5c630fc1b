"""Speaks the bus as many compute agents, each as if it were a process of its own: one heartbeat per host.

`python -m tests.perf.fleet_agents --url amqp://… --first 0 --last 5000 --open 200` plays the hosts 0 to 4,999. The open
hosts have a queue, take orders and report them as done; the others only send heartbeats, because their nodes are full.
It writes one line of JSON when every host has had a reply, and one at the end.
"""

import argparse
import asyncio
import json
import random
import resource
import signal
import time
import uuid
from collections.abc import Awaitable, Callable

import uvloop

from micronova.compute.rpcapi import COMPUTE_INTERFACE, GuestList, Nothing
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.errors import NotSupported
from micronova.objects.orders import Heartbeat, HostBeat, NodeResources, Report, RunningOrder, WorkOrder
from micronova.rpc.bus import Bus, connect

NAMESPACE = uuid.UUID("0b5b7f9c-5d0e-4f0e-8c39-666c65657400")
OPEN_DISK = 4_000  # GB: more than a run of the benchmark fills
FULL_DISK = 10
INTERVAL = 5.0  # until a conductor names another one


def host_name(number: int) -> str:
    """Return the name of a host."""
    return f"fleet{number:06}"


def node_uuid(number: int) -> str:
    """Return the id of a host's node."""
    return str(uuid.uuid5(NAMESPACE, host_name(number)))


class Agent:
    """One host."""

    def __init__(self, number: int, conductor: HostConductorAPI, *, is_open: bool) -> None:
        self.name = host_name(number)
        self.answered = 0
        self.unanswered = 0
        self.slowest = 0.0
        self.interval = INTERVAL
        self._number = number
        self._conductor = conductor
        self._open = is_open
        self._send_nodes = True
        self._running: dict[str, WorkOrder] = {}

    async def beat_forever(self, chance: random.Random) -> None:
        """Send heartbeats, the first at some moment of the first interval."""
        await asyncio.sleep(chance.uniform(0, INTERVAL))
        while True:
            begin, before = time.perf_counter(), self.interval
            nodes = (self._node(),) if self._send_nodes else ()
            running = tuple(RunningOrder(order.operation_id, order.epoch) for order in self._running.values())
            try:
                reply = await self._conductor.heartbeat(
                    Heartbeat(hosts=(HostBeat(host=self.name, nodes=nodes, running_orders=running),))
                )
            except Exception:
                self.unanswered += 1
            else:
                self.answered += 1
                self.slowest = max(self.slowest, time.perf_counter() - begin)
                self.interval = reply.interval or self.interval
                self._send_nodes = reply.hosts[0].resend_nodes
                for order in reply.hosts[0].orders:
                    await self.execute_order(Context(), order)
            pause = chance.uniform(min(before, 0.9 * self.interval), self.interval)  # as the agent does it
            await asyncio.sleep(max(0.0, begin + pause - time.perf_counter()))

    def _node(self) -> NodeResources:
        return NodeResources(
            node=self.name,
            node_uuid=node_uuid(self._number),
            hypervisor_type="fake",
            hypervisor_version=1,
            vcpus=256,
            memory_mb=1 << 20,
            local_gb=OPEN_DISK if self._open else FULL_DISK,
            supported=(("x86_64", "fake", "hvm"), ("x86_64", "qemu", "hvm"), ("x86_64", "kvm", "hvm")),
        )

    # What conductors send.

    async def execute_order(self, context: Context, order: WorkOrder) -> None:
        """Do nothing, and report that it is done."""
        if order.operation_id in self._running:
            return
        self._running[order.operation_id] = order
        try:
            report = Report(
                operation_id=order.operation_id,
                epoch=order.epoch,
                instance_uuid=order.instance.uuid,
                host=self.name,
                outcome="done",
                power_state=1,
            )
            await self._conductor.report(report, context)
        finally:
            del self._running[order.operation_id]

    async def list_guests(self, context: Context, request: Nothing) -> GuestList:
        """Say that there are none."""
        return GuestList(())

    def __getattr__(self, name: str) -> Callable[[Context, object], Awaitable[None]]:
        """Return what refuses every other message that hosts get: the load that is measured has none of them."""
        if name not in COMPUTE_INTERFACE.methods:
            raise AttributeError(name)
        return _refuse


async def _refuse(context: Context, request: object) -> None:
    raise NotSupported("This host is part of a benchmark and has no guests.")


async def run(arguments: argparse.Namespace) -> None:
    """Play the hosts until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    chance = random.Random(arguments.first)
    clock = SystemClock()
    bus: Bus = connect(arguments.url, clock=clock, random=random.Random(), grace=1.0)
    await bus.start()
    conductor = HostConductorAPI(bus, clock, random.Random())
    agents = [
        Agent(number, conductor, is_open=number < arguments.open) for number in range(arguments.first, arguments.last)
    ]
    for agent in agents[: max(0, arguments.open - arguments.first)]:
        await bus.serve(COMPUTE_INTERFACE, agent, host=agent.name, shared=False)
    beats = [asyncio.create_task(agent.beat_forever(chance)) for agent in agents]
    while not all(agent.answered for agent in agents):
        await asyncio.sleep(0.2)
    print(json.dumps({"ready": len(agents)}), flush=True)
    await stop.wait()
    for beat in beats:
        beat.cancel()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "answered": sum(agent.answered for agent in agents),
        "unanswered": sum(agent.unanswered for agent in agents),
        "slowest_s": max(agent.slowest for agent in agents),
        "interval_s": max(agent.interval for agent in agents),
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    print(json.dumps(figures), flush=True)
    await bus.stop()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.fleet_agents", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="the broker")
    parser.add_argument("--first", type=int, required=True, help="the number of the first host")
    parser.add_argument("--last", type=int, required=True, help="the number after that of the last host")
    parser.add_argument("--open", type=int, required=True, help="hosts below this number take servers")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
