"""Cross-origin resource sharing (CORS): which pages may call the services from a browser, as in oslo.middleware.

A preflight request that names a method or a header that pages may not use gets no headers, so the browser refuses.
"""

from micronova.http.asgi import Scope, header

Headers = list[tuple[bytes, bytes]]

ANY = "*"
MAX_AGE = 3600  # seconds for which a browser remembers the answer to a preflight request

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_MAY_SEND = frozenset(
    (
        "accept accept-language cache-control content-language content-type expires last-modified pragma "
        "x-auth-token x-subject-token x-service-token openstack-api-version x-openstack-nova-api-version "
        "x-openstack-request-id x-identity-status x-roles x-service-catalog x-user-id x-tenant-id "
        "if-match if-none-match range"
    ).split()
)
_MAY_READ = (
    b"x-auth-token, x-openstack-request-id, x-subject-token, x-service-token, openstack-api-version, "
    b"x-openstack-nova-api-version, location"
)


class Cors:
    """The rules for some origins; `*` among them means all."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def preflight(self, scope: Scope) -> Headers:
        """Return the headers of the answer to an OPTIONS request; none if the request that follows is not allowed."""
        allowed = self._allowed(scope)
        method = header(scope, b"access-control-request-method")
        asked = header(scope, b"access-control-request-headers")
        names = [name.strip() for name in asked.split(",") if name.strip()]
        if not allowed or method not in _METHODS or not all(name.lower() in _MAY_SEND for name in names):
            return []
        allowed += [
            (b"access-control-max-age", str(MAX_AGE).encode()),
            (b"access-control-allow-methods", method.encode()),
        ]
        if names:
            allowed.append((b"access-control-allow-headers", ",".join(names).encode()))
        return allowed

    def answer(self, scope: Scope) -> Headers:
        """Return the headers that let a page read the answer; none if its origin is not allowed."""
        allowed = self._allowed(scope)
        return [*allowed, (b"access-control-expose-headers", _MAY_READ)] if allowed else []

    def _allowed(self, scope: Scope) -> Headers:
        origin = header(scope, b"origin")
        if origin not in self._origins:
            origin = ANY if origin and ANY in self._origins else ""
        if not origin:
            return []
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-allow-credentials", b"true"),
            (b"vary", b"Origin"),
        ]
