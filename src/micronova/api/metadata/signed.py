"""Whom a request is about: what the proxy of a network says, and proves with a signature."""

import hashlib
import hmac
from typing import NamedTuple

from micronova.http.request import Request
from micronova.objects.errors import Forbidden, Invalid


class Asker(NamedTuple):
    """A guest as its network's proxy knows it."""

    instance_id: str
    project_id: str
    address: str


class Signatures:
    """Knows the secret that is shared with the proxies."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def asker(self, request: Request) -> Asker:
        """Return who asks; raise Invalid for a header that is missing or doubled, Forbidden for a wrong signature."""
        instance_id = _only(request, "x-instance-id")
        project_id = _only(request, "x-tenant-id")
        signature = _header(request, "x-instance-id-signature")
        expected = hmac.new(self._secret, instance_id.encode("latin-1"), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected.encode(), signature.encode("latin-1")):
            raise Forbidden("Invalid proxy request signature.")
        return Asker(instance_id, project_id, _header(request, "x-forwarded-for").partition(",")[0].strip())


def _only(request: Request, name: str) -> str:
    value = _header(request, name)
    if not value:
        raise Invalid(f"The header {name} is missing: requests come through the proxy of a network.")
    return value


def _header(request: Request, name: str) -> str:
    """Return a header's value; of two we could believe the wrong one."""
    wanted = name.encode()
    values = [value for key, value in request.falcon.scope["headers"] if key.lower() == wanted]
    if len(values) > 1:
        raise Invalid(f"The header {name} is there more than once.")
    return values[0].decode("latin-1") if values else ""
