"""Running the host's programs on guests' files: with explicit formats, confined, and killed with this process."""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from micronova.objects.errors import Unavailable
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.storage import sandbox

log = logging.getLogger(__name__)

PACKAGES = {  # of Debian, by program
    "qemu-img": "qemu-utils",
    "genisoimage": "genisoimage",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "mkswap": "util-linux",
}
_FORMATTERS = {  # the command that makes a file system or swap area, without the label and the file
    "swap": ("mkswap",),
    "ext2": ("mkfs.ext4", "-q", "-F", "-t", "ext2"),
    "ext3": ("mkfs.ext4", "-q", "-F", "-t", "ext3"),
    "ext4": ("mkfs.ext4", "-q", "-F"),
}
FILE_SYSTEMS = tuple(kind for kind in _FORMATTERS if kind != "swap")
GIB = 1024**3
MEMORY_LIMIT = 2 * GIB
MOST_THREADS = 4096
"""Of all processes of the agent's user; the agent has about a hundred. The kernel does not limit root."""
CPU_SECONDS = 60
CPU_SECONDS_PER_GIB = 60
SECONDS_PER_CPU_SECOND = 10
"""A program may run this many times as long as the CPU time that it may use."""
KILL_SECONDS = 5.0
MOST_OUTPUT = 4096
"""Bytes at the end of a program's output that are kept: the last lines say why it failed."""
SECRET_FILE = "/dev/stdin"
_WITH_KEY = ("--object", f"secret,id=key,file={SECRET_FILE}")
_KEY_MILLISECONDS = 10
"""For which QEMU stretches a passphrase. Those of volumes are random keys, which nobody can guess."""
_MEASUREMENTS = 10
_NOT_MEASURED = "Unable to get accurate CPU usage"
"""QEMU says so by chance: if the kernel has counted no CPU time while it measured how fast it derives keys."""
TOO_MUCH_OUTPUT = 1 << 20
"""Bytes after which a program is killed: reading what it says would keep the agent busy."""


class DiskFull(Unavailable):
    """A program has found no space for what it writes."""


async def run(
    *command: str,
    what: str,
    folder: Path,
    reads: Sequence[Path] = (),
    writes: Path,
    file_limit: int,
    memory_limit: int = MEMORY_LIMIT,
    cpu_limit: int = CPU_SECONDS,
    secret: str = "",
) -> None:
    """Run a program that reads users' data, with limits on memory, CPU time and the size of files that it writes.

    It reads `secret` from SECRET_FILE: its command line could be read by everybody on the machine. It can open the
    files that it is given, and the system's code; it has no network and no children (`sandbox.py`).
    It is killed when the caller is cancelled and when this process dies.
    """
    program = command[0]
    path = shutil.which(program)
    if path is None:
        raise LibvirtMissing(f"{program} is missing on this host: install {PACKAGES.get(program, program)}.")
    # The sandbox lets a program write to files that exist; it cannot create any.
    os.close(os.open(writes, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    threads = MOST_THREADS if threads == resource.RLIM_INFINITY else min(threads, MOST_THREADS)
    limits = [f"--as={memory_limit}", f"--cpu={cpu_limit}", f"--fsize={file_limit}", f"--nproc={threads}", "--core=0"]
    privileges = ["--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    confined = [sys.executable, "-I", "-S", sandbox.__file__, "--write", str(writes)]
    for file in reads:
        confined += ["--read", str(file)]
    with _pipe_with(secret) as stdin:
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *privileges, "prlimit", *limits, "--"),
            *(*confined, "--", path, *command[1:]),
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},  # ours may have secrets
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        async with asyncio.timeout(cpu_limit * SECONDS_PER_CPU_SECOND):
            output = await _last_of(process)
            await process.wait()
    except (TimeoutError, asyncio.CancelledError) as error:
        process.kill()
        # A process that hangs in the kernel, on a broken disk, cannot be killed.
        await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=KILL_SECONDS)
        if isinstance(error, TimeoutError):
            raise DriverFailed(f"The host could not {what} in time.") from None
        raise
    if process.returncode == 0:
        return
    said = output.decode(errors="replace").strip().replace("\0", "")
    log.warning("%s ended with %s: %s", program, process.returncode, said)
    if "No space left on device" in said or "Disk quota exceeded" in said:
        raise DiskFull("The host's disk is full.", details=said)
    raise DriverFailed(f"The host could not {what}.", details=f"{program} ended with {process.returncode}: {said}")


@contextlib.contextmanager
def _pipe_with(secret: str) -> Iterator[int]:
    """Yield the end of a pipe from which a short text can be read once; of an empty text, what has nothing to read."""
    if not secret:
        yield asyncio.subprocess.DEVNULL
        return
    end, begin = os.pipe()
    try:
        with open(begin, "w") as stream:
            stream.write(secret)  # less than a pipe holds
        yield end
    finally:
        os.close(end)


async def _last_of(process: asyncio.subprocess.Process) -> bytes:
    """Return the end of a program's output; kill it after TOO_MUCH_OUTPUT: a hostile image may have taken it over."""
    assert process.stdout is not None
    last, total = b"", 0
    while said := await process.stdout.read(MOST_OUTPUT):
        last = (last + said)[-MOST_OUTPUT:]
        before, total = total, total + len(said)
        if before <= TOO_MUCH_OUTPUT < total:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                process.kill()
    return last


