"""Signed tickets: permission to do one thing for a short time, without a token.

A ticket permits its bearer to download, upload or manage an image, or to act as a host.

One service issues a ticket and another verifies it with the same key; the bearer has no key. A ticket is valid for
one subject (an image, for example) until its expiry time. Its form is `EXPIRY.SIGNATURE`.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence

from micronova.objects.errors import Unauthorized

_FORM = re.compile(r"([1-9][0-9]{0,11})\.([A-Za-z0-9_-]{43})", re.ASCII)
_LEAST_KEY = 16


def download_subject(image_id: str) -> str:
    """Return the subject of a ticket to download an image: its id."""
    return image_id


def upload_subject(image_id: str, host: str) -> str:
    """Return the subject of a ticket to upload an image from a host."""
    return f"upload\n{image_id}\n{host}"


def manage_subject(image_id: str) -> str:
    """Return the subject of a ticket with which a conductor shows and deletes an image that it has had made."""
    return f"manage\n{image_id}"


class Tickets:
    """Issues and verifies tickets with one shared key (HMAC-SHA-256).

    Tickets of the `others` are genuine, too, while the key is being changed.
    """

    def __init__(self, key: bytes, others: Sequence[bytes] = ()) -> None:
        self._keys = (key, *others)
        if min(map(len, self._keys)) < _LEAST_KEY:
            raise ValueError(f"A ticket key has at least {_LEAST_KEY} bytes.")

    def issue(self, subject: str, expires_at: float) -> str:
        """Return a ticket for the subject that is valid until `expires_at` (seconds since 1970, UTC)."""
        expiry = int(expires_at)
        return f"{expiry}.{_sign(self._keys[0], subject, expiry)}"

    def all(self, subject: str, expiry: int) -> list[str]:
        """Return the tickets for the subject and this time of expiry, one for each key."""
        return [f"{expiry}.{_sign(key, subject, expiry)}" for key in self._keys]

    def verify(self, ticket: str, subject: str, now: float) -> None:
        """Raise Unauthorized unless the ticket is genuine, for this subject, and not expired."""
        found = _FORM.fullmatch(ticket)
        if not found or not any(
            hmac.compare_digest(found[2], _sign(key, subject, int(found[1]))) for key in self._keys
        ):
            raise Unauthorized("The ticket is not valid for this.")
        if int(found[1]) <= now:
            raise Unauthorized("The ticket has expired; ask for a new one.")


def _sign(key: bytes, subject: str, expiry: int) -> str:
    digest = hmac.new(key, f"{expiry}\n{subject}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
