"""Operations as rows, and their payloads: what each kind keeps between its steps."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self, TypedDict

import msgspec

from micronova.objects.block_device import BlockDevice
from micronova.objects.image import ImageMeta
from micronova.objects.instance import ImageData
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
    "rescue": 1,
    "unrescue": 1,
    "change_password": 1,
    "trigger_crash_dump": 1,
    "rebuild": 2,
    "soft_delete": 1,
    "restore": 1,
    "attach_interface": 2,
    "detach_interface": 1,
    "create_image": 1,
    "create_backup": 1,
    "create_volume_image": 1,
    "resize": 1,
    "migrate": 1,
    "confirm_resize": 1,
    "revert_resize": 1,
    "bind_ports": 1,
    "evacuate": 2,
    "live_migrate": 1,
    "shelve": 2,
    "shelve_offload": 1,
    "unshelve": 1,
    "unshelve_offloaded": 2,
    "discard_image": 1,
    "undo_move": 1,
    "attach_volume": 1,
    "detach_volume": 1,
    "extend_volume": 1,
    "swap_volume": 1,
    "settle_volumes": 2,
}
"""The version of each kind: new operations have it, and conductors lease operations up to it. It is raised when the
payload or the meaning of a step changes. An operation that an earlier version can carry out, too, has that version
(`Payload.version_of`)."""


INSTANCE_ACTIONS: Final[Mapping[str, str]] = {
    "build": "create",
    "soft_delete": "delete",
    "change_password": "changePassword",
    "create_image": "createImage",
    "create_backup": "createBackup",
    "create_volume_image": "createImage",
    "confirm_resize": "confirmResize",
    "revert_resize": "revertResize",
    "live_migrate": "live-migration",
    "shelve_offload": "shelveOffload",
    "unshelve_offloaded": "unshelve",
}
"""The names of the instance actions of kinds, which are Nova's, where they are not the kinds: `instance_action`.

Messages to users have them, too, unless `states.Action.label` says otherwise."""

IMAGE_KINDS: Final = ("create_image", "create_backup", "create_volume_image", "shelve")
"""Kinds that make an image, which has the id of the operation. What stops one early has to delete the image."""

BIND_PORTS: Final = "bind_ports"
DISCARD_IMAGE: Final = "discard_image"
SETTLE_VOLUMES: Final = "settle_volumes"
UNDO_MOVE: Final = "undo_move"
SWAP_VOLUME: Final = "swap_volume"
BACKGROUND_KINDS: Final = (BIND_PORTS, DISCARD_IMAGE, SETTLE_VOLUMES)
"""Follow-ups that no request waits for, and that are repeated as long as another service does not answer."""

FOLLOW_UP_KINDS: Final = (*BACKGROUND_KINDS, UNDO_MOVE)
"""Kinds that follow from another change of a server.

No later request overtakes them: what they do is right whatever the server becomes."""

IMAGE_CREATION_TIME: Final = 60.0
"""Seconds in which the API creates the image of an operation that it has recorded; later no such image appears."""


def instance_action(kind: str) -> str:
    """Return the name of the instance action of a kind."""
    return INSTANCE_ACTIONS.get(kind, kind)


Step = Literal[
    "new", "schedule", "dispatched", "rotate", "cleanup", "done",
    "prep", "migrate", "bind", "finish", "unbind", "undo", "offload", "reimage",
]  # fmt: skip
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

    def version_of(self, kind: str) -> int:
        """Return the version that a conductor has to know to carry this out."""
        return VERSIONS[kind]

    def encode(self) -> bytes:
        """Return the payload as it is stored in the operation's row."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Return the payload of an operation's row."""
        return msgspec.msgpack.decode(payload, type=cls)


def with_last_error(payload: bytes, reason: str) -> bytes:
    """Return an encoded payload of any kind with another `last_error`; its other fields stay as they are."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(payload), "last_error": reason})


