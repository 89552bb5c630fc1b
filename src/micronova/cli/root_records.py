"""Root's own records of which cloud each directory has.

DIR belongs to the service user. The id of a cloud, in DIR/keys.json, decides which namespaces, devices and guests root
makes and removes for it. A service user who writes another cloud's id there must not make root remove that cloud's. So
root writes the id down where only root can, when it starts a cloud, and refuses a directory whose file says otherwise.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from micronova.cli.state import StateDirectory
from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import MicronovaError
from micronova.privileged.names import prefix_of
from micronova.virt.libvirt.storage.guest_users import guest_ids

RECORDS = Path("/var/lib/micronova-clouds")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud of a directory."""

    directory: str
    cloud_id: str


def cloud_id(place: StateDirectory, *, new: bool = False) -> str:
    """Return the id of the cloud in DIR, and record it if DIR has no record; raise an error if the record differs.

    With `new`, root has just made the keys: an older record was of a directory that is gone.
    """
    found = place.keys().cloud_id
    if os.geteuid() != 0:
        return found
    directory = str(place.path.resolve())
    records = _read()
    known = records.get(directory)
    if known == found:
        return found
    if known is not None and not new:
        raise MicronovaError(
            f"{place.path / 'keys.json'} names another cloud than root has recorded for this directory. "
            f"If you put another cloud there, delete {_file(directory)}."
        )
    # By the prefix of the names that root gives to what it makes for a cloud.
    other = next(
        (other for other, id in records.items() if other != directory and prefix_of(id) == prefix_of(found)), None
    )
    if other is not None:
        raise MicronovaError(f"{place.path} has the id of the cloud in {other}: two clouds cannot share one.")
    ids = guest_ids(LibvirtSettings().guest_uids, found)
    other = next(
        (
            other
            for other, id in records.items()
            if other != directory and guest_ids(LibvirtSettings().guest_uids, id) == ids
        ),
        None,
    )
    if other is not None:
        raise MicronovaError(
            f"The guests of {place.path} would have the user ids of those of {other}, by an accident that is rare: "
            f"delete {place.path / 'keys.json'} if the cloud is new, or move it to another machine."
        )
    _write(Record(directory=directory, cloud_id=found))
    return found


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
    RECORDS.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _file(record.directory)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(file)
