"""The HTTP status of each domain error, and the error bodies that each service's clients parse."""

import html
from collections.abc import Callable
from typing import Any

from micronova.objects import errors

# Looked up along the class hierarchy: a new error needs an entry only if its status differs from its parent's.
STATUS: dict[type[errors.MicronovaError], int] = {
    errors.Invalid: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.NotAcceptable: 406,
    errors.RequestTimeout: 408,
    errors.Conflict: 409,
    errors.Stale: 409,
    errors.Gone: 410,
    errors.PreconditionFailed: 412,
    errors.TooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.NotSupported: 501,
    errors.Unavailable: 503,
    errors.NoValidHost: 400,
}

TITLES = {
    300: "Multiple Choices",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    406: "Not Acceptable",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    413: "Request Entity Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}

INTERNAL = "Unexpected API Error. The request id of this answer leads to the reason in the service's log."


def status_of(error: BaseException) -> int:
    """Return the HTTP status for an error, 500 for one that is not ours."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return 500


def message_of(error: BaseException) -> str:
    """Return the message for the caller; an unexpected error's own message is never shown."""
    if isinstance(error, errors.OperationFailed) or (
        isinstance(error, errors.MicronovaError) and status_of(error) != 500
    ):
        return error.message
    return INTERNAL


FaultBody = Callable[[int, str, BaseException], dict[str, Any]]

COMPUTE_KEYS = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    405: "badMethod",
    409: "conflictingRequest",
    413: "overLimit",
    415: "badMediaType",
    429: "overLimit",
    501: "notImplemented",
    503: "serviceUnavailable",
}
COMPUTE_FAULT = "computeFault"  # the key of all others


def compute_fault(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body that compute clients parse: one key that names the fault."""
    return {COMPUTE_KEYS.get(status, COMPUTE_FAULT): {"code": status, "message": message}}


def identity_fault(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body that identity clients parse."""
    return {"error": {"code": status, "message": message, "title": TITLES.get(status, "Error")}}


def image_fault(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body that image clients parse."""
    return {"message": message, "code": f"{status} {TITLES.get(status, 'Error')}", "title": TITLES.get(status, "Error")}


def html_fault(status: int, message: str) -> bytes:
    """Return the page for clients that ask for no JSON: glanceclient reads the message from it."""
    title = f"{status} {TITLES.get(status, 'Error')}"
    body = f"<h1>{title}</h1>\n{html.escape(message)}<br /><br />"
    return f"<html>\n<head><title>{title}</title></head>\n<body>\n{body}\n</body>\n</html>\n".encode()


def prefers_html(accept: str | None) -> bool:
    """Return whether a client gets an error as a page: it takes one, or anything, and does not name JSON."""
    return accept is not None and "json" not in accept and any(each in accept for each in ("*/*", "text/*", "html"))


def network_fault(status: int, message: str, error: BaseException) -> dict[str, Any]:
    """Return the body that network clients parse; they distinguish errors by `type`."""
    kind = getattr(error, "details", {}).get("type") or type(error).__name__
    return {"NeutronError": {"type": kind, "message": message, "detail": ""}}
