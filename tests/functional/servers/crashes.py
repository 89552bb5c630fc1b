"""Crashes of the conductor at a step that a test chooses."""

from micronova.conductor.operations.engine import Crash


class Crashes:
    """Crashes an operation of the conductor once, after the step in `next`, and after each step in `due`."""

    def __init__(self) -> None:
        self.next: tuple[str, str] | None = None
        self.due: set[tuple[str, str]] = set()

    def __call__(self, kind: str, step: str) -> None:
        if (kind, step) in self.due:
            self.due.discard((kind, step))
            raise Crash(f"{kind} {step}")
        if self.next == (kind, step):
            self.next = None
            raise Crash(f"{kind} {step}")
