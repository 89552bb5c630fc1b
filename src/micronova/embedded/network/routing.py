"""Routes whose handlers check policy themselves, because the target is known only after a read."""

from typing import Any

from micronova.http.service import Handler, Route


def checked_route(
    method: str,
    path: str,
    handler: Handler,
    policy: str,
    status: int = 200,
    body: Any = None,
) -> Route:
    """Return a route whose handler checks policy itself."""
    return Route(method=method, path=path, handler=handler, policy=policy, status=status, body=body, checks_policy=True)
