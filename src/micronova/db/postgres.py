"""PostgreSQL: asyncpg under SQLAlchemy; every function runs in a greenlet of this event loop.

We begin and end transactions ourselves, on asyncpg: its connections are in autocommit mode for SQLAlchemy. A function
that only reads needs no BEGIN and COMMIT: under READ COMMITTED each statement sees for itself.

A connection that is lost while it commits leaves the transaction in doubt. If the function were run again after a
commit that happened, a request would be done twice, or end in a conflict with itself. So each write transaction knows
its id before it commits, and PostgreSQL is asked for the fate of that id (`pg_xact_status`). The id costs no round
trip: the message that says BEGIN also puts it into `application_name`, a parameter whose changes the server reports.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import asyncpg
import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util.concurrency import await_

from micronova.db.connections import Connections
from micronova.db.engine import JSON, Database, DatabaseRefused
from micronova.db.prepared import on_asyncpg
from micronova.objects.errors import Unavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 12
DOUBT = 30.0  # seconds for which we ask what became of a transaction
ANSWER = 5.0  # seconds for which we wait for the answer to BEGIN, to COMMIT, or to that question
IDLE = 10.0  # seconds after which the server ends a transaction whose client is silent: it stands still or is gone
STATEMENT = 60.0  # seconds for which we wait for the answer to another statement
MIGRATION = 12 * 3600.0  # the same while the schema is changed: a large table takes long
LOCK_WAIT = 5.0  # seconds for which a statement waits for a lock before its transaction is run again

_PREPARE = "PREPARE report_id AS SELECT set_config('application_name', 'micronova ' || pg_current_xact_id(), true)"
_BEGIN = "BEGIN; EXECUTE report_id"
_BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_STATUS = sa.text("SELECT pg_xact_status(CAST(CAST(:id AS text) AS xid8))")
# Its client is gone, and nobody else can end it: it would keep its locks until TCP gives up.
_END = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE backend_xid = xid(CAST(CAST(:id AS text) AS xid8)) AND pid <> pg_backend_pid()"
)


_REFUSED = ("28", "3D000")  # a wrong user or password, no such database
_TLS_OPTIONS = ("sslmode", "sslrootcert", "sslcert", "sslkey")
_TLS_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_UNFIT = ("25006", "55000")  # read-only, or not ready: the server is a standby now, and another one may be writable


class _Attempt(Generic[R]):
    """What has become of an attempt at a transaction."""

    result: R  # of its function
    id = ""  # of the transaction, once its commit may have happened


def _tls(url: URL) -> tuple[URL, dict[str, Any]]:
    """Take libpq's options of TLS (sslmode, sslrootcert, sslcert, sslkey) from a URL; return asyncpg's for them."""
    named = {option: str(url.query[option]) for option in _TLS_OPTIONS if option in url.query}
    if not named:
        return url, {}
    rest = url.difference_update_query(named)
    mode = named.get("sslmode", "verify-full")  # who names a file expects encryption
    if mode not in _TLS_MODES:
        raise ValueError(f"sslmode is one of {', '.join(_TLS_MODES)}, not {mode}")
    if mode in ("disable", "allow", "prefer"):
        return rest, {"ssl": mode}
    verifies = mode.startswith("verify") or "sslrootcert" in named
    try:
        context = ssl.create_default_context(cafile=named.get("sslrootcert"))
        if "sslcert" in named:
            context.load_cert_chain(named["sslcert"], named.get("sslkey"))
    except OSError as error:  # also errors of TLS
        files = ", ".join(file for option, file in named.items() if option != "sslmode")
        raise ValueError(f"a file that it names cannot be used ({files}): {error}") from None
    context.check_hostname = mode == "verify-full"
    if not verifies:
        context.verify_mode = ssl.CERT_NONE
    return rest, {"ssl": context}


class PostgresDatabase(Database):
    """A pool of connections; transactions that fail for a moment's reason are run again."""

    dialect = "postgresql"

    def __init__(self, url: URL, schema: str | None = None, pool_size: int = 10, pool_timeout: float = 30.0) -> None:
        super().__init__()
        self._url = url
        tls = _tls(url)[1]
        self._tls = tls.get("ssl")
        options: dict[str, Any] = {**tls, "timeout": 10, "command_timeout": STATEMENT}
        # Statements of `db.prepared` are prepared once per connection, and as long as it lives.
        options |= {"statement_cache_size": 500, "max_cached_statement_lifetime": 0}
        options["server_settings"] = _session_settings() | ({"search_path": schema} if schema else {})
        self._connections = Connections(self._make_engine(options).sync_engine, pool_size, pool_timeout)
        # What became of a commit is asked on a new connection: those of the pool may be dead as well.
        self._asking = self._make_engine(options | {"timeout": ANSWER, "command_timeout": ANSWER})
        migrating = self._make_engine(options | {"command_timeout": MIGRATION})
        self._migrations = Connections(migrating.sync_engine, pool_size, pool_timeout)
        self._random = random.Random()  # spreads retries; nothing that a simulation needs to repeat

    def pool(self) -> tuple[int, int] | None:
        return self._connections.in_use, self._connections.size

    def read_certificates(self) -> Callable[[], None] | None:
        if not isinstance(self._tls, ssl.SSLContext):
            return None
        renewed = _tls(self._url)[1]["ssl"]

        def use() -> None:
            self._tls = renewed

        return use

    def _make_engine(self, connect_args: dict[str, Any]) -> AsyncEngine:
        url = _tls(self._url)[0].set(drivername="postgresql+asyncpg")
        engine = create_async_engine(
            url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool, connect_args=connect_args, **JSON
        )
        sa.event.listen(engine.sync_engine, "do_connect", self._use_tls)
        sa.event.listen(engine.sync_engine, "connect", _prepare)
        return engine

    def _use_tls(self, dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> None:
        """Let a connection that begins use the certificates that were read last."""
        if self._tls is not None:
            options["ssl"] = self._tls

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.statistics.count("reads", fn.__qualname__)
        return await self._run(self._connections, "", lambda conn: fn(conn, *args, **kwargs))

    async def snapshot(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.statistics.count("reads", fn.__qualname__)
        return await self._run(self._connections, _BEGIN_SNAPSHOT, lambda conn: fn(conn, *args, **kwargs))

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.statistics.count("writes", fn.__qualname__)
        # A transaction runs in a task of its own: a cancelled caller must not cut a commit in two.
        work = self._run(self._connections, _BEGIN, lambda conn: fn(conn, *args, **kwargs))
        return await asyncio.shield(asyncio.ensure_future(work))

    async def migrate(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.statistics.count("writes", fn.__qualname__)
        try:
            return await self._run(self._migrations, _BEGIN, lambda conn: fn(conn, *args, **kwargs))
        finally:
            await self._migrations.close()

    async def _run(self, connections: Connections, begin: str, fn: Callable[[sa.Connection], R]) -> R:
        for attempt in range(RETRIES):
            done: _Attempt[R] = _Attempt()
            try:
                await connections.run(partial(_transact, begin=begin, fn=fn, done=done))
                return done.result
            except (sa.exc.DBAPIError, asyncpg.PostgresError, OSError, TimeoutError) as error:
                if _state(error).startswith(_REFUSED):
                    # Users read the error: the reason, which names the user and the database, is for the log.
                    log.error("the database refuses this process: %s; correct database.connection", _reason(error))
                    raise DatabaseRefused("The database cannot be used at the moment. Try again later.") from error
                lost = _is_lost(error) or not isinstance(error, sa.exc.DBAPIError)
                if not (lost or _temporary(error)):
                    raise
                if done.id and not _rolled_back(error) and await self._committed(done.id):
                    return done.result
                if attempt == RETRIES - 1:
                    raise Unavailable(_given_up(error)) from error
                self.statistics.retries += 1
                self.statistics.conflicts += _rolled_back(error)
                await self._pause(attempt)
        raise AssertionError("unreachable")

    async def _committed(self, id: str) -> bool:
        """Return whether a transaction whose answer to COMMIT was lost has happened; raise Unavailable if unknown."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DOUBT
        attempt = 0
        while loop.time() < deadline:
            try:
                async with self._asking.connect() as conn:
                    status = (await conn.execute(_STATUS, {"id": id})).scalar()
                    if status in ("committed", "aborted"):
                        log.warning("the answer to COMMIT of transaction %s was lost; it is %s", id, status)
                        return bool(status == "committed")
                    if status == "in progress":
                        await conn.execute(_END, {"id": id})
            except (sa.exc.DBAPIError, OSError, TimeoutError) as error:
                if _state(error) == "22023":  # an id of the future: the server was set back to a time before it
                    return False
                if not _temporary(error) and isinstance(error, sa.exc.DBAPIError) and not error.connection_invalidated:
                    raise
            await self._pause(attempt)
            attempt += 1
        raise Unavailable("The database does not answer. It is not known whether the change was made.")

    async def _pause(self, attempt: int) -> None:
        await asyncio.sleep(self._random.random() * min(1.0, 0.005 * 2**attempt))

    async def close(self) -> None:
        await self._connections.close()


def _transact(connections: Connections, *, begin: str, fn: Callable[[sa.Connection], R], done: _Attempt[R]) -> None:
    """Run a transaction once, from the connection to the commit in one greenlet."""
    conn, generation = connections.take()
    try:
        if begin:
            _control(conn, begin)
        done.result = fn(conn)
        if begin:
            done.id = _transaction_id(conn)
            _control(conn, "COMMIT")
    except BaseException as error:
        if _state(error) in _UNFIT or isinstance(error, OSError | TimeoutError) or _is_lost(error):
            connections.replace()
        else:
            _roll_back(conn)
        raise
    finally:
        connections.give_back(conn, generation)


def _session_settings() -> dict[str, str]:
    """Return the settings by which the server ends what a lost or halted client left, so that its locks are free."""
    return {
        "idle_in_transaction_session_timeout": str(round(IDLE * 1000)),
        "lock_timeout": str(round(LOCK_WAIT * 1000)),
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": "20000",
    }


def _prepare(connection: Any, _record: object) -> None:
    """Prepare a new connection for our transactions and values."""
    raw = _raw(connection)
    await_(raw.execute(_PREPARE))
    # SQLAlchemy's would decode the bytes first.
    await_(
        raw.set_type_codec(
            "json", schema="pg_catalog", encoder=str.encode, decoder=JSON["json_deserializer"], format="binary"
        )
    )


def _raw(connection: Any) -> asyncpg.Connection:
    raw = connection.driver_connection
    assert isinstance(raw, asyncpg.Connection)
    return raw


def _control(conn: sa.Connection, command: str) -> None:
    """Begin or end a transaction."""
    # It takes a moment: a connection that went silent is noticed by it, and not after `command_timeout`.
    on_asyncpg(conn, "execute", command, timeout=ANSWER)


def _roll_back(conn: sa.Connection) -> None:
    """End the transaction, if one runs; give up the connection if that cannot be done."""
    if not conn.invalidated and _raw(conn.connection).is_in_transaction():
        try:
            _control(conn, "ROLLBACK")
        except (sa.exc.DBAPIError, OSError, TimeoutError):
            if not conn.invalidated:
                conn.invalidate()


def _transaction_id(conn: sa.Connection) -> str:
    """Return the id of the transaction that runs; "" if it only reads."""
    name: str = _raw(conn.connection).get_settings().application_name
    return name.partition("micronova ")[2]


def _state(error: BaseException) -> str:
    """Return the SQLSTATE of an error, "" if it has none."""
    original = getattr(error, "orig", error)
    return str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")


def _given_up(error: BaseException) -> str:
    """Return what to say of a transaction that was tried again and again."""
    if _state(error) == "55P03":
        return (
            "The database is busy: another session has held a lock for too long, such as that of a backup (pg_dump) "
            "while the schema is upgraded. Try again when it has ended."
        )
    return "The database does not answer."


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated


def _reason(error: BaseException) -> str:
    return str(getattr(error, "orig", error)).partition("\n")[0]


def _rolled_back(error: BaseException) -> bool:
    """Return whether the error itself says that the transaction did not happen: serialisation failures, deadlocks."""
    return _state(error) in ("40001", "40P01")


def _temporary(error: BaseException) -> bool:
    # 57P0x shutdown or start, 08xxx connection, 53xxx full disk, out of memory or too many clients,
    # 55P03 lock not available, 25P03 the session was ended because its transaction was idle, 57014 statement timeout,
    # 58000 and 58030 the operating system or the disk of the server fails
    later = ("57P0", "08", "53", "55P03", "25P03", "57014", "58000", "58030", *_UNFIT)
    return _rolled_back(error) or _state(error).startswith(later)
