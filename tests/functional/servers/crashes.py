"""Crashes of the conductor at a step that a test chooses."""

from micronova.conductor.operations.engine import Crash


class Crashes:
    """Crashes an operation of the conductor once, after the step in `next`."""

    next: tuple[str, str] | None = None

    def __call__(self, kind: str, step: str) -> None:
        if self.next == (kind, step):
            self.next = None
            raise Crash(f"{kind} {step}")
