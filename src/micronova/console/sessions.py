"""Who looks at which guest: what lets them in, and what ends it before they do."""

import asyncio
import logging

from micronova.conductor.rpcapi import ConsoleAuthAPI
from micronova.objects.clock import Clock
from micronova.objects.console import ConsoleGrant, token_digest
from micronova.objects.errors import Conflict, MicronovaError
from micronova.rpc.errors import RemoteError

log = logging.getLogger(__name__)

CHECK_INTERVAL = 15.0
"""Seconds until a server that was deleted behind its host's back is noticed; usually its guest hangs up first."""
MOST_PER_SERVER = 16


class Session:
    """Somebody who is connected to a console."""

    def __init__(self, grant: ConsoleGrant) -> None:
        self.grant = grant
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, reason: str) -> None:
        """Have it ended."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def ended(self) -> str:
        """Wait until somebody else wants it ended; return why."""
        return await asyncio.shield(self._ended)


class Sessions:
    """All sessions of this proxy."""

    def __init__(self, conductor: ConsoleAuthAPI, clock: Clock, *, enforce_timeout: bool = False) -> None:
        self._conductor = conductor
        self._clock = clock
        self._enforce_timeout = enforce_timeout
        self._live: set[Session] = set()

    def __len__(self) -> int:
        return len(self._live)

    async def authorize(self, token: str) -> ConsoleGrant:
        """Ask what a token stands for; NotFound if for nothing."""
        return await self._conductor.authorize(token_digest(token))

    def begin(self, grant: ConsoleGrant) -> Session:
        """Let somebody in. A serial port has one user: whoever comes later takes it over."""
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
        """Note that somebody has gone."""
        self._live.discard(session)

    async def watch(self, session: Session) -> str:
        """Return, once it is so, why a session must not go on."""
        grant = session.grant
        while True:
            pause = CHECK_INTERVAL
            if self._enforce_timeout:
                left = grant.expires_at - self._clock.now()
                if left <= 0:
                    return "This console link has expired: ask for a new one."
                pause = min(pause, left)
            await self._clock.sleep(pause)
            try:
                if not await self._conductor.is_there(grant.instance_uuid, grant.host):
                    return "The server is not on its host any more."
            except (MicronovaError, RemoteError) as error:  # nobody knows better just now: the next time
                log.info("nobody says whether server %s is still there: %s", grant.instance_uuid, error)
