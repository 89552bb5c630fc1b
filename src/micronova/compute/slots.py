"""Slots for heavy work, of which a host has few."""

import asyncio
import itertools
from collections import Counter


class Slots:
    """Slots for work that runs at the same time; 0: any number.

    A slot that becomes free is given to the project that has the fewest, and then to the work that has waited longest.
    A project gets at most all slots but one. So its work, which may last long, does not make all others wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._per_project = max(1, most - 1)
        self._taken: Counter[str] = Counter()
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}  # in the order of their numbers
        self._numbers = itertools.count()

    def one(self, project: str) -> "Slot":
        """Return a slot for a project, which is not acquired yet."""
        return Slot(self, project)

    async def acquire(self, project: str) -> None:
        """Wait for a slot."""
        # Waiting work is not overtaken: the slots that are free now are ones its project may not have.
        if self._has_room(project):
            self._taken[project] += 1
            return
        number, given = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = project, given
        try:
            await given
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is None:  # it was given meanwhile
                self.release(project)
            raise

    def release(self, project: str) -> None:
        """Release a slot; work that waits gets it."""
        self._taken[project] -= 1
        if not self._taken[project]:
            del self._taken[project]
        fits = [
            (self._taken[owner], number)
            for number, (owner, given) in self._waiting.items()
            if self._has_room(owner) and not given.done()  # else it is being cancelled
        ]
        if fits:
            _, number = min(fits)
            owner, given = self._waiting.pop(number)
            self._taken[owner] += 1
            given.set_result(None)

    def _has_room(self, project: str) -> bool:
        return not self._most or (self._taken.total() < self._most and self._taken[project] < self._per_project)


class Slot:
    """One of `Slots`. It is released while the work waits for a guest."""

    def __init__(self, slots: Slots, project: str) -> None:
        self._slots = slots
        self._project = project
        self._taken = False

    async def acquire(self) -> None:
        """Wait for the slot, unless it is acquired."""
        if not self._taken:
            await self._slots.acquire(self._project)
            self._taken = True

    def release(self) -> None:
        """Release the slot, unless that is done."""
        if self._taken:
            self._taken = False
            self._slots.release(self._project)

    async def __aenter__(self) -> "Slot":
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
