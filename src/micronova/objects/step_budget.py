"""A bound on the work of a search: what requests and hosts describe must not keep a process busy for long."""


class TooManySteps(Exception):
    """A search has used up its steps."""


class StepBudget:
    """The steps that a search may still take."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Count steps; raise TooManySteps if there are none left."""
        self._left -= steps
        if self._left < 0:
            raise TooManySteps
