"""The sessions of a console proxy: authorizing them, and ending those that must not continue."""

import asyncio
import logging
from typing import Protocol

from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleGrant, token_digest
from micronova.objects.errors import Conflict, MicronovaError
from micronova.rpc.errors import RemoteError

log = logging.getLogger(__name__)

CHECK_INTERVAL = 15.0
"""Seconds between checks that a server is still on its host; usually its guest closes the console first."""
MOST_PER_SERVER = 16


class ConsoleAuth(Protocol):
    """What the proxy needs of a conductor; `micronova.conductor.rpcapi` implements it."""

    async def authorize(self, token_digest: str) -> ConsoleGrant:
        """Return what a token is for; raise NotFound if it is not valid."""

    async def is_there(self, instance_uuid: str, host: str) -> bool:
        """Return whether a server is still on a host."""


class Session:
    """A connection to a console."""

    def __init__(self, grant: ConsoleGrant) -> None:
        self.grant = grant
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, reason: str) -> None:
        """End the session."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def ended(self) -> str:
        """Wait until `end` is called; return the reason."""
        return await asyncio.shield(self._ended)


class Sessions:
    """All sessions of this proxy."""

    def __init__(self, conductor: ConsoleAuth, clock: Clock, *, enforce_timeout: bool = False) -> None:
        self._conductor = conductor
        self._clock = clock
        self._enforce_timeout = enforce_timeout
        self._live: set[Session] = set()

    def __len__(self) -> int:
        return len(self._live)

    async def authorize(self, token: str) -> ConsoleGrant:
        """Return what a token is for; raise NotFound if it is not valid."""
        return await self._conductor.authorize(token_digest(token))

    def begin(self, grant: ConsoleGrant) -> Session:
        """Add a session. A serial port has one user: a later session ends the earlier one."""
        others = [session for session in self._live if session.grant.instance_uuid == grant.instance_uuid]
        if grant.protocol == "serial":
            for other in others:
                if other.grant.protocol == "serial":
                    other.end("The serial console was opened in another window.")
        elif len(others) >= MOST_PER_SERVER:
            raise Conflict(f"So many windows ({MOST_PER_SERVER}) show this server's console already: close one.")
        session = Session(grant)
        self._live.add(session)
        return session

    def finish(self, session: Session) -> None:
        """Remove a session that has ended."""
        self._live.discard(session)

    async def watch(self, session: Session) -> str:
        """Wait until a session must not continue; return the reason."""
        grant = session.grant
        expires_at = self._clock.monotonic() + grant.lifetime
        while True:
            pause = CHECK_INTERVAL
            if self._enforce_timeout:
                left = expires_at - self._clock.monotonic()
                if left <= 0:
                    return "This console link has expired: ask for a new one."
                pause = min(pause, left)
            await self._clock.sleep(pause)
            try:
                if not await self._conductor.is_there(grant.instance_uuid, grant.host):
                    return "The server is not on its host any more."
            except (MicronovaError, RemoteError) as error:  # checked again next time
                log.info("cannot check whether server %s is still on its host: %s", grant.instance_uuid, error)
