"""Searches whose work is bounded: what requests and hosts describe must not keep a process busy for long."""

from collections.abc import Iterator


class TooManySteps(Exception):
    """A search has used up its steps."""


class StepMeter:
    """Counts the steps of several searches, of which each has a budget of its own."""

    def __init__(self) -> None:
        self.steps = 0


class StepBudget:
    """The steps that a search may still take."""

    def __init__(self, steps: int, meter: StepMeter | None = None) -> None:
        self._left = steps
        self._meter = meter

    @property
    def left(self) -> int:
        """How many there are."""
        return max(0, self._left)

    def spend(self, steps: int = 1) -> None:
        """Count steps; raise TooManySteps if there are none left."""
        self._left -= steps
        if self._meter is not None:
            self._meter.steps += steps
        if self._left < 0:
            raise TooManySteps


class Matching:
    """Gives each of several one of its options, which are the bits of an integer, and none to two of them."""

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._used = 0
        self._holders: dict[int, int] = {}  # bit -> the options of who has it
        self._seen = 0

    def add(self, options: int) -> bool:
        """Give one more an option, for which others may get another one of theirs; return whether that is possible."""
        self._seen = 0
        return self._place(options)

    def _place(self, options: int) -> bool:
        self._budget.spend()
        free = options & ~self._used
        if free:
            bit = free & -free
            self._used |= bit
            self._holders[bit] = options
            return True
        for number in bits(options):
            bit = 1 << number
            if self._seen & bit:
                continue
            self._seen |= bit
            if self._place(self._holders[bit]):
                self._holders[bit] = options
                return True
        return False


def bits(numbers: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, the lowest first."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
