"""Slots for heavy work, of which a host has few."""

import asyncio
import itertools
from collections import Counter


class Slots:
    """Slots for work that runs at the same time; 0: any number.

    A slot that becomes free is given to the project that has the fewest, and then to the work that has waited longest.
    One project has all slots but one at most. So its work, which may last long, does not make all others wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._per_project = max(1, most - 1)
        self._taken: Counter[str] = Counter()
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}  # in the order of their numbers
        self._numbers = itertools.count()

    def one(self, project: str) -> "Slot":
        """Return a slot for a project, which is not taken yet."""
        return Slot(self, project)

    async def take(self, project: str) -> None:
        """Wait for a slot."""
        # Work that waits could not have the slot that is free now, or it would have got it: nobody is overtaken here.
        if self._has_room(project):
            self._taken[project] += 1
            return
        number, given = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = project, given
        try:
            await given
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is None:  # it was given meanwhile
                self.leave(project)
            raise

    def leave(self, project: str) -> None:
        """Give a slot back."""
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
    """One of `Slots`. It is left while the work waits for a guest."""

    def __init__(self, slots: Slots, project: str) -> None:
        self._slots = slots
        self._project = project
        self._taken = False

    async def take(self) -> None:
        """Wait for the slot, unless it is taken."""
        if not self._taken:
            await self._slots.take(self._project)
            self._taken = True

    def leave(self) -> None:
        """Let others have the slot."""
        if self._taken:
            self._taken = False
            self._slots.leave(self._project)

    async def __aenter__(self) -> "Slot":
        await self.take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
