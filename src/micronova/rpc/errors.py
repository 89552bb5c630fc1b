"""Errors of the bus, and how an error raised by a handler travels to the caller and becomes the same class again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from micronova.objects.errors import MicronovaError, Unavailable


class RpcError(MicronovaError):
    """Something that went wrong between two ends of the bus."""

    code = "rpc_error"


class BusUnavailable(RpcError, Unavailable):
    """The message did not go out: no broker, no such queue, or a queue that is full."""

    code = "bus_unavailable"


class BadBusUrl(RpcError, ValueError):
    """The URL of the bus, a setting, is not one."""

    code = "bad_bus_url"


class CallTimeout(RpcError, Unavailable):
    """No answer came in time; the handler may or may not have run."""

    code = "call_timeout"


class NoSuchMethod(RpcError):
    """The other end does not know this message."""

    code = "no_such_method"


class VersionTooNew(RpcError):
    """The message needs a newer contract than the other end speaks, or than this end is pinned to."""

    code = "version_too_new"


class InvalidMessage(RpcError):
    """What arrived does not fit the declared type."""

    code = "invalid_message"


class RemoteError(Exception):
    """An error of the other end whose class is not known here."""

    def __init__(self, code: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details or {}


UNEXPECTED = "unexpected"
"""The code under which an exception without a code of its own travels; details["exception"] names its class."""


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error on the wire."""

    code: str
    message: str = ""
    details: dict[str, Any] = {}


E = TypeVar("E", bound=type[Exception])
_families: list[type[Exception]] = [MicronovaError]
_by_code: dict[str, type[Exception]] = {}


def register(family: E) -> E:
    """Let this class and all its subclasses, also later ones, arrive as themselves; domain errors already do."""
    if family not in _families:
        _families.append(family)
    return family


def is_coded(error: BaseException) -> bool:
    """Say whether an error was meant to travel, unlike an accident of the handler's code."""
    return isinstance(error, (RemoteError, *_families)) and hasattr(error, "code")


def to_body(error: BaseException) -> ErrorBody:
    """Give the wire form of an error."""
    if is_coded(error):
        coded: Any = error
        return ErrorBody(
            coded.code,
            str(coded.message),
            _plain(getattr(coded, "details", None) or {}),
        )
    name = type(error).__name__
    return ErrorBody(UNEXPECTED, f"{name}: {error}", {"exception": name})


def from_body(body: ErrorBody) -> Exception:
    """Give the error that a wire form stands for: of the sender's class if it is known here, else a RemoteError."""
    known = _find(body.code)
    if known is not None:
        try:
            return known(body.message, **body.details)
        except TypeError:
            # A class whose constructor differs from the common one cannot be rebuilt; its code still arrives.
            pass
    return RemoteError(body.code, body.message, body.details)


def _find(code: str) -> type[Exception] | None:
    known = _by_code.get(code)
    if known is None:
        for family in _families:
            for cls in _descendants(family):
                _by_code.setdefault(str(getattr(cls, "code", "")), cls)
        known = _by_code.get(code)
    return known


def _descendants(cls: type[Exception]) -> list[type[Exception]]:
    """The class first, then its subclasses: one that inherits its parent's code must not stand in for it."""
    found = [cls]
    for child in cls.__subclasses__():
        found.extend(_descendants(child))
    return found


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    """Details as they can be encoded: an error must never fail to be reported for what it carries."""
    encoded = msgspec.msgpack.encode(details, enc_hook=str)
    plain: dict[str, Any] = msgspec.msgpack.decode(encoded)
    return plain
