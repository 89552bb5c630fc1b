"""What the exporter is asked, and what it answers: one packet each, with the descriptors that belong to it."""

import re
from typing import Final

import msgspec

LIMIT: Final = 1 << 16  # bytes of one packet
FILE_NAME: Final = re.compile(r"[0-9a-f][0-9a-f-]{0,63}(\.[0-9a-z-]{1,64}){0,3}")
SOCKET: Final = "nbd"
"""The name of the socket in the directory of a volume."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="ask", forbid_unknown_fields=True):
    """Something that the exporter is asked for."""


class Serve(Request, frozen=True, kw_only=True, tag="serve"):
    """Serve a volume for as long as `StopServing` is not asked for.

    Descriptors: the volume's file, and a directory that has the files of copies.
    """

    volume_id: str
    readonly: bool


class StopServing(Request, frozen=True, kw_only=True, tag="end"):
    """Stop serving a volume. Copies that are running are finished."""

    volume_id: str


class Served(Request, frozen=True, kw_only=True, tag="inventory"):
    """List the volumes that are served."""


class Resize(Request, frozen=True, kw_only=True, tag="resize"):
    """Show the new size of its file to those who use a volume; do nothing if it is not served."""

    volume_id: str
    size: int  # bytes


class Copy(Request, frozen=True, kw_only=True, tag="copy"):
    """Copy a volume, as it is at one moment, to a file of the same size; descriptors as for `Serve`."""

    volume_id: str
    name: str  # of the file, in the directory


class Watch(Request, frozen=True, kw_only=True, tag="watch"):
    """Keep the connection open. The client sees that the exporter has ended when the connection closes."""


class Allow(Request, frozen=True, kw_only=True, tag="allow"):
    """Let a user connect to a volume that is served."""

    volume_id: str
    uid: int
    encrypted: bool = False  # the guest's QEMU derives the key as the volume's header says


class Refuse(Request, frozen=True, kw_only=True, tag="refuse"):
    """Take away a user's right to connect to one volume, or to all."""

    uid: int
    volume_id: str | None = None


FromService = Serve | StopServing | Served | Resize | Copy | Watch
"""What the volume service may ask for."""
FromAgent = Allow | Refuse
"""What the agent of this host may ask for."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. A copy has several: the last one is `final`."""

    error: str = ""
    kind: str = ""  # of the error: missing, full, unavailable or failed
    volumes: tuple[str, ...] = ()
    done: int = 0  # bytes of a copy
    final: bool = True
