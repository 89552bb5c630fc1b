"""What actions on servers cost, through the OpenStack API alone.

Each run creates servers and then sends one action to all of them, from several clients; it has ended when every server
has left the states that the action passes through. Looking whether it has ended costs the cloud something, too: the
pauses between two looks are 20 times as long as a look takes, so that this adds little, whatever the cloud.

| phase | what is done |
|---|---|
| stop, start, reboot | `os-stop`, `os-start`, `reboot` (hard) |
| rebuild | with the same image |
| snapshot | `createImage` |
| resize, confirm | to a larger flavor, until VERIFY_RESIZE; `confirmResize` |
| migrate, confirm_migrate | to another host, until VERIFY_RESIZE; `confirmResize` |
| shelve, unshelve | until the servers have left their hosts, and are back |

`resized` and `migrated` are the sums of a move and its confirmation. The images are left
behind.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.perf.client import BenchError, Client
from tests.perf.phases import Bench, Meter, combine, progress

PAUSE = 20  # the pause between two looks, as a multiple of the time that a look takes
SHORTEST = 0.02  # seconds


class Phase(NamedTuple):
    """One action: its name here, its body, the status that it leads to, and those that it passes through."""

    name: str
    body: dict[str, Any]
    status: str
    through: tuple[str, ...] = ()


SUMS = {"resized": ("resize", "confirm"), "migrated": ("migrate", "confirm_migrate")}


class ActionBench(Bench):
    """The phases of the actions, against one cloud."""

    async def run(self) -> dict[str, Any]:
        """Measure each action and return the figures by action."""
        runs = [await self._run() for _ in range(self.sizes.repeat)]
        self._control.close()
        return {"actions": combine(runs), "problems": self.problems}

    async def _run(self) -> dict[str, Any]:
        name, count = self._name("acted"), self.sizes.acted
        await self._control.json("POST", "/servers", self.target.server(name, count))
        await self._settle(name, count)
        servers = await self._ids(name)
        found: dict[str, Any] = {}
        for phase in self._phases():
            found[phase.name] = await self._act(phase, name, servers)
            progress(f"{phase.name}: {found[phase.name]['cpu_ms_each']:.4g} ms CPU")
        for total, parts in SUMS.items():
            found[total] = {"cpu_ms_each": sum(found[part]["cpu_ms_each"] for part in parts)}
        await self.delete()
        return found

    def _phases(self) -> tuple[Phase, ...]:
        image, larger = self.target.image, self.target.larger_flavor
        confirm: dict[str, Any] = {"confirmResize": None}
        return (
            Phase("stop", {"os-stop": None}, "SHUTOFF", ("ACTIVE",)),
            Phase("start", {"os-start": None}, "ACTIVE", ("SHUTOFF",)),
            Phase("reboot", {"reboot": {"type": "HARD"}}, "ACTIVE", ("HARD_REBOOT",)),
            Phase("rebuild", {"rebuild": {"imageRef": image}}, "ACTIVE", ("REBUILD",)),
            Phase("snapshot", {"createImage": {"name": f"{self.prefix}-image"}}, "ACTIVE"),
            Phase("resize", {"resize": {"flavorRef": larger}}, "VERIFY_RESIZE", ("RESIZE", "ACTIVE")),
            Phase("confirm", confirm, "ACTIVE", ("VERIFY_RESIZE",)),
            Phase("migrate", {"migrate": None}, "VERIFY_RESIZE", ("RESIZE", "ACTIVE")),
            Phase("confirm_migrate", confirm, "ACTIVE", ("VERIFY_RESIZE",)),
            Phase("shelve", {"shelve": None}, "SHELVED_OFFLOADED", ("ACTIVE", "SHELVED")),
            Phase("unshelve", {"unshelve": None}, "ACTIVE", ("SHELVED_OFFLOADED",)),
        )

    async def _act(self, phase: Phase, name: str, servers: list[str]) -> dict[str, Any]:
        meter = Meter(self.target.roots)
        await self._carry_out(phase, name, servers)
        cost = meter.cost(len(servers))
        await self._check(phase, name, servers)
        return cost

    async def _carry_out(self, phase: Phase, name: str, servers: list[str]) -> None:
        """Send the action to all servers, and wait until it has ended."""

        async def send(client: Client, server: str) -> None:
            await client.json("POST", f"/servers/{server}/action", phase.body)

        await self._spread_out(servers, send, self.sizes.clients)
        end = time.perf_counter() + self.sizes.patience
        for status in phase.through:
            await self._none_in(name, status, end)
        if not phase.through:
            await self._no_tasks(servers, end)

    async def _check(self, phase: Phase, name: str, servers: list[str]) -> None:
        """Note a problem if servers have another status; wait for what is left of the action."""
        reached = len(await self._ids(name, status=phase.status))
        if reached != len(servers):
            self.problems.append(f"{phase.name}: {reached} of {len(servers)} servers are {phase.status}")
        await self._no_tasks(servers, time.perf_counter() + self.sizes.patience)  # it would count for the next one

    async def _none_in(self, name: str, status: str, end: float) -> None:
        """Wait until no server has a status."""
        while True:
            begin = time.perf_counter()
            if not await self._page(name, status=status, limit=1):
                return
            await self._pause(begin, end)

    async def _no_tasks(self, servers: list[str], end: float) -> None:
        """Wait until no server has a task state."""
        for server in servers:
            while True:
                begin = time.perf_counter()
                shown: Mapping[str, Any] = (await self._control.json("GET", f"/servers/{server}"))["server"]
                if shown["OS-EXT-STS:task_state"] is None:
                    break
                await self._pause(begin, end)

    async def _pause(self, begin: float, end: float) -> None:
        now = time.perf_counter()
        if now > end:
            raise BenchError("an action did not end")
        await asyncio.sleep(max(SHORTEST, PAUSE * (now - begin)))
