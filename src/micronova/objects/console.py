"""Consoles: where a guest's screen or serial port is, and what a token for one stands for."""

import hashlib
from typing import Literal

import msgspec

ConsoleProtocol = Literal["vnc", "spice", "serial"]
"""The protocols that drivers speak; the API knows more, and refuses them."""


class ConsoleEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a console can be reached: a Unix socket, or an address and a port."""

    path: str = ""
    host: str = ""
    port: int = 0
    secret: str = ""  # what a relay wants to hear first


class ConsoleGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What the bearer of a token may be connected to."""

    instance_uuid: str
    name: str
    host: str
    protocol: ConsoleProtocol
    endpoint: ConsoleEndpoint
    expires_at: float  # seconds since the epoch; until then new connections are let in


def token_digest(token: str) -> str:
    """Return what is kept of a token, and sent about: it proves the token and cannot stand for it."""
    return hashlib.sha256(token.encode()).hexdigest()