class PlacedPayload(Payload, kw_only=True):
    """The payload of a kind that the scheduler places."""

    tried: list[str] = []  # the hosts where it failed, and the one that has it; the scheduler chooses others
    # Hosts that lacked something for the moment, or were down or stopped: others are preferred, if there are any.
    # Operations are stored with the older name.
    unpreferred: list[str] = msgspec.field(default_factory=list, name="lacking")
    alternates: list[Selection] = []

    @property
    def placed_before(self) -> bool:
        """Whether it had a host before: the explanations of earlier attempts are kept."""
        return bool(self.tried)

    def prefer_others(self, host: str, reason: str) -> None:
        """Note that an attempt on a host does not count, and prefer other hosts from now on.

        The host lacked something for the moment, or was down or stopped.
        """
        self.tried = [each for each in self.tried if each != host]
        self.unpreferred = sorted({*self.unpreferred, host})
        self.last_error = reason


class RequestedPayload(PlacedPayload, kw_only=True):
    """The payload of a kind for which a user may request a host."""

    requested_host: str | None = None  # no other host is tried
    forced: bool = False  # the requested host is forced: see `RequestSpec.forced`


class BuildPayload(PlacedPayload, kw_only=True):
    """The payload of a build; there is one for each server of a request."""

    wait_for_plugs: list[str] = []
    dispatches: list[BuildTimes] = []  # one for each dispatch, also to hosts that went down
    went_down: list[str] = []  # the hosts that went down while they built it, and others did not
    volumes: bool = False  # the server has some
    volume_error: str = ""  # why a volume of the server could not be made
    needs_decryption: bool = False  # hosts that do not decrypt volumes are left out, if there are others

    @property
    def placed_before(self) -> bool:
        """Whether it had a host before, which may be down or stopped since."""
        return bool(self.dispatches)


class PowerPayload(Payload, kw_only=True):
    """Which server action this is, and its parameters."""

    action: str
    parameters: dict[str, str] = {}


class RescuePayload(PowerPayload, kw_only=True):
    """A rescue: the image that the guest boots from meanwhile."""

    image: ImageMeta


class PasswordPayload(PowerPayload, kw_only=True):
    """A new password, which is among the operation's secrets, and why it was not set."""

    error_code: str | None = None
    error: str = ""


class RebuildPayload(Payload, kw_only=True):
    """What a rebuild replaces, and what the server becomes."""

    previous_image_ref: str | None
    previous_image: ImageData | None  # put back if the guest is as it was when the rebuild fails
    begun: bool = False  # the host may have begun to replace the guest
    unchanged: bool = False  # the host has said so, and has not got the order again since
    stopped: bool  # the server was stopped: its new guest is not started
    reimage: bool = False  # the root disk is a volume, which gets the image
    asked: bool = False  # the volume service is writing the image, or has done it


class InterfacePayload(Payload, kw_only=True):
    """The interface to attach or detach, and the result."""

    request: PlannedPort | None = None  # the port to attach
    port_id: str | None = None
    wait_for_plugs: list[str] = []
    error_code: str | None = None  # why an attachment is being undone
    error: str = ""

    def version_of(self, kind: str) -> int:
        """Return 1 if nothing has to be claimed for the port."""
        claims = self.request is not None and self.request.resources is not None
        return VERSIONS[kind] if claims else 1


class VolumePayload(Payload, kw_only=True):
    """The volume to attach, to detach, to replace or that was extended, and the result."""

    device_uuid: str  # of the BlockDevice
    volume_id: str
    size_gb: int | None = None  # of a volume that was extended
    replacement: BlockDevice | None = None  # the device with the volume that takes the place of this one
    error_code: str | None = None
    error: str = ""


class ReleasedVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume that a server does not use any more."""

    volume_id: str
    attachment_id: str | None = None
    delete: bool = False  # the volume goes with its server


class SettlePayload(Payload, kw_only=True):
    """What is left to tell the volume service after a change of a server."""

    complete: list[str] = []  # attachments that the server has now
    release: list[ReleasedVolume] = []
    keep: list[str] = []  # volumes that were to be detached, and stay
    all_attachments: bool = False  # the server is gone: no attachment of it may be left
    reserved: list[str] = []  # volumes that a request has perhaps reserved for the server, which may not have them
    unrecorded: list[str] = []  # devices whose volumes go with the server, and may have been made and not recorded

    def version_of(self, kind: str) -> int:
        """Return 1 if all is in the fields that the first version knew."""
        return VERSIONS[kind] if self.reserved or self.unrecorded else 1


class ImagePayload(Payload, kw_only=True):
    """What becomes of the image of a server, and of earlier ones. The image has the operation's id."""

    answered: bool = False  # the image service has told the API that the image exists, or that it refused it
    excess: list[str] = []  # of a backup: older ones to delete when it is complete
    kept: bool = True  # False: the image itself is one of those
    error: str = ""  # why the image is being deleted
    volumes: list[str] = []  # of which snapshots are made for the image
    without_image: bool = False  # of a shelve: the root disk is a volume, of which no image is made


class ChosenPayload(RequestedPayload, kw_only=True):
    """The payload of a kind for which the scheduler chooses a host for a server that exists already."""

    chosen: Selection | None = None  # the host of this attempt
    error: str = ""  # why the work is being undone

    @property
    def placed_before(self) -> bool:
        """Whether it had a host before."""
        return self.chosen is not None


class MigrationReference(Payload, kw_only=True):
    """What the payloads of all kinds have that move a server, or end a move."""

    migration: str  # its uuid


class MigrationPayload(ChosenPayload, kw_only=True):
    """The payload of a kind that moves a server to a host that the scheduler chooses."""

    migration: str  # as in MigrationReference


class MovePayload(MigrationPayload, kw_only=True):
    """The payload of a resize, of a cold and of a live migration."""

    excluded: list[str] = []  # hosts that the scheduler must not choose: the server's own, if that is not allowed
    disk_config: str | None = None  # AUTO or MANUAL, if the request says so
    migrate_data: bytes = b""  # what the source has sent for the destination
    # The move is being undone, and the destination may have made the guest. Older versions know it as `arrived`.
    sent: bool = msgspec.field(default=False, name="arrived")
    # The undo waits until the destination has removed its guest, which may run. Older versions know it as `waits`.
    undo_awaits_removal: bool = msgspec.field(default=False, name="waits")
    answers_after_checks: bool = False  # the request, an old live migration, is answered when hosts have been checked


class ResizedPayload(MigrationReference, kw_only=True):
    """The payload of the confirmation and of the revert of a resize."""

    begun: bool = False  # the host that has to remove its guest may have begun
    # Of a revert: host, node and zone that the server belonged to, in case it stays there.
    destination: dict[str, Any] = {}


class UndoPayload(MigrationReference, kw_only=True):
    """A move that a later request has ended."""

    host: str  # that has the guest
    sent: bool = msgspec.field(name="arrived")  # as in MovePayload
    undo_awaits_removal: bool = msgspec.field(default=False, name="waits")  # as in MovePayload, of the other host


class EvacuatePayload(MigrationPayload, kw_only=True):
    """The payload of an evacuation."""

    stops: bool = False  # the server is stopped when it is built
    marked: bool = False  # the server had no task state when the request was accepted, and got that of the evacuation
    interrupted: bool = False  # other work on the server was ended when the evacuation began
    lost: bool = True  # False: it was given up because the server's host is not lost


class UnshelvePayload(ChosenPayload, kw_only=True):
    """The payload of the unshelving of a server that has no host."""

    image: ImageMeta | None = None  # the image of its disk, if it is local, as the first attempt has found it
    image_gone: bool = False  # there is no such image: no host was looked for
    wait_for_plugs: list[str] = []


class DiscardPayload(Payload, kw_only=True):
    """The image of a server that is shelved no more."""

    image_id: str
