"""The types of ASGI, the interface between our HTTP server and the applications that answer requests."""

from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]  # what is known of a request: method, path, headers
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: bytes) -> str:
    """Return a request header, "" when it was not sent; the name is in lower case."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def headers(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a request header that may be sent repeatedly, in order; the name is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
