"""Chooses and unpacks the Debian packages that the test image is built from, without root."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from micronova.objects.errors import NotSupported

KERNEL = "linux-image-cloud-amd64"  # depends on the current kernel
LOGIN = "dropbear-bin"
OTHERS = ("busybox-static", "mtools", "syslinux", "syslinux-common")

_TOOLS = ("apt-get", "apt-cache", "dpkg-deb")
_TIMEOUT = 300.0


def obstacle() -> str | None:
    """Return what this machine lacks to get the packages; None if it lacks nothing."""
    try:
        choose()
    except NotSupported as error:
        return error.message
    return None


def choose() -> list[str]:
    """Return the packages to download, with the current kernel and the libraries of programs that are not static."""
    if os.uname().machine != "x86_64":
        raise NotSupported(f"The test image needs a machine of architecture x86_64; this is {os.uname().machine}.")
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        raise NotSupported(f"The test image is made of Debian packages, and {', '.join(missing)} is not here.")
    wanted = (KERNEL, LOGIN, *OTHERS)
    needs = _dependencies(_run("apt-cache", "depends", "--recurse", "--important", *wanted, check=False))
    if unknown := [name for name in wanted if name not in needs]:
        raise NotSupported(f"apt does not know {', '.join(unknown)}, which the test image needs: run apt-get update.")
    kernels = [name for name in needs[KERNEL] if name.startswith("linux-image-")]
    chosen = {LOGIN, *OTHERS, *kernels}
    libraries = [LOGIN]
    while libraries:
        found = {name for name in needs.get(libraries.pop(), ()) if name.startswith(("lib", "zlib"))}
        libraries += found - chosen
        chosen |= found
    return sorted(chosen)


def _dependencies(listing: str) -> dict[str, list[str]]:
    """Parse apt's list: a package without indentation, then what it depends on, indented."""
    needs: dict[str, list[str]] = {}
    name = ""
    for line in listing.splitlines():
        if not line.startswith((" ", "|")):
            name = line
            needs[name] = []
        elif found := re.search(r"Depends: ([\w.+-]+)$", line):  # virtual packages are in <>
            needs[name].append(found[1])
    return needs


def unpack(names: list[str], directory: Path) -> Path:
    """Download packages (apt checks their digests) and unpack them; return the root of their files."""
    archives, root = directory / "archives", directory / "root"
    archives.mkdir()
    root.mkdir()
    _run("apt-get", "download", *names, cwd=archives)
    for archive in sorted(archives.iterdir()):
        _run("dpkg-deb", "--extract", str(archive), str(root))
    return root


def _run(*command: str, cwd: Path | None = None, check: bool = True) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if check and done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise NotSupported(f"The test image cannot be built here: {' '.join(command[:2])} failed: {reason[-1]}")
    return done.stdout
