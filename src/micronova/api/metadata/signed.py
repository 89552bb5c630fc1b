"""Which guest a request comes from: the proxy of the guest's network names it in signed headers.

The proxies of this cloud's hosts sign with the key of their host, and are trusted only about guests of that host. The
proxies of a real Neutron sign the server's id with a shared secret, if one is set.
"""

import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from micronova.http.host_keys import EXPIRY_HEADER, HOST_HEADER, HostKeyring, sign_metadata
from micronova.http.request import Request
from micronova.objects.errors import Forbidden, Invalid

_EXPIRY = re.compile(r"[1-9][0-9]{0,11}", re.ASCII)


class Asker(NamedTuple):
    """The guest that asks, as its network's proxy names it."""

    instance_id: str
    project_id: str
    address: str
    host: str | None = None  # where the guest must be; None if the proxy does not name a host


class Signatures:
    """Verifies the signatures of proxies."""

    def __init__(self, keyring: HostKeyring, shared_secret: str, now: Callable[[], float]) -> None:
        """`shared_secret` is that of a real Neutron's proxies, "" if there are none."""
        self._keyring = keyring
        self._secret = shared_secret.encode()
        self._now = now

    def asker(self, request: Request) -> Asker:
        """Return the guest that asks; raise Invalid for missing or repeated headers, Forbidden for a bad signature."""
        instance_id = _only(request, "x-instance-id")
        project_id = _only(request, "x-tenant-id")
        signature = _header(request, "x-instance-id-signature")
        forwarded = _header(request, "x-forwarded-for")
        host = urllib.parse.unquote(_header(request, HOST_HEADER)) or None
        asker = Asker(instance_id, project_id, forwarded.partition(",")[0].strip(), host)
        expected = self._of_host(request, asker) if host is not None else [self._shared(instance_id)]
        if not any(hmac.compare_digest(each.encode(), signature.encode("latin-1")) for each in expected):
            raise Forbidden("Invalid proxy request signature.")
        return asker

    def _of_host(self, request: Request, asker: Asker) -> list[str]:
        expiry = _header(request, EXPIRY_HEADER)
        if not _EXPIRY.fullmatch(expiry) or int(expiry) <= self._now():
            raise Forbidden("The host's key has run out: ask a conductor for a new one.")
        assert asker.host is not None
        keys = self._keyring.metadata_keys(asker.host, int(expiry))
        return [sign_metadata(key, asker.host, asker.instance_id, asker.project_id, asker.address) for key in keys]

    def _shared(self, instance_id: str) -> str:
        if not self._secret:
            raise Forbidden(
                "This proxy does not say for which host it signs, and there is no neutron.metadata_proxy_shared_secret."
            )
        return hmac.new(self._secret, instance_id.encode("latin-1"), hashlib.sha256).hexdigest()


def _only(request: Request, name: str) -> str:
    value = _header(request, name)
    if not value:
        raise Invalid(f"The header {name} is missing: requests come through the proxy of a network.")
    return value


def _header(request: Request, name: str) -> str:
    """Return a header's value; raise Invalid if it is repeated, because one of them may be forged."""
    wanted = name.encode()
    values = [value for key, value in request.falcon.scope["headers"] if key.lower() == wanted]
    if len(values) > 1:
        raise Invalid(f"The header {name} is there more than once.")
    return values[0].decode("latin-1") if values else ""
