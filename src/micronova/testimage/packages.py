"""The Debian packages that the test image is made of: which they are today, and their files, without root."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from micronova.objects.errors import NotSupported

KERNEL = "linux-image-cloud-amd64"  # depends on the kernel of the day
LOGIN = "dropbear-bin"
OTHERS = ("busybox-static", "mtools", "syslinux", "syslinux-common")

_TOOLS = ("apt-get", "apt-cache", "dpkg-deb")
_PLACE = re.compile(r"^'[^']+' (\S+) \d+ (\S+)$", re.MULTILINE)
_PATIENCE = 300.0


class Package(msgspec.Struct, frozen=True, order=True):
    """One version of a package."""

    name: str
    file: str
    digest: str


def obstacle() -> str | None:
    """Say what this machine lacks; None if the packages can be had."""
    if os.uname().machine != "x86_64":
        return f"a machine of architecture x86_64 (this is {os.uname().machine})"
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"Debian's package tools ({', '.join(missing)})"
    wanted = (KERNEL, LOGIN, *OTHERS)
    known = _run("apt-cache", "--no-all-versions", "show", *wanted, check=False)
    if unknown := [name for name in wanted if f"Package: {name}\n" not in known]:
        return f"the Debian packages {', '.join(unknown)} in apt's lists (try: apt-get update)"
    return None


def plan() -> list[Package]:
    """Ask apt which packages to fetch, in their current versions."""
    if lacking := obstacle():
        raise NotSupported(f"The test image cannot be built here: it needs {lacking}.")
    kernel = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", KERNEL))
    if kernel is None:
        raise NotSupported(f"The test image cannot be built here: {KERNEL} names no kernel.")
    tree = _run("apt-cache", "depends", "--recurse", "--important", LOGIN)
    libraries = [name for name in re.findall(r"^(\w\S+)$", tree, re.MULTILINE) if name.startswith(("lib", "zlib"))]
    names = sorted({kernel[1], LOGIN, *OTHERS, *libraries})
    found = [
        Package(name=file.partition("_")[0], file=file, digest=digest)
        for file, digest in _PLACE.findall(_run("apt-get", "download", "--print-uris", *names))
    ]
    if missing := set(names) - {package.name for package in found}:
        raise NotSupported(f"The test image cannot be built here: apt does not offer {', '.join(sorted(missing))}.")
    return sorted(found)


def unpack(packages: list[Package], directory: Path) -> Path:
    """Download the packages (apt checks their digests) and unpack them; return the root of their files."""
    archives, root = directory / "archives", directory / "root"
    archives.mkdir()
    root.mkdir()
    _run("apt-get", "download", *(package.name for package in packages), cwd=archives)
    for archive in sorted(archives.iterdir()):
        _run("dpkg-deb", "--extract", str(archive), str(root))
    return root


def _run(*command: str, cwd: Path | None = None, check: bool = True) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if check and done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise NotSupported(f"The test image cannot be built here: {' '.join(command[:2])} failed: {reason[-1]}")
    return done.stdout
