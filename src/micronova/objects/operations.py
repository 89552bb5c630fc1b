"""Operations as rows, and their payloads: what each kind keeps between its steps."""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

import msgspec

from micronova.objects.network import PlannedPort
from micronova.objects.scheduling import Selection

VERSIONS: Final[Mapping[str, int]] = {
    "build": 2,
    "delete": 1,
    "stop": 1,
    "start": 1,
    "reboot": 1,
    "pause": 1,
    "unpause": 1,
    "suspend": 1,
    "resume": 1,
    "attach_interface": 1,
    "detach_interface": 1,
}
"""The version of each kind: new operations have it, and conductors lease operations up to it. It is raised when the
payload or the meaning of a step changes."""


Step = Literal["new", "schedule", "dispatched", "cleanup", "done"]
"""Where the work on an operation continues; each kind says in its module what its steps do."""

Result = Literal["success", "error", "cancelled"]
"""How an operation ended."""


class OperationRow(TypedDict):
    """A row of `operations`. Times are microseconds since 1970 (UTC)."""

    id: str
    kind: str
    version: int
    instance_uuid: str
    batch_id: str
    step: Step
    owner: str | None
    epoch: int
    lease_until: int
    deadline: int
    leases: int  # how often a conductor has leased it
    payload: bytes
    secrets: bytes | None
    context: bytes
    created_at: int
    finished_at: int | None
    result: Result | None
    explanation: dict[str, Any] | None


class BuildTimes(msgspec.Struct, array_like=True):
    """When one attempt of a build reached each step (microseconds since 1970, UTC); `micronova timeline` shows it."""

    begun: int
    placed: int = 0  # a host was selected and its resources were claimed
    networked: int = 0
    dispatched: int = 0
    host: str = ""
    started: int = 0  # by the host's clock; `finished` too
    finished: int = 0


class Payload(msgspec.Struct, kw_only=True):
    """What the payloads of all kinds have."""

    last_error: str = ""  # why the last attempt on a host did not succeed


class BuildPayload(Payload, kw_only=True):
    """The payload of a build; there is one for each server of a request."""

    tried: list[str] = []  # the hosts where it failed, and the one that builds it; the scheduler chooses others
    alternates: list[Selection] = []
    wait_for_plugs: list[str] = []
    dispatches: list[BuildTimes] = []  # one for each dispatch, also to hosts that were lost

    @classmethod
    def decode(cls, payload: bytes) -> "BuildPayload":
        """Return the payload of an operation's row."""
        return msgspec.msgpack.decode(payload, type=cls)

    def encode(self) -> bytes:
        """Return the payload as it is stored in the operation's row."""
        return msgspec.msgpack.encode(self)


class PowerPayload(Payload, kw_only=True):
    """Which server action this is, and its parameters."""

    action: str
    parameters: dict[str, str] = {}


class InterfacePayload(Payload, kw_only=True):
    """The interface to attach or detach, and the result."""

    request: PlannedPort | None = None  # the port to attach
    port_id: str | None = None
    wait_for_plugs: list[str] = []
    error_code: str | None = None  # why an attachment is being undone
    error: str = ""
