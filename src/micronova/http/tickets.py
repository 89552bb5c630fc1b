"""Signed tickets: leave to fetch one thing for a short time, without a token.

Whoever has the key can write a ticket, and the service that shares it can check one; who carries it needs
neither. A ticket is bound to its subject (say, an image) and to the moment it runs out: `EXPIRY.SIGNATURE`.
"""

import base64
import hashlib
import hmac
import re

from micronova.objects.errors import Unauthorized

_FORM = re.compile(r"([1-9][0-9]{0,11})\.([A-Za-z0-9_-]{43})", re.ASCII)
_LEAST_KEY = 16


class Tickets:
    """Writes and checks tickets with one shared key (HMAC-SHA-256)."""

    def __init__(self, key: bytes) -> None:
        if len(key) < _LEAST_KEY:
            raise ValueError(f"A ticket key has at least {_LEAST_KEY} bytes.")
        self._key = key

    def issue(self, subject: str, expires_at: float) -> str:
        """Return a ticket for the subject that is good until `expires_at` (seconds since the epoch)."""
        expiry = int(expires_at)
        return f"{expiry}.{self._sign(subject, expiry)}"

    def verify(self, ticket: str, subject: str, now: float) -> None:
        """Raise Unauthorized unless the ticket is genuine, for this subject, and still good."""
        found = _FORM.fullmatch(ticket)
        if not found or not hmac.compare_digest(found[2], self._sign(subject, int(found[1]))):
            raise Unauthorized("The ticket is not valid for this.")
        if int(found[1]) <= now:
            raise Unauthorized("The ticket has expired; ask for a new one.")

    def _sign(self, subject: str, expiry: int) -> str:
        digest = hmac.new(self._key, f"{expiry}\n{subject}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")
