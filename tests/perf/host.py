"""What a host costs per order, counted in CPU time, both ends of the bus included: python -m tests.perf.host."""

import asyncio
import tempfile
import time
from pathlib import Path
from random import Random

from micronova.compute.manager import ComputeManager
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import HOSTS, HostConductorAPI, Ping, PluggedPorts, PluggedPortsRequest, Pong
from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.orders import (
    GuestsOff,
    GuestsToStart,
    Heartbeat,
    HeartbeatReply,
    Progress,
    ProgressReply,
    Report,
    ReportReply,
)
from micronova.rpc.bus import connect
from micronova.virt.loader import DriverSetup, create_drivers
from tests.compute_settings import compute_settings
from tests.unit.compute.agent_harness import CONTEXT, order

ORDERS = 1_000


class Counting:
    """A conductor that only counts."""

    def __init__(self) -> None:
        self.left = ORDERS
        self.done = asyncio.Event()

    async def report(self, context: Context, params: Report) -> ReportReply:
        assert params.outcome == "done"
        self.left -= 1
        if not self.left:
            self.done.set()
        return ReportReply(accepted=True)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply()

    async def ping(self, context: Context, params: Ping) -> Pong:
        return Pong()

    async def progress(self, context: Context, params: Progress) -> ProgressReply:
        return ProgressReply(accepted=True)

    async def plugged_ports(self, context: Context, params: PluggedPortsRequest) -> PluggedPorts:
        return PluggedPorts(params.ports)

    async def start_guests_after_host_boot(self, context: Context, params: GuestsOff) -> GuestsToStart:
        return GuestsToStart(instance_uuids=())


async def measure(state_dir: Path) -> dict[str, float]:
    """Carry out many orders of each kind and give the CPU seconds of one."""
    clock, random = SystemClock(), Random(1)
    bus = connect("local://cost", clock=clock, random=random)
    await bus.start()
    conductor = Counting()
    await bus.serve(HOSTS, conductor)
    setup = DriverSetup(
        host="",
        cloud_id="c",
        clock=clock,
        random=random,
        state_dir=state_dir,
        options={"hosts": 10, "vcpus": 100_000, "memory_mb": 10**9, "local_gb": 10**7},
    )
    manager = ComputeManager(
        compute_settings(), create_drivers("fake", setup), bus, HostConductorAPI(bus, clock, random), clock, random
    )
    await manager.start()
    while not manager.synchronised:
        await asyncio.sleep(0)
    compute, costs = ComputeAPI(bus), {}
    for epoch, kind in enumerate(("build", "stop", "start", "reboot", "delete"), 2):
        orders = [order(kind, f"i-{n}", epoch, host=f"fake-{n % 10 + 1}") for n in range(ORDERS)]
        conductor.left = ORDERS
        conductor.done.clear()
        before = time.process_time()
        for number, each in enumerate(orders):
            await compute.send_order(CONTEXT, each)
            if number % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(conductor.done.wait(), 60)
        costs[kind] = (time.process_time() - before) / ORDERS
    await manager.stop()
    await bus.stop()
    return costs


def main() -> None:
    """Print the cost of each kind of order."""
    with tempfile.TemporaryDirectory() as directory:
        for kind, cost in asyncio.run(measure(Path(directory))).items():
            print(f"{kind:<8}{cost * 1e6:6.0f} µs CPU")


if __name__ == "__main__":
    main()
