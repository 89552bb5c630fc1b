"""Trusted proxies: whose X-Forwarded-* headers say how a client reached the cloud, and from where.

The headers of anybody else are removed, because they decide which links a client gets, which console pages pass the
check of their origin, and whose log-ins are counted together.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from micronova.http.asgi import Scope, headers
from micronova.objects.errors import Invalid

_HEADERS: Final = (b"x-forwarded-proto", b"x-forwarded-host")
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
_WEBSOCKET: Final = {"http": "ws", "https": "wss"}


class TrustedProxies:
    """The addresses whose X-Forwarded-* headers are believed."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Raise Invalid if one of the texts is neither an address nor a network."""
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for text in networks:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError:
                raise Invalid(
                    f"api.trusted_proxies has {text!r}: it takes addresses and networks such as 10.0.0.0/8."
                ) from None
        self._known: dict[str, bool] = {}

    def __contains__(self, address: str) -> bool:
        known = self._known.get(address)
        if known is None:
            if len(self._known) > 1000:
                self._known.clear()
            known = self._known[address] = self._contains(address)
        return known

    def _contains(self, text: str) -> bool:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def apply(self, scope: Scope) -> Scope:
        """Return the request as the client sent it to the proxy; without the headers if no trusted proxy sent it.

        X-Forwarded-For stays, because the metadata service verifies it by a signature.
        """
        if not any(name.startswith(b"x-forwarded-") for name, _ in scope["headers"]):
            return scope
        changed = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _HEADERS]}
        client = scope.get("client")
        if client is None or client[0] not in self:
            return changed
        scheme = _last(scope, b"x-forwarded-proto").lower()
        if scheme in _WEBSOCKET:
            changed["scheme"] = _WEBSOCKET[scheme] if scope["type"] == "websocket" else scheme
        host = _last(scope, b"x-forwarded-host")
        if _HOST.fullmatch(host):
            others = [pair for pair in changed["headers"] if pair[0] != b"host"]
            changed["headers"] = [(b"host", host.encode()), *others]
        changed["client"] = (self._origin(",".join(headers(scope, b"x-forwarded-for"))) or client[0], client[1])
        return changed

    def _origin(self, forwarded_for: str) -> str:
        """Return the last address that is not a proxy's own: what is before it, a client may have invented."""
        for text in reversed(forwarded_for.split(",")):
            address = text.strip()
            try:
                ipaddress.ip_address(address)
            except ValueError:
                return ""
            if address not in self:
                return address
        return ""


def _last(scope: Scope, name: bytes) -> str:
    """Return the last value of a header, "" when it was not sent: what is before it, a client may have invented."""
    return ",".join(headers(scope, name)).rpartition(",")[2].strip()
