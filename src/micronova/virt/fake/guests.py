"""The guests of one simulated host, stored in a file so that they outlive the agent as real guests do.

The file is a journal of JSON lines: each change of a guest appends the whole guest, each removal its uuid. A killed
process loses nothing that it has written. An incomplete last line is a change that did not happen. There is no fsync: a
guest does not survive its machine either.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from micronova.objects import power_state
from micronova.objects.topology import Assignment

COMPACT_ABOVE = 1_000
"""Lines; a shorter journal is not rewritten."""


class FakeInterface(msgspec.Struct, kw_only=True, frozen=True):
    """An interface of a simulated guest."""

    port: str
    mac: str
    addresses: tuple[str, ...] = ()


class FakeDisk(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A disk of a simulated guest, on the host where the guest is."""

    name: str  # root | ephemeral | swap
    size_gb: int
    boots: int = 0  # how often its guest has booted, which the operating system has written to it
    text: str = ""  # what the guest has written to it


class FakeVolume(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A volume of a simulated guest."""

    volume_id: str
    attachment_id: str
    device: str  # such as /dev/vdb
    size: int | None = None  # bytes, as the guest knows it
    root: bool = False  # the guest boots from it
    read_only: bool = False
    tag: str | None = None
    encrypted: bool = False


class FakeMdev(msgspec.Struct, kw_only=True, frozen=True):
    """A mediated device that a simulated host has made for a guest."""

    uuid: str
    parent: str
    mdev_type: str


class FakeSize(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a guest was before it was resized, kept until that is confirmed or reverted."""

    epoch: int
    vcpus: int
    memory_mb: int
    local_gb: int
    claimed: dict[str, int] | None = None
    disks: tuple[FakeDisk, ...] = ()
    assignment: Assignment | None = None
    mdevs: tuple[FakeMdev, ...] = ()


class FakeGuest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A simulated guest."""

    uuid: str
    cloud: str
    node: str
    epoch: int
    name: str = ""
    hostname: str = ""
    project_id: str = ""
    power_state: int = power_state.NOSTATE
    vcpus: int = 0
    memory_mb: int = 0
    local_gb: int = 0
    claimed: dict[str, int] | None = None  # of its node; None of a guest that an earlier version made
    assignment: Assignment | None = None  # its host CPUs, memory pages and PCI devices
    mdevs: tuple[FakeMdev, ...] = ()
    image: str = ""
    kernel: str = ""  # the name of its image; empty: it boots from its disk
    interfaces: tuple[FakeInterface, ...] = ()
    disks: tuple[FakeDisk, ...] = ()
    volumes: tuple[FakeVolume, ...] = ()
    previous: FakeSize | None = None
    sent: int | None = None  # its power state before it was sent to another host; it waits for the end of that
    metadata: dict[str, str] = {}
    boots: int = 0
    booted_at: float = 0.0
    silent_for: float = 0.0  # seconds after that until it begins to boot
    hung: tuple[int, ...] = ()  # numbers, from 1, of those boots that hang
    rescue_epoch: int | None = None  # of the order that rescued it; None if it boots from its own disk
    rescues: tuple[tuple[int, str], ...] = ()  # numbers of the boots from rescue images, with the images' names
    rescue_kernels: tuple[tuple[int, str], ...] = ()  # likewise with the names of the kernels, if there are any
    frozen: bool = False  # its file systems, for a snapshot of its volumes
    interrupts: int = 0  # non-maskable ones since its last boot

    @property
    def pcpus(self) -> int:
        """The host CPUs that it has for itself."""
        return 0 if self.assignment is None else self.assignment.pinned

    @property
    def shared_vcpus(self) -> int:
        """The vCPUs that share host CPUs with others."""
        pinned = 0 if self.assignment is None else sum(len(cell.pins) for cell in self.assignment.cells)
        return self.vcpus - pinned

    @property
    def hangs(self) -> bool:
        """Whether its last boot hangs."""
        return self.boots in self.hung


class _Line(msgspec.Struct, omit_defaults=True):
    guest: FakeGuest | None = None
    gone: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode


class GuestStore:
    """All guests of a host, of any cloud; without a path they are in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._guests: dict[str, FakeGuest] = {}
        self._lines = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._load(path)

    def get(self, uuid: str) -> FakeGuest | None:
        """Return a guest, or None."""
        return self._guests.get(uuid)

    def __iter__(self) -> Iterator[FakeGuest]:
        return iter(self._guests.values())

    def put(self, guest: FakeGuest) -> None:
        """Store a guest as it is now."""
        self._guests[guest.uuid] = guest
        self._append(_Line(guest=guest))

    def remove(self, uuid: str) -> None:
        """Remove a guest."""
        if self._guests.pop(uuid, None) is not None:
            self._append(_Line(gone=uuid))

    def _append(self, line: _Line) -> None:
        if self._path is None:
            return
        # Opened each time: thousands of hosts in one process would otherwise keep a descriptor each.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, _encode(line) + b"\n")
        finally:
            os.close(descriptor)
        self._lines += 1
        if self._lines > COMPACT_ABOVE and self._lines > 4 * len(self._guests):
            self._rewrite(self._path)

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        torn = False
        for number, raw in enumerate(lines, 1):
            try:
                line = _decode(raw)
            except msgspec.DecodeError:
                if number < len(lines):
                    raise
                torn = True
                break
            if line.guest is not None:
                self._guests[line.guest.uuid] = line.guest
            elif line.gone is not None:
                self._guests.pop(line.gone, None)
        self._lines = len(lines)
        if torn or self._lines > 2 * len(self._guests):
            self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        """Replace the journal by one line per guest."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_bytes(b"".join(_encode(_Line(guest=guest)) + b"\n" for guest in self._guests.values()))
        fresh.chmod(0o600)
        os.replace(fresh, path)
        self._lines = len(self._guests)
