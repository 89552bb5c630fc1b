"""Domain errors: a small set with stable codes.

A code is part of the bus contract (an error raised by a handler arrives at the caller as the same class) and
is mapped to HTTP in one place, `micronova.http.faults`. A message is shown to users: it says what was wrong and what
would be right.
"""

import errno
from typing import Any, ClassVar


class MicronovaError(Exception):
    """Base of all errors that Micronova raises on purpose."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message


class Invalid(MicronovaError):
    """The request is malformed or asks for something impossible (400)."""

    code = "invalid"


class RequestedNotFound(Invalid):
    """The request refers to another resource that does not exist or that the caller may not see (400)."""

    code = "requested_not_found"


class AddressInUse(Invalid):
    """The request asks for an address that is in use (400)."""

    code = "address_in_use"


class Unauthorized(MicronovaError):
    """The request has no valid token (401)."""

    code = "unauthorized"


class Forbidden(MicronovaError):
    """The caller may not do this (403)."""

    code = "forbidden"


class QuotaExceeded(Forbidden):
    """A quota would be exceeded (403)."""

    code = "quota_exceeded"


class PortLimitExceeded(QuotaExceeded):
    """The project's port quota at the network service would be exceeded (403)."""

    code = "port_limit_exceeded"


class NotFound(MicronovaError):
    """The resource does not exist, or the caller may not see it (404)."""

    code = "not_found"


class MethodNotAllowed(MicronovaError):
    """The resource does not support this method (405)."""

    code = "method_not_allowed"


class NotAcceptable(MicronovaError):
    """The request asks for an API version that is not supported (406)."""

    code = "not_acceptable"


class RequestTimeout(MicronovaError):
    """The body of the request did not arrive in time (408)."""

    code = "request_timeout"


class Conflict(MicronovaError):
    """The resource exists already, or its state does not allow this (409)."""

    code = "conflict"


class StaleHeartbeat(Conflict):
    """A newer heartbeat of a host was applied already; `details["newest"]` is the highest number that is known."""

    code = "stale_heartbeat"


class Gone(MicronovaError):
    """What the request is about does not exist any more (410)."""

    code = "gone"


class PreconditionFailed(MicronovaError):
    """The resource does not meet a condition that the request names, e.g. in If-Match (412)."""

    code = "precondition_failed"


class TooLarge(MicronovaError):
    """The request exceeds a size limit (413). `details["retry_after"]`: seconds until it may not, if that passes."""

    code = "too_large"


class UnsupportedMediaType(MicronovaError):
    """The content type is not supported (415)."""

    code = "unsupported_media_type"


class NotSupported(MicronovaError):
    """The driver or the deployment does not support this (501)."""

    code = "not_supported"


class Unavailable(MicronovaError):
    """A service that the request needs does not answer at the moment; the client may try again (503)."""

    code = "unavailable"


class HostUnavailable(Unavailable):
    """A host that has to be up does not answer, or it is not known whether it does: the work waits."""

    code = "host_unavailable"


class HostNotHeard(HostUnavailable):
    """A host that has to be up has not been heard of since that was asked: the answer is known soon."""

    code = "host_not_heard"


class GuestElsewhere(HostUnavailable):
    """The guest of a server may run on a host that the server has left: it is not started elsewhere before."""

    code = "guest_elsewhere"


class SecretNotReadable(Unavailable):
    """A stored secret is of another key than those of this process; another process may have the right one."""

    code = "secret_not_readable"


class OperationFailed(MicronovaError):
    """An operation failed, on a host or elsewhere: the message has the reason (500, if the caller waited for it)."""

    code = "operation_failed"


class HostIsOlder(OperationFailed):
    """The agent of a host is of an earlier version, which cannot do what is needed; another host may be newer (500)."""

    code = "host_is_older"


# --- failures of operations; they become the fault of an instance, not an HTTP status ---


class NoValidHost(MicronovaError):
    """No host satisfies the request. `explanation_of` reads how many hosts each filter removed, for admins."""

    code = "no_valid_host"

    @property
    def hosts_may_return(self) -> bool:
        """Whether a host would satisfy it, if it answered: it has been silent for a short time only."""
        return bool(self.details.get("hosts_may_return"))


class InsufficientResources(MicronovaError):
    """The host refuses the claim because it lacks resources: the build is rescheduled."""

    code = "insufficient_resources"


class BuildFailed(MicronovaError):
    """The host could not build the guest but another host may: the build is rescheduled."""

    code = "build_failed"


class BuildAborted(MicronovaError):
    """The build cannot succeed anywhere: the instance goes to ERROR at once."""

    code = "build_aborted"


class Stale(MicronovaError):
    """An order, a report or a request has an old epoch or another owner: it is refused and changes nothing."""

    code = "stale"


class InstanceNotFound(NotFound):
    """The hypervisor or the database has no such instance."""

    code = "instance_not_found"


_LACKS = {
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk space",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
    errno.EAGAIN: "processes or threads",
}


def resource_exhausted(error: BaseException) -> Unavailable | None:
    """Return Unavailable if an error means that the machine lacks a resource for the moment, else None."""
    lack = None
    if isinstance(error, OSError) and error.errno is not None:
        lack = _LACKS.get(error.errno)
    elif isinstance(error, MemoryError):
        lack = "memory"
    elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        lack = "threads"
    if lack is None:
        return None
    exhausted = Unavailable(f"This machine has run out of {lack} at the moment. Try again later.")
    exhausted.__cause__ = error
    return exhausted
