"""The user id of each guest: QEMU of every guest runs as a user of its own.

The ids need no names in /etc/passwd. They come from a range that distributions, systemd, containers and directory
services leave alone. Each cloud has a block of that range, which follows from its id, so that two clouds of a machine
do not share ids; root gives a new cloud an id whose block no other cloud of the machine has, and refuses an existing
one whose block another has (cli/root_records.py).
"""

import hashlib
from collections.abc import Collection
from typing import Final

from micronova.objects.errors import InsufficientResources, Invalid

BLOCK: Final = 4096
"""How many ids a cloud has on a host."""
_FIRST, _LAST = 65_536, 4_294_967_293  # below are ids of 16 bits, above those that mean nobody


def guest_ids(ids: str, cloud_id: str) -> range:
    """Return the ids of a cloud's guests in a range that is written FIRST-LAST."""
    first, _, last = ids.partition("-")
    if not (first.isdecimal() and last.isdecimal() and _FIRST <= int(first) <= int(last) <= _LAST):
        raise Invalid(
            f"libvirt.guest_uids is {ids!r}: it has to be FIRST-LAST, two numbers between {_FIRST} and {_LAST}."
        )
    begin, end = int(first), int(last) + 1
    blocks = (end - begin) // BLOCK
    if blocks < 2:
        return range(begin, end)
    number = int.from_bytes(hashlib.sha256(cloud_id.encode()).digest()[:8]) % blocks
    return range(begin + number * BLOCK, begin + (number + 1) * BLOCK)


def free_id(ids: range, taken: Collection[int]) -> int:
    """Return an id that no guest has; raise InsufficientResources if there is none."""
    found = next((each for each in ids if each not in taken), None)
    if found is None:
        raise InsufficientResources(
            f"This host has no user id left for a guest: its {len(ids)} ids from {ids.start} on are taken."
        )
    return found
