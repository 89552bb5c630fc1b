"""What an embedded identity in another process revoked, for services that verify its tokens by signature."""

import asyncio
import contextlib
import logging
from datetime import datetime

from micronova.http.tokens import Revocations
from micronova.identity.client import IdentityClient
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

OVERLAP = 60.0  # seconds that each look reaches back: clocks differ, and transactions end out of order


class RevocationFeed:
    """Keeps a set of revocations up to date: a revoked token is refused here at most `interval` seconds later."""

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
        """Begin to follow; the first look is part of it when the identity service answers already."""
        await self._look()
        self._task = asyncio.create_task(self._follow(), name="revocation-feed")

    async def stop(self) -> None:
        """Stop following."""
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
        except Exception as error:  # identity may be away for a while; tokens are verified all the same
            log.warning("the revocations of the identity service could not be read: %s", error)

    async def refresh(self) -> None:
        """Ask once."""
        now = self._clock.now()
        for event in await self._identity.revocations(max(0.0, self._seen - OVERLAP)):
            subject: str = event["subject"]
            if subject.startswith("audit:"):
                until = datetime.fromisoformat(event["expires_at"]).timestamp()
                self._revocations.revoke(subject.removeprefix("audit:"), until)
            else:
                self._revocations.revoke_all(subject, datetime.fromisoformat(event["issued_before"]).timestamp())
        self._seen = now
