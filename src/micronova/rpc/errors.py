"""Errors of the bus, and how the caller of a remote handler gets the error that the handler raised."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from micronova.objects.errors import MicronovaError, Unavailable
from micronova.objects.host_limits import LONGEST_DETAILS, Name, cut_text

log = logging.getLogger(__name__)


class RpcError(MicronovaError):
    """An error of the bus itself."""

    code = "rpc_error"


class BusUnavailable(RpcError, Unavailable):
    """The message was not sent: no connection, no such queue, a full queue, or a broker that accepts no messages."""

    code = "bus_unavailable"


class MessageTooLarge(RpcError):
    """The message was not sent, and would not be the next time either: it has more bytes than one may have."""

    code = "message_too_large"


class BusRefused(BusUnavailable):
    """No connection can be opened with these settings: the login is refused, or what the URL names cannot be used."""

    code = "bus_refused"


class ConnectionLost(Exception):
    """A connection was lost or closed, or could not be opened; a bus opens a new one and does not raise this."""


class WrongSettings(ConnectionLost):
    """A connection could not be opened, and another attempt makes sense only with other settings."""


class BadBusUrl(RpcError, ValueError):
    """The setting with the URL of the bus is invalid."""

    code = "bad_bus_url"


class CallTimeout(RpcError, Unavailable):
    """No answer arrived in time; the handler may or may not have run."""

    code = "call_timeout"


class NoSuchMethod(RpcError):
    """The receiver does not know this message."""

    code = "no_such_method"


class VersionTooNew(RpcError):
    """The message needs a newer contract version than the receiver has, or than the sender is pinned to."""

    code = "version_too_new"


class InvalidMessage(RpcError):
    """A received message does not match the declared type."""

    code = "invalid_message"


class RemoteError(Exception):
    """An error that the handler raised and whose class is not known here."""

    def __init__(self, code: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details or {}


MOST_DETAILS = 256 * 1024
"""Bytes of the details of an error. The longest ones say why a scheduler found no host."""
UNEXPECTED = "unexpected"
"""The code of an exception that has none of its own; details["exception"] names its class."""


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error in a reply."""

    code: Name
    message: str = ""
    details: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Shorten what is too long: a host answers calls as well, and its answer is logged."""
        self.message = cut_text(self.message, LONGEST_DETAILS)
        if self.details and len(msgspec.msgpack.encode(self.details)) > MOST_DETAILS:
            self.details = {}


_by_code: dict[str, type[MicronovaError]] = {}


def is_coded(error: BaseException) -> bool:
    """Return whether an error has a code for callers; others are bugs in the handler."""
    return isinstance(error, (RemoteError, MicronovaError))


def to_body(error: BaseException) -> ErrorBody:
    """Return the form of an error that a reply carries."""
    if is_coded(error):
        coded: Any = error
        return ErrorBody(
            coded.code,
            _utf8(str(coded.message)),
            _plain(getattr(coded, "details", None) or {}),
        )
    name = type(error).__name__
    return ErrorBody(UNEXPECTED, _utf8(f"{name}: {error}"), {"exception": name})


def from_body(body: ErrorBody) -> Exception:
    """Return the error of a reply: of the class that was raised if it is known here, else a RemoteError."""
    known = _find(body.code)
    if known is not None:
        try:
            return known(body.message, **body.details)
        except TypeError:
            # A class with another constructor cannot be built from the reply; the caller still gets its code.
            pass
    return RemoteError(body.code, body.message, body.details)


def _find(code: str) -> type[MicronovaError] | None:
    known = _by_code.get(code)
    if known is None:
        for cls in _descendants(MicronovaError):
            _by_code.setdefault(cls.code, cls)
        known = _by_code.get(code)
    return known


def _descendants(cls: type[MicronovaError]) -> list[type[MicronovaError]]:
    """Return the class, then its subclasses: one that inherits its parent's code must not replace the parent."""
    found = [cls]
    for child in cls.__subclasses__():
        found.extend(_descendants(child))
    return found


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    """Return the details with everything that cannot be encoded as a string; none if that does not suffice."""
    try:
        encoded = msgspec.msgpack.encode(details, enc_hook=str)
    except (TypeError, ValueError, OverflowError):  # keys that are no strings, text that is no UTF-8, large numbers
        log.warning("the details %s of an error cannot be sent to its caller", ", ".join(map(str, details)))
        return {}
    plain: dict[str, Any] = msgspec.msgpack.decode(encoded)
    return plain


def _utf8(text: str) -> str:
    """Return a text that can be encoded: names of files may contain bytes that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
