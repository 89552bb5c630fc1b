"""Revocations of an embedded identity service in another process, for services that verify tokens by signature."""

import asyncio
import contextlib
import logging
from datetime import datetime

from micronova.clients.identity.client import IdentityClient
from micronova.http.tokens import Revocations
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

OVERLAP = 60.0  # seconds that each request reaches back, because clocks differ and transactions commit out of order


class RevocationFeed:
    """Keeps a set of revocations up to date: a revoked token is refused after at most `interval` seconds."""

    def __init__(
        self, identity: IdentityClient, revocations: Revocations, clock: Clock, *, interval: float = 5.0
    ) -> None:
        self._identity = identity
        self._revocations = revocations
        self._clock = clock
        self._interval = interval
        self._seen = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the revocations once and then follow them; an identity service that does not answer is asked again."""
        await self._look()
        self._task = asyncio.create_task(self._follow(), name="revocation-feed")

    async def stop(self) -> None:
        """Stop following the revocations."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self._look()

    async def _look(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # the next look tries again; signatures are verified without it
            log.warning("cannot read the revocations of the identity service: %s", error)

    async def refresh(self) -> None:
        """Read the new revocations."""
        now = self._clock.now()
        for event in await self._identity.revocations(max(0.0, self._seen - OVERLAP)):
            at, expires_at = (
                datetime.fromisoformat(event[name]).timestamp() for name in ("issued_before", "expires_at")
            )
            self._revocations.record(event["subject"], at, expires_at)
        self._revocations.forget_expired(now)
        self._seen = now
