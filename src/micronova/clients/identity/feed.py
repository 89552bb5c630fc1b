"""Revocations of an embedded identity service in another process, for services that verify tokens by signature."""

from datetime import datetime

from micronova.clients.identity.client import IdentityClient
from micronova.clients.identity.follower import Follower
from micronova.http.tokens import REVOCATION_OVERLAP, Revocations
from micronova.objects.clock import Clock


class RevocationFeed(Follower):
    """Keeps a set of revocations up to date: a revoked token is refused after at most `interval` seconds.

    While the identity service does not answer, signatures are verified without it.
    """

    what = "revocations"

    def __init__(
        self, identity: IdentityClient, revocations: Revocations, clock: Clock, *, interval: float = 5.0
    ) -> None:
        super().__init__(clock, interval)
        self._identity = identity
        self._revocations = revocations
        self._seen = 0.0

    async def refresh(self) -> None:
        """Read the new revocations."""
        now = self._clock.now()
        for event in await self._identity.revocations(max(0.0, self._seen - REVOCATION_OVERLAP)):
            at, expires_at = (
                datetime.fromisoformat(event[name]).timestamp() for name in ("issued_before", "expires_at")
            )
            self._revocations.record(event["subject"], at, expires_at)
        self._revocations.forget_expired(now)
        self._seen = now
