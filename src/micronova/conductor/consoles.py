"""Consoles at the conductor: it tells the proxies, which have no database, what a token stands for."""

import logging

import sqlalchemy as sa

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConsoleCheck, ConsoleQuestion, ConsoleStanding
from micronova.db import console_tokens
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleGrant
from micronova.objects.errors import NotFound
from micronova.rpc.contract import Context

log = logging.getLogger(__name__)

PURGE_INTERVAL = 60.0


class Consoles:
    """Handles the messages of console proxies."""

    def __init__(self, database: Database, compute: ComputeAPI, clock: Clock) -> None:
        self._database = database
        self._compute = compute
        self._clock = clock

    async def authorize_console(self, context: Context, params: ConsoleQuestion) -> ConsoleGrant:
        """Say where the bearer of a token may be connected to.

        The host is asked each time: a guest that was restarted has another port, and its old one may be another's.
        """
        row = await self._database.read(console_tokens.find, params.token_digest, micros(self._clock.now()))
        if row is None:
            raise NotFound("This console link is not valid or has expired: ask for a new one.")
        endpoint = await self._compute.get_console(context, row["host"], row["instance_uuid"], row["protocol"])
        return ConsoleGrant(
            instance_uuid=row["instance_uuid"],
            name=row["display_name"],
            host=row["host"],
            protocol=row["protocol"],
            endpoint=endpoint,
            expires_at=row["expires_at"] / 1e6,
        )

    async def check_console(self, context: Context, params: ConsoleCheck) -> ConsoleStanding:
        """Say whether the server that somebody looks at is still where it was."""
        is_there = await self._database.read(console_tokens.is_on, params.instance_uuid, params.host)
        return ConsoleStanding(is_there)

    async def purge_forever(self) -> None:
        """Forget tokens that have run out."""
        while True:
            await self._clock.sleep(PURGE_INTERVAL)
            try:
                await self._database.write(self._purge)
            except Exception as error:
                log.warning("tokens of consoles that ran out are still there: %s", error)

    def _purge(self, conn: sa.Connection) -> int:
        return console_tokens.purge(conn, micros(self._clock.now()))
