"""Makes a disk that a BIOS boots: one FAT partition with kernel, initial file system and the boot loader Syslinux."""

import os
import struct
import subprocess
from pathlib import Path

from micronova.objects.errors import MicronovaError

_SECTOR = 512
_START = 2048  # sectors before the partition: the usual alignment
_SIZE = 16 << 20  # the disk's size is a multiple of this, which suits all formats
_FAT16_LBA, _ACTIVE = 0x0E, 0x80

_CONFIGURATION = """\
DEFAULT guest
PROMPT 0
LABEL guest
  LINUX /vmlinuz
  INITRD /initrd
  APPEND console=tty1 console=ttyS0,115200 quiet scsi_mod.scan=sync mitigations=off nokaslr no_timer_check
"""
# no_timer_check: an emulator on a busy machine delivers timer interrupts so late that the kernel's check of them fails.


def assemble(root: Path, kernel: Path, initrd: Path, work: Path) -> bytes:
    """Return the disk's bytes; `root` has the boot loader and the tools that write FAT."""
    content = kernel.stat().st_size + initrd.stat().st_size
    size = -(-(content + (2 << 20)) // _SIZE) * _SIZE
    partition = work / "partition"
    sectors = size // _SECTOR - _START
    configuration = work / "syslinux.cfg"
    configuration.write_text(_CONFIGURATION)
    tools = root / "usr" / "bin"

    def run(*command: str) -> None:
        environment = {**os.environ, "PATH": f"{tools}:{os.environ.get('PATH', '')}", "MTOOLS_SKIP_CHECK": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise MicronovaError(f"The test image cannot be built: {command[0]} failed: {done.stderr.strip()[-300:]}")

    with partition.open("wb") as file:
        file.truncate(sectors * _SECTOR)
    image = ("-i", str(partition))
    run("mformat", *image, "-T", str(sectors), "-h", "255", "-s", "63", "-H", str(_START), "-c", "4", "-N", "0", "::")
    run("mcopy", *image, str(kernel), "::/vmlinuz")
    run("mcopy", *image, str(initrd), "::/initrd")
    run("mcopy", *image, str(configuration), "::/syslinux.cfg")
    run("syslinux", "--install", str(partition))
    loader = next(root.glob("usr/lib/**/mbr/mbr.bin")).read_bytes()
    return _master_boot_record(loader, sectors).ljust(_START * _SECTOR, b"\0") + partition.read_bytes()


def _master_boot_record(loader: bytes, sectors: int) -> bytes:
    unused = b"\xfe\xff\xff"  # cylinder, head and sector: readers use the sector numbers that follow
    entry = struct.pack("<B3sB3sII", _ACTIVE, unused, _FAT16_LBA, unused, _START, sectors)
    return loader[:440].ljust(446, b"\0") + entry.ljust(64, b"\0") + b"\x55\xaa"
