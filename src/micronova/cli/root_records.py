"""Root's own records of which cloud each directory has.

DIR belongs to the service user. The id of a cloud, in DIR/keys.json, decides which namespaces, devices and guests root
makes and removes for it. A service user who writes another cloud's id there must not make root remove that cloud's. So
root writes the id down where only root can, when it starts a cloud, and refuses a directory whose file says otherwise.
"""

import contextlib
import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from micronova.cli.state import StateDirectory
from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import MicronovaError
from micronova.privileged.names import prefix_of
from micronova.virt.libvirt.storage.guest_users import guest_ids

RECORDS = Path("/var/lib/micronova-clouds")
ATTEMPTS = 100  # ids that are tried for a new cloud


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud of a directory."""

    directory: str
    cloud_id: str


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one process of root's at a time create what the clouds of this machine share: users, ids, records."""
    RECORDS.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def make_keys(place: StateDirectory) -> None:
    """Make the keys of a new cloud in DIR, with an id that is unlike those of the machine's other clouds; record it.

    An older record was of a directory that is gone. The record is written first: a start that is interrupted between
    both leaves a directory without keys, and the next one begins anew.
    """
    directory = str(place.path.resolve())
    with locked():
        records = _read()
        for _ in range(ATTEMPTS):
            new = str(uuid.uuid4())
            if _collision(directory, new, records) is None:
                _write(Record(directory=directory, cloud_id=new))
                place.make_keys(new)
                return
    raise MicronovaError(
        f"No id for a new cloud was found that differs enough from those of the {len(records)} clouds in {RECORDS}: "
        "delete the directories of clouds that are not used any more."
    )


def cloud_id(place: StateDirectory) -> str:
    """Return the id of the cloud in DIR, and record it if DIR has no record; raise an error if the record differs."""
    found = place.keys().cloud_id
    if os.geteuid() != 0:
        return found
    directory = str(place.path.resolve())
    with locked():
        records = _read()
        known = records.get(directory)
        if known == found:
            return found
        if known is not None:
            raise MicronovaError(
                f"{place.path / 'keys.json'} names another cloud than root has recorded for this directory. "
                f"If you put another cloud there, delete {_file(directory)}."
            )
        collision = _collision(directory, found, records)
        if collision is not None:
            raise MicronovaError(collision)
        _write(Record(directory=directory, cloud_id=found))
        return found


def _collision(directory: str, id: str, records: Mapping[str, str]) -> str | None:
    """Return why a directory cannot have a cloud with this id beside the recorded ones; None if it can."""
    ids = guest_ids(LibvirtSettings().guest_uids, id)
    for other, other_id in records.items():
        if other == directory:
            continue
        if prefix_of(other_id) == prefix_of(id):  # of the names that root gives to what it makes for a cloud
            return f"{directory} has the id of the cloud in {other}: two clouds cannot share one."
        if guest_ids(LibvirtSettings().guest_uids, other_id) == ids:
            return (
                f"The guests of {directory} would have the user ids of those of {other}. This is rare: a cloud that "
                "root starts in a new directory chooses other ids. Move one of the two clouds to another machine."
            )
    return None


def _file(directory: str) -> Path:
    return RECORDS / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()[:32]}.json"


def _read() -> dict[str, str]:
    """Return the ids by directory; records of directories that are gone are removed."""
    found: dict[str, str] = {}
    for file in sorted(RECORDS.glob("*.json")) if RECORDS.is_dir() else ():
        try:
            record = msgspec.json.decode(file.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            continue
        if Path(record.directory).is_dir():
            found[record.directory] = record.cloud_id
        else:
            file.unlink(missing_ok=True)
    return found


def _write(record: Record) -> None:
    file = _file(record.directory)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(file)
