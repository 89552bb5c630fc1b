"""Builds the test image: a Linux of some 15 MB that boots in seconds and behaves as a cloud's guest.

It runs from memory and keeps nothing over a reboot: its disk has only a kernel, its initial file system and a loader.

Everything comes from Debian's packages, which are downloaded and unpacked but not installed; nothing needs root. The
cache's key is the digest of the files of this package: a new kernel in Debian does not cause a new build.
"""

import hashlib
import os
import shutil
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from micronova.objects.errors import MicronovaError
from micronova.testimage import packages, qcow2, rootfs
from micronova.testimage.disk import assemble


def available() -> str | None:
    """Return what this machine lacks to build the image; None if it can be built."""
    return packages.obstacle()


def build(output: Path, cache: Path) -> Path:
    """Write the image to `output`, from the cache if it was built before. Blocks for seconds."""
    cache.mkdir(parents=True, exist_ok=True)
    image = cache / f"testimage-{_digest()}.qcow2"
    if not image.exists():
        with tempfile.TemporaryDirectory(prefix="micronova-testimage-") as work:
            _copy(_make(Path(work)), image)
    return _copy(image, output)


def _make(work: Path) -> Path:
    root = packages.unpack(packages.choose(), work)
    kernel = next(root.glob("boot/vmlinuz-*"), None)
    if kernel is None:
        raise MicronovaError("The test image cannot be built: the kernel's package brought no kernel.")
    initrd = work / "initrd"
    initrd.write_bytes(rootfs.build(root))
    image = work / "image"
    qcow2.write(assemble(root, kernel, initrd, work), image)
    return image


def _copy(source: Path, target: Path) -> Path:
    """Copy a file atomically."""
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


def _digest() -> str:
    """Return a digest of all files that an image is built from."""
    digest = hashlib.sha256()

    def add(directory: Traversable) -> None:
        for each in sorted(directory.iterdir(), key=lambda entry: entry.name):
            if each.is_dir() and each.name != "__pycache__":
                add(each)
            elif each.is_file():
                digest.update(each.name.encode() + b"\0" + each.read_bytes() + b"\0")

    add(resources.files("micronova.testimage"))
    return digest.hexdigest()[:16]
