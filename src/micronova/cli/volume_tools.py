"""The host's `qemu-img` for the embedded volume service, which knows its failures by other errors than compute does."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from micronova.embedded.volume.backend.luks import Cipher
from micronova.objects.errors import Invalid


async def convert(source: Path, source_format: str, target: Path, size: int) -> None:
    """Convert an inspected image to a raw file; raise OSError if the disk is full, Invalid if that is impossible."""
    from micronova.virt.libvirt.storage import tools

    with _failures():
        await tools.convert(source, _name_in_qemu(source_format), target, size)


class QemuLuks:
    """Implements `embedded.volume.backend.luks.LuksTool` by a program that opens nothing else."""

    async def format(self, target: Path, size: int, cipher: Cipher, passphrase: str) -> None:
        """Make a file for a volume that nothing was written to."""
        from micronova.virt.libvirt.storage import tools

        options = f"cipher-alg={cipher.algorithm},cipher-mode={cipher.mode},ivgen-alg={cipher.iv_generator}"
        if cipher.iv_hash is not None:
            options += f",ivgen-hash-alg={cipher.iv_hash}"
        with _disk_full():
            await tools.create_luks(target, size, f"{options},hash-alg=sha256", passphrase)

    async def write(self, source: Path, source_format: str, target: Path, passphrase: str, size: int) -> None:
        """Write an image, which was inspected, to a file of `format`; raise as `convert` does."""
        from micronova.virt.libvirt.storage import tools

        with _failures():
            await tools.write_luks(source, _name_in_qemu(source_format), target, passphrase, size)


def _name_in_qemu(disk_format: str) -> str:
    return {"vhd": "vpc"}.get(disk_format, disk_format)


@contextlib.contextmanager
def _disk_full() -> Iterator[None]:
    """Raise OSError for a full disk. An agent waits for space; a volume fails, so that its user learns it."""
    from micronova.virt.libvirt.storage import tools

    try:
        yield
    except tools.DiskFull as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise OSError for a full disk, and Invalid for an image that the program does not read."""
    from micronova.virt.driver import DriverFailed

    with _disk_full():
        try:
            yield
        except DriverFailed as error:
            raise Invalid(f"{error} {error.details.get('details', '')}".strip()) from error
