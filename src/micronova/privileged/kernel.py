"""The means of the helper: programs without a shell, and threads that step into a network namespace."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TIMEOUT = 30.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """The kernel, or a program, did not do what was asked."""


def run(command: Sequence[str], text: str | None = None, *, quiet: bool = False) -> str:
    """Run a program and return what it printed; `quiet` ignores its failure."""
    try:
        done = subprocess.run(
            list(command),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env={"PATH": _PATH, "LC_ALL": "C.UTF-8"},
            cwd="/",
            check=False,
        )
    except FileNotFoundError:
        raise Failed(f"{command[0]} is missing: install {PACKAGES.get(command[0], command[0])}.") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} did not end within {_TIMEOUT:g} s.") from None
    if done.returncode != 0 and not quiet:
        said = (done.stderr or done.stdout).strip()
        raise Failed(f"{' '.join(command[:6])}: {said[:500]}")
    return done.stdout


PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "dnsmasq": "dnsmasq-base"}


def missing_programs() -> list[str]:
    """Name the packages of programs that are not installed."""
    return sorted({package for program, package in PACKAGES.items() if shutil.which(program, path=_PATH) is None})


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread, and what it starts, be in a network namespace."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            target = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Failed(f"There is no namespace {namespace}.") from None
        try:
            _setns(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _setns(outside)
    finally:
        os.close(outside)


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise Failed(f"setns: {os.strerror(number)}")


def sysctl(name: str, value: str) -> None:
    """Set a value of the namespace that this thread is in; one that the kernel does not have is passed over."""
    try:
        (Path("/proc/sys/net") / name).write_text(value)
    except FileNotFoundError:
        pass
