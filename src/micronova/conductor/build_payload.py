"""What a build remembers between its steps, in its operation's payload."""

import msgspec

from micronova.conductor.operations import Operation
from micronova.objects.scheduling import Selection


class Attempt(msgspec.Struct, array_like=True):
    """How far one try of a build came, and when (microseconds since the epoch): what `micronova timeline` shows."""

    begun: int
    placed: int = 0  # a host was chosen and its resources were claimed
    networked: int = 0
    dispatched: int = 0
    host: str = ""
    started: int = 0  # by the host's clock, as is finished
    finished: int = 0


class BuildPayload(msgspec.Struct, kw_only=True):
    """What a build remembers between its steps; the tried hosts belong to each server, not to the request."""

    tried: list[str] = []
    alternates: list[Selection] = []
    wait_for_plugs: list[str] = []
    last_error: str = ""
    attempts: list[Attempt] = []

    @classmethod
    def of(cls, operation: Operation) -> "BuildPayload":
        """Return what an operation remembers."""
        return msgspec.msgpack.decode(operation.payload, type=cls)

    def encode(self) -> bytes:
        """Return it as the operation keeps it."""
        return msgspec.msgpack.encode(self)
