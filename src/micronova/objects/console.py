"""Consoles: the address of a guest's screen or serial port, and what a console token grants."""

import hashlib
import re
from typing import Literal

import msgspec

from micronova.objects.errors import Unavailable
from micronova.objects.host_limits import Count, Name

RELAY_SECRET = re.compile("[0-9a-f]{64}")
"""The form of the secret that a relay accepts."""

ConsoleProtocol = Literal["vnc", "spice", "serial"]
"""The protocols that drivers offer; the API knows others and refuses them."""


class ConsoleEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a console: a Unix socket, or a host and a port."""

    path: Name = ""
    host: Name = ""
    port: Count = 0
    secret: Name = ""  # a relay expects it first


class ConsoleGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The console that a token grants access to."""

    instance_uuid: str
    name: str
    host: str
    protocol: ConsoleProtocol
    endpoint: ConsoleEndpoint
    lifetime: float  # seconds from now, because the clock of a proxy may be wrong


def at_registered_relay(answer: ConsoleEndpoint, host: str, address: str) -> ConsoleEndpoint:
    """Return the console at the address that is registered for a host's relay; raise Unavailable if there is none.

    The address is ADDRESS:PORT, or the path of a Unix socket if the relay is on the proxy's machine.

    Of the host's answer only the secret counts. So a host can make a proxy connect to nothing but its own relay, and
    can choose nothing of what the proxy sends except 64 digits.
    """
    if not address:
        raise Unavailable(
            "The console cannot be reached: no console address is registered for the server's host.", details=host
        )
    if not RELAY_SECRET.fullmatch(answer.secret):
        raise Unavailable("The console cannot be reached: the server's host has no relay for it.", details=host)
    if address.startswith("/"):
        return ConsoleEndpoint(path=address, secret=answer.secret)
    name, _, port = address.rpartition(":")
    return ConsoleEndpoint(host=name.strip("[]"), port=int(port), secret=answer.secret)


def token_digest(token: str) -> str:
    """Return the digest of a token. It is stored and sent in place of the token, and grants nothing by itself."""
    return hashlib.sha256(token.encode()).hexdigest()