def cpu_seconds(size: int) -> int:
    """Return how many seconds of CPU time a program may use for so many bytes."""
    return CPU_SECONDS + CPU_SECONDS_PER_GIB * (size // GIB)


async def convert(source: Path, source_format: str, target: Path, size: int) -> None:
    """Convert an inspected image to a raw file; qemu-img is told its format and never probes it."""
    await run(
        "qemu-img",
        "convert",
        *("-f", source_format, "-O", "raw", "-t", "writeback", "-T", "writeback"),
        str(source),
        str(target),
        what="convert the image",
        folder=target.parent,
        reads=[source],
        writes=target,
        file_limit=size + GIB,
        cpu_limit=cpu_seconds(size),
    )


async def create_luks(target: Path, size: int, options: str, passphrase: str) -> None:
    """Create an encrypted file for a volume of this size; `options` are those of QEMU's driver `luks`."""
    for _ in range(_MEASUREMENTS):
        try:
            return await run(
                "qemu-img",
                "create",
                *("-q", "-f", "luks", *_WITH_KEY, "-o", f"key-secret=key,iter-time={_KEY_MILLISECONDS},{options}"),
                str(target),
                str(size),
                what="make the file of the encrypted volume",
                folder=target.parent,
                writes=target,
                file_limit=size + GIB,
                secret=passphrase,
            )
        except DriverFailed as error:
            if _NOT_MEASURED not in str(error.details.get("details")):
                raise
    raise Unavailable("QEMU cannot measure how fast this host derives keys of encrypted volumes just now.")


async def write_luks(source: Path, source_format: str, target: Path, passphrase: str, size: int) -> None:
    """Write an inspected image to an encrypted file, which is as large or larger; zeros are written, too."""
    name = str(target).replace(",", ",,")
    await run(
        "qemu-img",
        "convert",
        *("-n", "-f", source_format, "-t", "writeback", "-T", "writeback", *_WITH_KEY),
        "--target-image-opts",
        str(source),
        f"driver=luks,key-secret=key,file.driver=file,file.filename={name}",
        what="write the image to the encrypted volume",
        folder=target.parent,
        reads=[source],
        writes=target,
        file_limit=size + GIB,
        cpu_limit=cpu_seconds(size),
        secret=passphrase,
    )


async def create_overlay(target: Path, backing: Path, size: int) -> None:
    """Create a qcow2 file over a raw backing file in the same directory."""
    await run(
        "qemu-img",
        "create",
        *("-q", "-f", "qcow2", "-F", "raw", "-b", backing.name, str(target), str(size)),
        what="make the root disk",
        folder=target.parent,
        reads=[backing],
        writes=target,
        file_limit=GIB,
    )


async def create_qcow2(target: Path, size: int) -> None:
    """Create an empty qcow2 file for a disk of this size."""
    await run(
        "qemu-img",
        "create",
        *("-q", "-f", "qcow2", str(target), str(size)),
        what="prepare a copy of the disk",
        folder=target.parent,
        writes=target,
        file_limit=GIB,
    )


async def flatten(source: Path, source_format: str, base: Path | None, target: Path, size: int) -> None:
    """Copy a disk that no guest uses, with the base below it, into one qcow2 file.

    The sandbox opens nothing but these files, whatever the disk's header names.
    """
    await run(
        "qemu-img",
        "convert",
        *("-f", source_format, "-O", "qcow2", "-t", "writeback", "-T", "writeback"),
        str(source),
        str(target),
        what="copy the disk",
        folder=target.parent,
        reads=[source] if base is None else [source, base],
        writes=target,
        file_limit=size + GIB,
        cpu_limit=cpu_seconds(size),
    )


async def enlarge(target: Path, backing: Path, size: int) -> None:
    """Make a qcow2 file over a raw backing file larger; its content stays. A smaller size is an error."""
    await run(
        "qemu-img",
        "resize",
        *("-q", "-f", "qcow2", str(target), str(size)),
        what="enlarge the disk",
        folder=target.parent,
        reads=[backing],
        writes=target,
        file_limit=size + GIB,
    )


async def copy(source: Path, target: Path, size: int) -> None:
    """Copy a raw file; zeros become holes, and blocks are shared if the file system supports it."""
    await run(
        "cp",
        *("--sparse=always", "--reflink=auto", "--", str(source), str(target)),
        what="copy the image",
        folder=target.parent,
        reads=[source],
        writes=target,
        file_limit=size + GIB,
        cpu_limit=cpu_seconds(size),
    )


async def make_file_system(file: Path, kind: str, label: str, size: int) -> None:
    """Format a raw file with an empty file system or swap area."""
    await run(
        *_FORMATTERS[kind],
        *("-L", label, str(file)),
        what=f"make a disk with {kind}",
        folder=file.parent,
        writes=file,
        file_limit=size + GIB,
        cpu_limit=cpu_seconds(size),
    )


async def make_iso(source: Path, target: Path, label: str) -> None:
    """Write a directory as an ISO image."""
    await run(
        "genisoimage",
        *("-quiet", "-o", str(target), "-V", label, "-publisher", "Micronova"),
        *("-J", "-r", "-l", "-ldots", "-allow-lowercase", "-allow-multidot"),
        str(source),
        what="make the config drive",
        folder=target.parent,
        reads=[source],
        writes=target,
        file_limit=64 * 1024**2,
        memory_limit=GIB // 2,
    )
