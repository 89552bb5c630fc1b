"""A conductor that crashes where a test wants it to."""

from micronova.conductor.operations import Crash


class Crashes:
    """Crashes the conductor's work once after a step."""

    next: tuple[str, str] | None = None

    def __call__(self, kind: str, step: str) -> None:
        if self.next == (kind, step):
            self.next = None
            raise Crash(f"{kind} {step}")
