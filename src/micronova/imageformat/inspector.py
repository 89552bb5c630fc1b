"""Detects the format of a disk image from its headers, and whether it is safe for any tool to open.

Images come from users, and QEMU's formats can name other files on the host. So this runs before any tool opens a file.
Nothing is executed, a bounded number of bytes is read, and what the file says is checked. All formats are searched for,
not only the declared one: a file that could be of two formats is refused, as another program might choose the other.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from micronova.imageformat import foreign, iso, qcow2, vdi, vhd, vhdx, vmdk
from micronova.imageformat.reader import Format, Reader
from micronova.imageformat.report import Finding, ImageInfo, Malformed, Report
from micronova.objects.errors import Invalid

_FORMATS: dict[str, Format] = {
    "qcow2": qcow2,
    "vmdk": vmdk,
    "vhd": vhd,
    "vhdx": vhdx,
    "vdi": vdi,
    "iso": iso,
}

RAW_FORMATS: Final = ("raw", "iso", "ami")
"""The `disk_format`s of images whose data is that of the disk."""

# What may be declared, and what the content may then be. To QEMU and to a guest an ISO is a raw disk; but a raw disk
# that is declared as an ISO is refused, because the user expects a CD.
_ACCEPTED = {name: (name,) for name in _FORMATS} | dict.fromkeys(("raw", "ami"), ("raw", "iso"))
_ACCEPTED |= {"aki": ("raw",), "ari": ("raw",)}  # the formats of kernels and ramdisks are not inspected


def inspect(source: Path | str | BinaryIO) -> ImageInfo:
    """Return what is known of a file, or of a stream that can seek; its findings are reasons to refuse it."""
    if not isinstance(source, Path | str):
        position = source.tell()
        try:
            return _inspect(Reader(source))
        finally:
            source.seek(position)
    # Without O_NONBLOCK, opening a FIFO or a device may block for ever.
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Invalid("The image is not a regular file.")
        with open(descriptor, "rb", buffering=0, closefd=False) as stream:
            return _inspect(Reader(stream))
    finally:
        os.close(descriptor)


def _inspect(reader: Reader) -> ImageInfo:
    found = [name for name, each in _FORMATS.items() if each.matches(reader)]
    unsupported = foreign.names(reader)
    report = Report()
    if not found and not unsupported:
        report.virtual_size = reader.size
    for name in found:
        try:
            _FORMATS[name].examine(reader, report)
        except Malformed as error:
            report.findings.append(error.finding)
    if unsupported:
        report.refuse("unsupported", f"It is {_list(unsupported)}, which is not supported here.")
    if len(found) + len(unsupported) > 1:
        report.refuse("polyglot", f"It is {_list(found + unsupported)} at once: one must be cut away.")
        report.virtual_size = None
    return ImageInfo(
        format=(found + unsupported + ["raw"])[0],
        virtual_size=report.virtual_size,
        file_size=reader.size,
        partitions=_partitions(reader) if found in ([], ["iso"]) else None,
        findings=tuple(dict.fromkeys(report.findings)),
    )


def check(source: Path | str | BinaryIO, declared_format: str, *, max_virtual_size: int | None = None) -> ImageInfo:
    """Return what is known of a file; raise Invalid if it is not of the declared format, is unsafe, or is too large."""
    info = inspect(source)
    refuse(info, declared_format, max_virtual_size=max_virtual_size)
    return info


def refuse(info: ImageInfo, declared_format: str, *, max_virtual_size: int | None = None) -> None:
    """Raise Invalid if an inspected image must not be used in its declared format."""
    accepted = _ACCEPTED.get(declared_format)
    if accepted is None:
        raise Invalid(f"Images with disk_format {declared_format!r} are not supported: use {_list(list(_ACCEPTED))}.")
    if any(finding.code == "polyglot" for finding in info.findings):
        raise Invalid(f"The image is ambiguous. {_sentences(info.findings[-1:])}")
    if info.format not in accepted:
        hint = ": declare what it is, or convert it" if info.format in _ACCEPTED else ", which is not supported"
        raise Invalid(f"The image is declared as {declared_format!r}, but its content is {info.format}{hint}.")
    if info.findings:
        raise Invalid(f"The {info.format} image is refused as unsafe. {_sentences(info.findings)}")
    if max_virtual_size is not None and (info.virtual_size or 0) > max_virtual_size:
        raise Invalid(
            f"The disk in the {info.format} image has {info.virtual_size} bytes: at most {max_virtual_size} may be."
        )


def _partitions(reader: Reader) -> str | None:
    if any(reader.some(sector, 8) == b"EFI PART" for sector in (512, 4096)):
        return "gpt"
    return "mbr" if reader.some(510, 2) == b"\x55\xaa" else None


def _list(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} or {names[-1]}"


def _sentences(findings: tuple[Finding, ...]) -> str:
    return " ".join(finding.message for finding in findings[:3])
