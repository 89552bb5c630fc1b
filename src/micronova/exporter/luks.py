"""The header of an encrypted volume: how long QEMU takes to derive the key before it reads the volume.

A guest cannot write the header, but a QEMU that it has taken over can. The header says in how many rounds the key is
derived, up to four billion for each of eight places. That takes QEMU hours, and a thread that starts guests with it.
"""

import struct
from typing import Final

HEADER: Final = 592
"""Bytes of the header that say how the key is derived."""
MOST_ROUNDS: Final = 4_000_000
"""In all: a second or two. The volume service makes headers with less than a tenth of that."""
_MAGIC: Final = b"LUKS\xba\xbe"
_DIGEST: Final = struct.Struct(">164xI")  # after it: the rounds of what the key is compared with
_PLACES_AT, _PLACES, _PLACE = 208, 8, struct.Struct(">II40x")  # whether it is used, and its rounds
_USED: Final = 0x00AC71F3


def rounds(header: bytes) -> int:
    """Return the rounds that the beginning of a volume asks for; 0 if it is no header, which QEMU refuses at once."""
    if len(header) < HEADER or not header.startswith(_MAGIC):
        return 0
    [of_digest] = _DIGEST.unpack_from(header)
    places = _PLACE.iter_unpack(header[_PLACES_AT : _PLACES_AT + _PLACES * _PLACE.size])
    return sum(of_place + of_digest for used, of_place in places if used == _USED)
