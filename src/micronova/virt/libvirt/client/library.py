"""The libvirt library. It is imported when it is first needed, so that a cloud without it starts without it."""

import importlib
from typing import Any

from micronova.objects.errors import MicronovaError, Unavailable, resource_exhausted
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client.binding import Connect

HINT = (
    "The Python binding of libvirt is missing: install libvirt-dev, pkg-config and gcc, then "
    "pip install 'micronova[libvirt]'"
)

_LOST = ("VIR_ERR_RPC", "VIR_ERR_NO_CONNECT", "VIR_ERR_INVALID_CONN", "VIR_ERR_AUTH_UNAVAILABLE")


class LibvirtMissing(MicronovaError):
    """This machine lacks something that the driver needs; the message says what to install."""

    code = "libvirt_missing"


def load() -> Any:
    """Return the binding's module, or raise LibvirtMissing with what to install."""
    try:
        return importlib.import_module("libvirt")
    except ImportError as error:
        raise LibvirtMissing(f"{HINT} ({error}).") from error


def load_qemu() -> Any:
    """Return the binding's module for what only QEMU has."""
    load()
    return importlib.import_module("libvirt_qemu")


def is_error(error: BaseException) -> bool:
    """Return whether an exception is libvirt's own."""
    return type(error).__name__ == "libvirtError" and hasattr(error, "get_error_code")


def has_code(error: BaseException, *names: str) -> bool:
    """Return whether an exception is libvirt's and has one of these codes, e.g. VIR_ERR_NO_DOMAIN."""
    if not is_error(error):
        return False
    library = load()
    code = error.get_error_code()  # type: ignore[attr-defined]
    return any(code == getattr(library, name, None) for name in names)


def is_lost(error: BaseException, connection: Connect) -> bool:
    """Return whether a call failed because the connection was lost; the library knows it without another call."""
    return has_code(error, *_LOST) or connection.isAlive() != 1


def translated(error: Exception, what: str) -> Exception:
    """Return our error for libvirt's. Its text may name things of the host, so it goes into the details for admins."""
    if not is_error(error):
        return error
    if has_code(error, "VIR_ERR_OPERATION_TIMEOUT", "VIR_ERR_AGENT_UNRESPONSIVE"):
        return Unavailable(f"The hypervisor was too busy to {what}; try again.", details=_text(error))
    if _is_lack(error):
        return Unavailable(f"The hypervisor lacks resources at the moment to {what}; try again.", details=_text(error))
    return DriverFailed(f"The hypervisor could not {what}.", details=_text(error))


def _is_lack(error: Exception) -> bool:
    """Return whether libvirtd ran out of memory, descriptors, processes or disk space."""
    if has_code(error, "VIR_ERR_NO_MEMORY"):
        return True
    # Of an error of the system, libvirt tells the number.
    return has_code(error, "VIR_ERR_SYSTEM_ERROR") and resource_exhausted(OSError(_number(error), "")) is not None


def _number(error: Exception) -> int:
    number = getattr(error, "get_int1", lambda: None)()
    return number if isinstance(number, int) else 0


def _text(error: Exception) -> str:
    text = getattr(error, "get_error_message", lambda: None)() or str(error)
    return str(text).strip()
