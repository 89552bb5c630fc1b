"""Chance against the protocol: lost and doubled messages, a conductor that is away, a driver that fails, kill -9.

The conductor here keeps the rules of the real one in a few lines of memory. Whatever happened, once the trouble is
over every operation ends and the host holds exactly the guests that it should, in the state that it should. And at
no time is a guest removed that somebody's running server is, nor are two things done to one guest at once.
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from micronova.conductor.rpcapi import ReportReply
from micronova.objects.orders import Departed, Heartbeat, HeartbeatReply, HostReply, Report, WorkOrder
from micronova.rpc.contract import Context
from tests.unit.compute.world import CONTEXT, FakeConductor, World, order, settle


class Operation(msgspec.Struct):
    """An operation as the database would keep it."""

    order: WorkOrder
    result: str | None = None


class Instance(msgspec.Struct):
    """An instance as the database would keep it."""

    epoch: int
    here: bool = True
    power: int = 0
    deleted: bool = False


class Conductor(FakeConductor):
    """Keeps instances, operations and departures, by the rules of DESIGN.md."""

    def __init__(self, world: World, random: Random) -> None:
        super().__init__()
        self.clock = world.clock
        self.random = random
        self.trouble = True
        self.instances: dict[str, Instance] = {}
        self.operations: dict[str, Operation] = {}
        self.departures: dict[str, int] = {}
        self.servers: dict[str, int] = {}  # instances that were reported as built, with the epoch of their guest

    def open_on(self, uuid: str) -> list[Operation]:
        found = self.operations.values()
        return [each for each in found if each.result is None and each.order.instance.uuid == uuid]

    def begin(self, kind: str, uuid: str) -> WorkOrder:
        """Record an operation, which makes the host its owner at a new epoch."""
        instance = self.instances.setdefault(uuid, Instance(epoch=1))
        instance.epoch += 1
        instance.here = True
        if kind == "delete":
            self.servers.pop(uuid, None)
        made = order(kind, uuid=uuid, epoch=instance.epoch, issued_at=self.clock.now())
        self.operations[made.operation_id] = Operation(made)
        return made

    def take_away(self, uuid: str) -> None:
        """The instance leaves the host: other operations on it end, and the departure is on record."""
        instance = self.instances[uuid]
        for operation in self.open_on(uuid):
            operation.result = "cancelled"
        self.departures[uuid] = instance.epoch
        self.servers.pop(uuid, None)
        instance.epoch += 1
        instance.here = False

    async def report(self, context: Context, params: Report) -> ReportReply:
        self._answering()
        answer = self.apply(params)
        if self.trouble and self.random.random() < 0.2:
            raise RuntimeError("the answer got lost")
        return answer

    def apply(self, report: Report) -> ReportReply:
        operation = self.operations[report.operation_id]
        kind, uuid = operation.order.kind, report.instance_uuid
        instance = self.instances[uuid]
        if operation.result is not None or operation.order.epoch != report.epoch:
            again = operation.result == "success"
            here = instance.here and not instance.deleted
            return ReportReply(accepted=again, destroy=not here and kind == "build")
        if report.outcome == "done":
            operation.result = "success"
            instance.power = report.power_state or 0
            instance.deleted = kind == "delete"
            if kind == "build":
                self.servers[uuid] = report.epoch
        elif kind == "build":
            operation.result = "error"
            self.take_away(uuid)
        elif kind != "delete":  # a delete is tried again with the next heartbeat
            operation.result = "error"
        return ReportReply(accepted=True)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        self._answering()
        self.beats.append(params)
        beat = params.hosts[0]
        for gone in beat.departed:
            if self.departures.get(gone.instance_uuid) == gone.epoch:
                del self.departures[gone.instance_uuid]
        if beat.stopping:
            return HeartbeatReply()
        in_hand = {each.operation_id: each.epoch for each in beat.in_hand}
        mine = {id: each.order for id, each in self.operations.items() if each.result is None}
        reply = HostReply(
            host=beat.host,
            orders=tuple(each for id, each in mine.items() if in_hand.get(id) != each.epoch),
            drop=tuple(id for id in in_hand if id not in mine),
            departures=tuple(Departed(uuid, epoch) for uuid, epoch in self.departures.items()),
        )
        return HeartbeatReply(hosts=(reply,), now=self.clock.now())


class Chaos:
    """What happens in one run."""

    def __init__(self, world: World, conductor: Conductor, random: Random) -> None:
        self.world = world
        self.conductor = conductor
        self.random = random
        self.created = 0
        self.sent: list[WorkOrder] = []  # any of these may come once more
        self.busy: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def send(self, an_order: WorkOrder) -> None:
        """Cast it: once, twice, or into the void."""
        self.sent.append(an_order)
        for _ in range(self.random.choice((0, 1, 1, 1, 2))):
            await self.world.compute.send_order(CONTEXT, an_order)

    def watch(self) -> None:
        """Look over the driver's shoulder."""
        driver = self.world.driver
        for name in ("spawn", "destroy", "power_on", "power_off", "reboot"):
            setattr(driver, name, self._watched(name, getattr(driver, name)))

    def _watched(self, name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            uuid = args[0] if isinstance(args[0], str) else args[0].instance.uuid
            guest = await self.world.driver.info(uuid)
            if name == "destroy" and guest is not None and self.conductor.servers.get(uuid) == guest.epoch:
                self.wrong.append(f"{uuid} is somebody's server and was removed")
            if self.busy[uuid]:
                self.wrong.append(f"{name} of {uuid} while something else is done to it")
            self.busy[uuid] += 1
            try:
                return await method(*args)
            finally:
                self.busy[uuid] -= 1

        return call

    async def restart(self) -> None:
        """Kill the agent; the broker delivers again what it had not seen acknowledged."""
        await self.world.kill_agent()
        self.busy.clear()
        for an_order in self.random.sample(self.sent, min(3, len(self.sent))):
            await self.world.compute.send_order(CONTEXT, an_order)
        await self.world.start_agent()
        self.watch()

    async def step(self) -> None:
        conductor, random, world = self.conductor, self.random, self.world
        living = [uuid for uuid, each in conductor.instances.items() if not each.deleted and each.here]
        idle = [uuid for uuid in living if not conductor.open_on(uuid)]
        gone = [uuid for uuid, each in conductor.instances.items() if not each.deleted and not each.here]
        often = ["create"] * 4 + ["delete"] * 3 + ["power"] * 4 + ["late"] * 2 + ["wait"] * 8
        match random.choice([*often, "leave", "return", "kill", "away", "driver"]):
            case "create":
                self.created += 1
                await self.send(conductor.begin("build", f"i-{self.created}"))
            case "delete" if living:
                uuid = random.choice(living)
                for operation in conductor.open_on(uuid):
                    if operation.order.kind == "delete":
                        return
                    operation.result = "cancelled"
                await self.send(conductor.begin("delete", uuid))
            case "power" if idle:
                await self.send(conductor.begin(random.choice(("stop", "start", "reboot")), random.choice(idle)))
            case "leave" if living:
                uuid = random.choice(living)
                if all(operation.order.kind != "delete" for operation in conductor.open_on(uuid)):
                    conductor.take_away(uuid)
            case "return" if gone:
                await self.send(conductor.begin("build", random.choice(gone)))
            case "late" if self.sent:
                await world.compute.send_order(CONTEXT, random.choice(self.sent))
            case "kill":
                await self.restart()
            case "away":
                conductor.away = not conductor.away
            case "driver":
                world.driver.set_fault_rules(
                    random.sample(
                        [
                            {"operation": "spawn", "kind": "fail", "probability": 0.5},
                            {"operation": "spawn", "kind": "hang", "probability": 0.3},
                            {"operation": "destroy", "kind": "fail", "probability": 0.5},
                            {"operation": "power_off", "kind": "fail", "probability": 0.5},
                            {"kind": "delay", "delay": (0.0, 8.0)},
                        ],
                        k=2,
                    )
                )
            case "wait":
                await world.clock.advance(random.uniform(0.0, 6.0))
        await settle()


@pytest.mark.parametrize("seed", range(8))
async def test_everything_ends_well(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    world = World(tmp_path, max_concurrent_builds=3)
    conductor = world.conductor = Conductor(world, random)
    await world.start()
    chaos = Chaos(world, conductor, random)
    chaos.watch()
    for _ in range(200):
        await chaos.step()

    conductor.away = conductor.trouble = False
    world.driver.set_fault_rules([])
    for operation in conductor.operations.values():
        if operation.result is None and operation.order.kind == "build":  # it may hang: its deadline has come
            conductor.take_away(operation.order.instance.uuid)
    await world.clock.advance(120)

    assert chaos.wrong == []
    assert chaos.created > 5
    assert [each for each in conductor.operations.values() if each.result is None] == []
    assert conductor.departures == {}
    assert world.in_hand() == []
    wanted = {uuid: each.power for uuid, each in conductor.instances.items() if each.here and not each.deleted}
    guests = await world.driver.list_guests()
    assert {guest.uuid: guest.power_state for guest in guests} == wanted
    tracker = world.manager._agents["host-1"].host.tracker(None)
    assert tracker.used()["VCPU"] == len(wanted)
    await world.close()
