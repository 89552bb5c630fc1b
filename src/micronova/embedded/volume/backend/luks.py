"""LUKS, as QEMU reads and writes it: a header, and behind it the data of the volume.

A file of an encrypted volume is larger than the volume, by its header. Guests do not see the header and cannot write
it: they reach the file through the QEMU that has the key.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

DEFAULT_KEY_BITS: Final = 256
_MAGIC: Final = b"LUKS\xba\xbe"
_VERSION: Final = 1
_PAYLOAD_AT: Final = 104  # of the header: the first sector of the data
_SECTOR: Final = 512
_LARGEST_HEADER: Final = 4 << 20  # bytes; one with the longest keys has 2 MiB
_BITS: Final = {
    "aes": (128, 192, 256),
    "serpent": (128, 192, 256),
    "twofish": (128, 192, 256),
}
_MODES: Final = ("xts", "cbc")
_IV_GENERATORS: Final = ("plain", "plain64")
_ESSIV: Final = "essiv:sha256"


class BadCipher(Exception):
    """QEMU does not know a cipher; the message says why."""


@dataclass(frozen=True)
class Cipher:
    """A cipher by QEMU's names."""

    algorithm: str  # with the bits of its key, such as aes-256
    mode: str
    iv_generator: str
    iv_hash: str | None = None


class LuksTool(Protocol):
    """Makes the files of encrypted volumes. Raises OSError if the disk is full."""

    async def format(self, target: Path, size: int, cipher: Cipher, passphrase: str) -> None:
        """Make a file for a volume of `size` bytes that nothing was written to."""

    async def write(self, source: Path, source_format: str, target: Path, passphrase: str, size: int) -> None:
        """Write an image, which was inspected, to a file of `format`; what follows the image stays as it is.

        Raise Invalid if the image cannot be read.
        """


def cipher_of(spec: str | None, key_size: int | None) -> Cipher:
    """Return the cipher that a volume type names as dm-crypt does (aes-xts-plain64); raise BadCipher."""
    parts = (spec or "aes-xts-plain64").lower().split("-", 2)
    if len(parts) != 3:
        raise BadCipher(f"the cipher {spec} must have an algorithm, a mode and a generator: aes-xts-plain64.")
    name, mode, generator = parts
    if name not in _BITS or mode not in _MODES:
        raise BadCipher(f"the cipher {spec} must be one of {', '.join(_BITS)} with the mode {' or '.join(_MODES)}.")
    bits = key_size or DEFAULT_KEY_BITS
    if mode == "xts" and bits == 512:
        bits = 256  # dm-crypt counts both halves of the key
    if bits not in _BITS[name]:
        raise BadCipher(f"a key of {key_size} bits is not possible: it must have {', '.join(map(str, _BITS[name]))}.")
    if generator in _IV_GENERATORS:
        return Cipher(f"{name}-{bits}", mode, generator)
    if generator == _ESSIV:
        return Cipher(f"{name}-{bits}", mode, "essiv", "sha256")
    raise BadCipher(f"the generator {generator} must be {', '.join(_IV_GENERATORS)} or {_ESSIV}.")


def header_size(path: Path) -> int:
    """Return the bytes before the data of an encrypted volume's file; raise OSError if it is none. Blocks.

    Guests cannot write the header, but their host can: a stolen one must not choose how large files are.
    """
    with path.open("rb") as stream:
        header = stream.read(_PAYLOAD_AT + 4)
    if len(header) < _PAYLOAD_AT + 4 or header[:6] != _MAGIC or struct.unpack_from(">H", header, 6) != (_VERSION,):
        raise OSError(f"{os.fspath(path)} is not the file of an encrypted volume")
    [sectors] = struct.unpack_from(">I", header, _PAYLOAD_AT)
    size = int(sectors) * _SECTOR
    if not len(header) <= size <= _LARGEST_HEADER:
        raise OSError(f"{os.fspath(path)} is not the file of an encrypted volume: its header says {size} bytes")
    return size
