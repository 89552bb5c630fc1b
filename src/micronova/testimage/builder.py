"""Builds the test image: a Linux of some 15 MB that boots in seconds and behaves as a cloud's guest.

Everything comes from Debian's packages, which are downloaded and unpacked but not installed; nothing needs root. The
result is kept by what it was made of: our own files and the packages' versions.
"""

import hashlib
import os
import shutil
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from micronova.objects.errors import MicronovaError, NotSupported
from micronova.testimage import packages, qcow2, rootfs
from micronova.testimage.disk import assemble


def available() -> str | None:
    """Say what is missing to build the image here; None if it can be built."""
    return packages.obstacle()


def build(output: Path, cache: Path) -> Path:
    """Write the image to `output`, from the cache if it was built before; takes seconds, so run it in a thread."""
    cache.mkdir(parents=True, exist_ok=True)
    ours = _digest_of_sources()
    try:
        wanted = packages.plan()
    except NotSupported:
        # apt cannot be asked just now: any image of this recipe will do.
        kept = sorted(cache.glob(f"testimage-{ours}-*.qcow2"), key=lambda path: path.stat().st_mtime)
        if not kept:
            raise
        return _copy(kept[-1], output)
    theirs = hashlib.sha256(repr(wanted).encode()).hexdigest()[:16]
    image = cache / f"testimage-{ours}-{theirs}.qcow2"
    if not image.exists():
        _make(wanted, image)
    return _copy(image, output)


def _make(wanted: list[packages.Package], image: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="micronova-testimage-") as name:
        work = Path(name)
        root = packages.unpack(wanted, work)
        kernel = next(root.glob("boot/vmlinuz-*"), None)
        if kernel is None:
            raise MicronovaError("The test image cannot be built: the kernel's package brought no kernel.")
        initrd = work / "initrd"
        initrd.write_bytes(rootfs.build(root))
        made = work / "image"
        qcow2.write(assemble(root, kernel, initrd, work), made)
        _copy(made, image)


def _copy(source: Path, target: Path) -> Path:
    """Copy a file so that nobody ever sees half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        shutil.copyfile(source, name)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    return target


def _digest_of_sources() -> str:
    digest = hashlib.sha256()

    def add(directory: Traversable) -> None:
        for each in sorted(directory.iterdir(), key=lambda entry: entry.name):
            if each.is_dir() and each.name != "__pycache__":
                add(each)
            elif each.is_file():
                digest.update(each.name.encode() + b"\0" + each.read_bytes() + b"\0")

    add(resources.files("micronova.testimage"))
    return digest.hexdigest()[:16]
