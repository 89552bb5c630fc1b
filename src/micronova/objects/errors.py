"""Domain errors: a small set with stable codes.

A code is part of the bus contract (an error raised by a handler arrives at the caller as the same class) and
is mapped to HTTP in exactly one place, `micronova.http.faults`. A message says what was wrong and what would be
right, in words that a user may read.
"""

from typing import Any, ClassVar


class MicronovaError(Exception):
    """Base of every error that we raise on purpose."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message


class Invalid(MicronovaError):
    """The request is malformed or asks for something that cannot be (400)."""

    code = "invalid"


class RequestedNotFound(Invalid):
    """A request names something, beside what it is about, that is not there for the caller (400)."""

    code = "requested_not_found"


class AddressInUse(Invalid):
    """A request asks for an address that somebody else has (400)."""

    code = "address_in_use"


class Unauthorized(MicronovaError):
    """No valid token (401)."""

    code = "unauthorized"


class Forbidden(MicronovaError):
    """The caller may not do this (403)."""

    code = "forbidden"


class QuotaExceeded(Forbidden):
    """A quota would be exceeded (403)."""

    code = "quota_exceeded"


class PortLimitExceeded(QuotaExceeded):
    """The network service has no room for more ports in this project (403)."""

    code = "port_limit_exceeded"


class NotFound(MicronovaError):
    """No such thing, or none that the caller may know of (404)."""

    code = "not_found"


class MethodNotAllowed(MicronovaError):
    """The resource exists but does not take this method (405)."""

    code = "method_not_allowed"


class NotAcceptable(MicronovaError):
    """A version that we do not speak was asked for (406)."""

    code = "not_acceptable"


class Conflict(MicronovaError):
    """The thing exists already, or is in a state that does not allow this (409)."""

    code = "conflict"


class Gone(MicronovaError):
    """The feature was removed (410)."""

    code = "gone"


class TooLarge(MicronovaError):
    """The body is larger than we accept (413)."""

    code = "too_large"


class UnsupportedMediaType(MicronovaError):
    """The content type is not one that we read (415)."""

    code = "unsupported_media_type"


class NotSupported(MicronovaError):
    """Not implemented by this driver or deployment (501)."""

    code = "not_supported"


class Unavailable(MicronovaError):
    """A part that we need does not answer just now; trying again is reasonable (503)."""

    code = "unavailable"


class OperationFailed(MicronovaError):
    """Work that the caller waited for came to a bad end (500, with the reason)."""

    code = "operation_failed"


# --- what can go wrong on the way of an instance; these end up in a fault, not in an HTTP status ---


class NoValidHost(MicronovaError):
    """No host satisfies the request. `details["reasons"]` tells admins which filter removed how many hosts."""

    code = "no_valid_host"


class InsufficientResources(MicronovaError):
    """The host has not enough resources after all: the build is rescheduled."""

    code = "insufficient_resources"


class BuildFailed(MicronovaError):
    """The host could not build the guest, another one may: the build is rescheduled."""

    code = "build_failed"


class BuildAborted(MicronovaError):
    """The build cannot succeed anywhere: the instance goes to ERROR at once."""

    code = "build_aborted"


class Stale(MicronovaError):
    """An order or report of an earlier epoch: refused, and nothing is changed."""

    code = "stale"


class InstanceNotFound(NotFound):
    """The hypervisor, or the database, has no such instance."""

    code = "instance_not_found"
