"""Programs without a shell, network namespaces and sysctl values."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NAMESPACES = Path("/run/netns")
BRIDGE_FILTER = ("bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables")
_SYSCTLS = Path("/proc/sys/net")
_CLONE_NEWNET = 0x40000000
_TIMEOUT = 30.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """The kernel or a program failed."""


class TimedOut(Failed):
    """A program did not end in time: that says nothing about what it was asked for."""


def run(command: Sequence[str], text: str | None = None, *, quiet: bool = False) -> str:
    """Run a program and return its output; `quiet` ignores its failure."""
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
        raise TimedOut(f"{command[0]} did not end within {_TIMEOUT:g} s.") from None
    if done.returncode != 0 and not quiet:
        output = (done.stderr or done.stdout).strip()
        raise Failed(f"{' '.join(command[:6])}: {output[:500]}")
    return done.stdout


PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "dnsmasq": "dnsmasq-base"}


def missing_programs() -> list[str]:
    """Return the packages whose programs are not installed."""
    return sorted({package for program, package in PACKAGES.items() if shutil.which(program, path=_PATH) is None})


def has_namespace(name: str) -> bool:
    """Return whether there is a network namespace of this name.

    A file on which none is mounted is removed: the mount has ended, or is in a mount namespace that has.
    """
    file = NAMESPACES / name
    try:
        if file.stat().st_dev == os.stat("/proc/self/ns/net").st_dev:
            return True
    except FileNotFoundError:
        return False
    file.unlink(missing_ok=True)
    return False


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move this thread, and the programs that it starts, into a network namespace."""
    with _return():
        try:
            target = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Failed(f"There is no namespace {namespace}.") from None
        try:
            _checked("setns", _libc.setns(target, _CLONE_NEWNET))
        finally:
            os.close(target)
        yield


@contextmanager
def fresh_namespace() -> Iterator[None]:
    """Move this thread, and the programs that it starts, into a new namespace that disappears afterwards."""
    with _return():
        _checked("unshare", _libc.unshare(_CLONE_NEWNET))
        yield


@contextmanager
def _return() -> Iterator[None]:
    """Move this thread back into its present namespace at the end."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _checked("setns", _libc.setns(outside, _CLONE_NEWNET))
        finally:
            os.close(outside)


def _checked(call: str, result: int) -> None:
    if result != 0:
        raise Failed(f"{call}: {os.strerror(ctypes.get_errno())}")


def sysctl(name: str, value: str) -> None:
    """Set a value in this thread's namespace; do nothing if the kernel does not have it."""
    try:
        if (_SYSCTLS / name).read_text().strip() != value:
            (_SYSCTLS / name).write_text(value)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Failed(f"net.{name.replace('/', '.')} cannot be set to {value}: {error.strerror}.") from None


def ensure_bridge_filter() -> None:
    """Make bridged packets of this thread's namespace pass the inet family, which tracks and filters connections.

    Raise Failed unless the kernel confirms it: guests would be without security groups.
    """
    if not (_SYSCTLS / BRIDGE_FILTER[0]).exists():
        with contextlib.suppress(Failed):  # the values below decide
            run(["modprobe", "br_netfilter"])
    for name in BRIDGE_FILTER:
        with contextlib.suppress(Failed):  # the same
            sysctl(name, "1")
    check_bridge_filter()
    sysctl("bridge/bridge-nf-call-arptables", "0")


def check_bridge_filter() -> None:
    """Raise Failed unless bridged packets of this thread's namespace pass the inet family."""
    for name in BRIDGE_FILTER:
        shown = "net." + name.replace("/", ".")
        try:
            value = (_SYSCTLS / name).read_text().strip()
        except OSError as error:
            raise Failed(
                f"Security groups need the kernel module br_netfilter, and {shown} cannot be read ({error.strerror}). "
                "No guest is wired. Run 'modprobe br_netfilter' and name the module in /etc/modules-load.d."
            ) from None
        if value != "1":
            raise Failed(
                f"Security groups need {shown} = 1, and it is {value} and cannot be changed. No guest is wired. "
                "Make /proc/sys writable for the privileged helper."
            )
