"""Random faults in the protocol: lost and doubled messages, an unavailable conductor, a failing driver, kill -9.

The conductor here follows the rules of the real one, in memory. When the faults have ended, every operation ends and
the host has exactly the guests that it should have, each in the right power state. At no time is the guest of a running
server removed, and never do two driver calls change one guest at the same time.
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from micronova.objects.context import Context
from micronova.objects.orders import Departure, Heartbeat, HeartbeatReply, HostReply, Report, ReportReply, WorkOrder
from tests.clocks import settle
from tests.unit.compute.agent_harness import CONTEXT, AgentHarness, FakeConductor, order


class Operation(msgspec.Struct):
    """An operation, as in the database."""

    order: WorkOrder
    result: str | None = None


class Instance(msgspec.Struct):
    """An instance, as in the database."""

    epoch: int
    here: bool = True
    power: int = 0
    deleted: bool = False


class Conductor(FakeConductor):
    """Keeps instances, operations and departures in memory."""

    def __init__(self, harness: AgentHarness, random: Random) -> None:
        super().__init__()
        self.clock = harness.clock
        self.random = random
        self.faults = True
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

    def move_away(self, uuid: str) -> None:
        """Move an instance away from the host: cancel its operations and record the departure."""
        instance = self.instances[uuid]
        for operation in self.open_on(uuid):
            operation.result = "cancelled"
        self.departures[uuid] = instance.epoch
        self.servers.pop(uuid, None)
        instance.epoch += 1
        instance.here = False

    async def report(self, context: Context, params: Report) -> ReportReply:
        self._check_available()
        answer = self.apply(params)
        if self.faults and self.random.random() < 0.2:
            raise RuntimeError("the answer was lost")
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
            self.move_away(uuid)
        elif kind != "delete":  # a delete is tried again with the next heartbeat
            operation.result = "error"
        return ReportReply(accepted=True)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        self._check_available()
        self.beats.append(params)
        beat = params.hosts[0]
        for gone in beat.removed_guests:
            if self.departures.get(gone.instance_uuid) == gone.epoch:
                del self.departures[gone.instance_uuid]
        if beat.stopping:
            return HeartbeatReply()
        running = {each.operation_id: each.epoch for each in beat.running_orders}
        mine = {id: each.order for id, each in self.operations.items() if each.result is None}
        reply = HostReply(
            host=beat.host,
            orders=tuple(each for id, each in mine.items() if running.get(id) != each.epoch),
            drop=tuple(id for id in running if id not in mine),
            departures=tuple(Departure(uuid, epoch) for uuid, epoch in self.departures.items()),
        )
        return HeartbeatReply(hosts=(reply,), now=self.clock.now())


class Chaos:
    """The random events of one run."""

    def __init__(self, harness: AgentHarness, conductor: Conductor, random: Random) -> None:
        self.harness = harness
        self.conductor = conductor
        self.random = random
        self.created = 0
        self.sent: list[WorkOrder] = []  # any of these may be delivered again
        self.busy: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def send(self, an_order: WorkOrder) -> None:
        """Cast an order once or twice, or lose it."""
        self.sent.append(an_order)
        for _ in range(self.random.choice((0, 1, 1, 1, 2))):
            await self.harness.compute.send_order(CONTEXT, an_order)

    def watch(self) -> None:
        """Check every call of the driver."""
        driver = self.harness.driver
        for name in ("spawn", "destroy", "power_on", "power_off", "reboot"):
            setattr(driver, name, self._watched(name, getattr(driver, name)))

    def _watched(self, name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            uuid = args[0] if isinstance(args[0], str) else args[0].instance.uuid
            guest = await self.harness.driver.info(uuid)
            if name == "destroy" and guest is not None and self.conductor.servers.get(uuid) == guest.epoch:
                self.wrong.append(f"{uuid} is the guest of a running server and was removed")
            if self.busy[uuid]:
                self.wrong.append(f"{name} of {uuid} during another call for it")
            self.busy[uuid] += 1
            try:
                return await method(*args)
            finally:
                self.busy[uuid] -= 1

        return call

    async def restart(self) -> None:
        """Kill the agent and start it again; the broker delivers unacknowledged orders again."""
        await self.harness.kill_agent()
        self.busy.clear()
        for an_order in self.random.sample(self.sent, min(3, len(self.sent))):
            await self.harness.compute.send_order(CONTEXT, an_order)
        await self.harness.start_agent()
        self.watch()

    async def step(self) -> None:
        conductor, random, harness = self.conductor, self.random, self.harness
        living = [uuid for uuid, each in conductor.instances.items() if not each.deleted and each.here]
        idle = [uuid for uuid in living if not conductor.open_on(uuid)]
        gone = [uuid for uuid, each in conductor.instances.items() if not each.deleted and not each.here]
        often = ["create"] * 4 + ["delete"] * 3 + ["power"] * 4 + ["late"] * 2 + ["wait"] * 8
        match random.choice([*often, "leave", "return", "kill", "unavailable", "driver"]):
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
                    conductor.move_away(uuid)
            case "return" if gone:
                await self.send(conductor.begin("build", random.choice(gone)))
            case "late" if self.sent:
                await harness.compute.send_order(CONTEXT, random.choice(self.sent))
            case "kill":
                await self.restart()
            case "unavailable":
                conductor.unavailable = not conductor.unavailable
            case "driver":
                harness.driver.set_fault_rules(
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
                await harness.clock.advance(random.uniform(0.0, 6.0))
        await settle()


@pytest.mark.parametrize("seed", range(8))
async def test_every_operation_ends_and_the_guests_are_right(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    harness = AgentHarness(tmp_path, max_concurrent_builds=3)
    conductor = harness.conductor = Conductor(harness, random)
    await harness.start()
    chaos = Chaos(harness, conductor, random)
    chaos.watch()
    for _ in range(200):
        await chaos.step()

    conductor.unavailable = conductor.faults = False
    harness.driver.set_fault_rules([])
    for operation in conductor.operations.values():
        if operation.result is None and operation.order.kind == "build":  # it may hang; end it, as its deadline would
            conductor.move_away(operation.order.instance.uuid)
    await harness.clock.advance(120)

    assert chaos.wrong == []
    assert chaos.created > 5
    assert [each for each in conductor.operations.values() if each.result is None] == []
    assert conductor.departures == {}
    assert harness.running_operations() == []
    wanted = {uuid: each.power for uuid, each in conductor.instances.items() if each.here and not each.deleted}
    guests = await harness.driver.list_guests()
    assert {guest.uuid: guest.power_state for guest in guests} == wanted
    tracker = harness.manager._agents["host-1"].host.tracker(None)
    assert tracker.used()["VCPU"] == len(wanted)
    await harness.close()
