"""Opening databases and the bus: wrong settings are told apart from a database or broker that is away for now."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, TypeVar

from micronova.conf.settings import SettingsError, hide_password_in_query
from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.rpc.bus import Bus
from micronova.rpc.errors import BusRefused

if TYPE_CHECKING:
    import sqlalchemy as sa

    from micronova.db.engine import Database

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_SECONDS = 15.0  # until a database answers its first query
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two attempts
FIRST_NOTICE = 60.0  # seconds until the log says again what is waited for; then twice as long each time


async def when_available(attempt: Callable[[], Awaitable[T]], clock: Clock, random: Random) -> T:
    """Return what `attempt` returns; while it raises Unavailable, say so, wait and call it again."""
    began = clock.monotonic()
    pause, notice, next_notice = FIRST_PAUSE, FIRST_NOTICE, began  # the first notice is due at once
    while True:
        try:
            result = await attempt()
        except Unavailable as error:
            now = clock.monotonic()
            if now >= next_notice:
                log.warning("this process waits until it can start (%.0f s so far): %s", now - began, error)
                next_notice, notice = now + notice, 2 * notice
        else:
            if next_notice > began:
                log.warning("this process can start now; it has waited for %.0f s", clock.monotonic() - began)
            return result
        # Jitter: the processes of a region must not all come at the same moment.
        await clock.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)


async def open_and_ask(url: str, schema: str | None, pool_size: int) -> "Database":
    """Open a database that answers; raise SettingsError if the settings are wrong, Unavailable if it is away."""
    from micronova.db.engine import DatabaseRefused, open_database  # imports SQLAlchemy, which hosts do not need

    cannot = f"Cannot open the database {_without_password(url)}"
    database = None
    try:
        database = open_database(url, schema=schema, pool_size=pool_size)
        async with asyncio.timeout(OPEN_SECONDS):
            await database.read(_ping)
    except BaseException as error:
        if database is not None:
            await database.close()
        if (certificate := _wrong_certificate(error)) is not None:
            raise SettingsError(
                f"{cannot}: its certificate is not valid ({certificate.verify_message}). sslrootcert in "
                "database.connection names the authority that has signed it."
            ) from None
        if isinstance(error, TimeoutError):
            raise Unavailable(f"{cannot}: it does not answer within {OPEN_SECONDS:g} s.") from None
        if isinstance(error, Unavailable) and not isinstance(error, DatabaseRefused):
            raise Unavailable(f"{cannot}: {error} ({_first_line(error.__cause__)})") from None
        if isinstance(error, Exception):
            reason = error.__cause__ if isinstance(error, DatabaseRefused) else error
            raise SettingsError(f"{cannot}: {_first_line(reason)}") from None
        raise
    return database


async def start_bus(bus: Bus) -> None:
    """Connect a bus; raise SettingsError if the settings are wrong, Unavailable if the broker is away."""
    try:
        await bus.start()
    except MicronovaError as error:
        kind = Unavailable if isinstance(error, Unavailable) and not isinstance(error, BusRefused) else SettingsError
        raise kind(f"{error.message[:1].upper()}{error.message[1:]}.") from None


def _wrong_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the error of a certificate that is the cause of an error."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__
    return error


def _ping(conn: "sa.Connection") -> None:
    conn.exec_driver_sql("SELECT 1")


def _first_line(error: BaseException | None) -> str:
    return str(getattr(error, "orig", error)).partition("\n")[0]


def _without_password(url: str) -> str:
    url = hide_password_in_query(url)
    scheme, _, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}{at}{place}" if at else url
