"""Answers console proxies, which have no database: which console a token gives access to."""

import logging

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.host_users import HostUsers
from micronova.conductor.rpcapi import ConsoleAuthRequest, ConsoleCheck, ConsoleCheckReply
from micronova.db import console_tokens
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleGrant, at_registered_relay
from micronova.objects.context import Context
from micronova.objects.errors import NotFound

log = logging.getLogger(__name__)

PURGE_INTERVAL = 60.0


class Consoles:
    """Handles the messages of console proxies."""

    def __init__(self, database: Database, compute: ComputeAPI, users: HostUsers, clock: Clock) -> None:
        self._database = database
        self._compute = compute
        self._users = users
        self._clock = clock

    async def authorize_console(self, context: Context, request: ConsoleAuthRequest) -> ConsoleGrant:
        """Return the console that a token gives access to.

        The host is asked each time: a restarted guest has another port, and its old port may belong to another guest.
        """
        row = await self._database.read(console_tokens.find, request.token_digest, micros(self._clock.now()))
        if row is None:
            raise NotFound("This console link is not valid or has expired: ask for a new one.")
        address = await self._users.console_address(row["host"])
        endpoint = await self._compute.get_console(context, row["host"], row["instance_uuid"], row["protocol"])
        if address is not None:
            endpoint = at_registered_relay(endpoint, row["host"], address)
        return ConsoleGrant(
            instance_uuid=row["instance_uuid"],
            name=row["display_name"],
            host=row["host"],
            protocol=row["protocol"],
            endpoint=endpoint,
            lifetime=row["expires_at"] / 1e6 - self._clock.now(),
        )

    async def check_console(self, context: Context, request: ConsoleCheck) -> ConsoleCheckReply:
        """Return whether a server whose console is open is still on its host."""
        is_there = await self._database.read(console_tokens.is_on, request.instance_uuid, request.host)
        return ConsoleCheckReply(is_there)

    async def purge_forever(self) -> None:
        """Delete expired tokens periodically."""
        while True:
            await self._clock.sleep(PURGE_INTERVAL)
            try:
                await self._database.write(self._purge)
            except Exception as error:
                log.warning("expired console tokens were not deleted, which is repeated: %s", error)

    def _purge(self, conn: sa.Connection) -> int:
        return console_tokens.purge(conn, micros(self._clock.now()))
