"""Formats that other programs may recognise in a file. We refuse them: nobody needs them here, and each is a risk."""

from micronova.imageformat.reader import Reader

_AT_START = {
    "luks": b"LUKS\xba\xbe",
    "qcow": b"QFI\xfb\0\0\0\1",
    "qed": b"QED\0",
    "cow": b"OOOM",
    "parallels": b"WithoutFreeSpace",
    "ploop": b"WithouFreSpacExt",
    "bochs": b"Bochs Virtual HD Image",
    "cloop": b"#!/bin/sh\n#V2.0 Format",
}
_DMG_TRAILER = 512


def names(reader: Reader) -> list[str]:
    """Return the foreign formats that a program may take the file for."""
    start = reader.some(0, 32)
    found = [name for name, magic in _AT_START.items() if start.startswith(magic)]
    if reader.size >= _DMG_TRAILER and reader.some(reader.size - _DMG_TRAILER, 4) == b"koly":
        found.append("dmg")
    return found
