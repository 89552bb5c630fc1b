"""What the row of a shelved server keeps in its system metadata, under Nova's names."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from micronova.objects.instance import InstanceRow

SHELVED_AT: Final = "shelved_at"
SHELVED_IMAGE: Final = "shelved_image_id"
SHELVED_HOST: Final = "shelved_host"
KEYS: Final = frozenset({SHELVED_AT, SHELVED_IMAGE, SHELVED_HOST})


def image_of(row: InstanceRow) -> str | None:
    """Return the image that a shelve has made from a server, if the server still has one."""
    return (row["system_metadata"] or {}).get(SHELVED_IMAGE)


def shelved(row: InstanceRow, image_id: str, now: int) -> dict[str, str]:
    """Return the system metadata of a server that was shelved now (microseconds) on its host."""
    added = {SHELVED_AT: instant(now), SHELVED_IMAGE: image_id, SHELVED_HOST: row["host"] or ""}
    return {**(row["system_metadata"] or {}), **added}


def without(system_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return system metadata without what a shelve has added."""
    return {key: value for key, value in (system_metadata or {}).items() if key not in KEYS}


def instant(at: int) -> str:
    """Return a time as the system metadata has it: such texts are in the order of their times."""
    return datetime.fromtimestamp(at / 1e6, UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
