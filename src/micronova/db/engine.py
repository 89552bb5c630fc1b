"""The database: transactions as plain functions, on SQLite or PostgreSQL.

A query is an ordinary function `fn(conn, *args)` over a SQLAlchemy Core connection. `Database.write(fn, *args)` runs
it in one transaction and returns what it returns; `Database.read` does the same without the right to write. So
queries compose by calling each other, and they do not know which database, or which thread, they run on:

- SQLite: one writer thread owns the only writing connection. It takes all transactions that wait, runs each in
  its own savepoint, and commits them together (group commit): one fsync for many. Readers have threads of their
  own and see the last commit (WAL). One hop between threads per transaction.
- PostgreSQL (`db/postgres.py`): asyncpg in this event loop; the function runs in a greenlet. READ COMMITTED: every
  write that depends on what was read says so in its WHERE clause. Serialisation failures and deadlocks are retried.

A transaction happens once, even if its commit is in doubt. SQLite's COMMIT is a call within this process: if it raises
an error, the transaction is rolled back. PostgreSQL's answer to COMMIT may be lost with the connection; the engine then
asks the database what became of the transaction before it runs the function again.

A function may be run more than once, so it must not touch anything but the database.
"""

import asyncio
import contextlib
import itertools
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from micronova.db.expressions import regexp
from micronova.objects.errors import Unavailable, resource_exhausted

P = ParamSpec("P")
R = TypeVar("R")

_SQLITE_EXHAUSTED = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
BATCH = 64  # transactions that share one SQLite commit


class DatabaseRefused(Unavailable):
    """The database does not accept this process: its user, password or name are wrong, or were changed."""

    code = "database_refused"


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


JSON: dict[str, Any] = {"json_serializer": _dumps, "json_deserializer": msgspec.json.decode}


@dataclass
class Statistics:
    """Counters that tests and /metrics read; budgets are counted, not timed."""

    writes: int = 0
    reads: int = 0
    retries: int = 0
    conflicts: int = 0  # of the retries: deadlocks and serialisation failures; others waited too long
    by_function: dict[str, int] = field(default_factory=dict)

    def count(self, kind: Literal["reads", "writes"], name: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        self.by_function[name] = self.by_function.get(name, 0) + 1


class Database(ABC):
    """A database that transactions are run on; made by `open_database`."""

    dialect: str

    def __init__(self) -> None:
        self.statistics = Statistics()

    def pool(self) -> tuple[int, int] | None:
        """Return how many connections are in use, and how many there may be; None if there is no pool."""
        return None

    def read_certificates(self) -> Callable[[], None] | None:
        """Read the certificates of connections again; return what takes them into use, None if there are none.

        Raise ValueError if they cannot be used.
        """
        return None

    @abstractmethod
    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in a transaction that only reads."""

    async def snapshot(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in a transaction that only reads, and whose statements all see the same moment."""
        return await self.read(fn, *args, **kwargs)

    @abstractmethod
    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in one transaction; it is durable when this returns."""

    async def migrate(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn(conn, *args)` in one transaction that changes the schema, or waits for one that does: for hours."""
        return await self.write(fn, *args, **kwargs)

    @abstractmethod
    async def close(self) -> None:
        """Finish what runs and close all connections."""


@dataclass(slots=True)
class _Job:
    fn: Callable[[sa.Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    result: Any = None
    error: BaseException | None = None


_Jobs = queue.SimpleQueue[_Job | None]


async def _run_in(jobs: _Jobs, fn: Callable[[sa.Connection], R]) -> R:
    """Let a thread run a transaction. Cancelling the caller cancels it, if it has not begun."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    jobs.put(_Job(fn, loop, future))
    return await future


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():  # the caller was cancelled after its transaction began, which is committed
            continue
        if job.error is not None:
            exhausted = _sqlite_exhausted(job.error)
            if exhausted is not None:
                exhausted.__cause__ = job.error
            job.future.set_exception(exhausted or job.error)
        else:
            job.future.set_result(job.result)


class SQLiteDatabase(Database):
    """One writer thread with group commit, a few reader threads."""

    dialect = "sqlite"

    def __init__(self, url: URL, readers: int = 2) -> None:
        super().__init__()
        engine_url = url.set(drivername="sqlite+pysqlite")
        # NullPool: each of our threads opens its one connection and keeps it.
        self._engine = sa.create_engine(engine_url, poolclass=sa.NullPool, connect_args={"timeout": 30.0}, **JSON)
        sa.event.listen(self._engine, "connect", _sqlite_connect)
        sa.event.listen(self._engine, "begin", _sqlite_begin)
        self._writes: _Jobs = queue.SimpleQueue()
        self._reads: _Jobs = queue.SimpleQueue()
        self._closed = False
        name = Path(url.database or "").stem
        loops = [(f"{name}-write", self._write_loop), *(readers * [(f"{name}-read", self._read_loop)])]
        self._threads = [threading.Thread(target=loop, name=thread, daemon=True) for thread, loop in loops]
        for thread in self._threads:
            thread.start()

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise Unavailable("The database is closed.")
        self.statistics.count("reads", fn.__qualname__)
        return await _run_in(self._reads, lambda conn: fn(conn, *args, **kwargs))

    def _read_loop(self) -> None:
        conn: sa.Connection | None = None
        while (job := self._reads.get()) is not None:
            if not job.future.cancelled():
                try:
                    if conn is None:
                        conn = self._engine.connect().execution_options(micronova_read=True)
                    job.result = _read(conn, job.fn)
                except BaseException as error:
                    job.error = error
                with contextlib.suppress(RuntimeError):  # the loop was closed while we worked
                    job.loop.call_soon_threadsafe(_resolve, [job])
            del job  # with its result
        if conn is not None:
            conn.close()

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise Unavailable("The database is closed.")
        self.statistics.count("writes", fn.__qualname__)
        return await _run_in(self._writes, lambda conn: fn(conn, *args, **kwargs))

    def _write_loop(self) -> None:
        conn: sa.Connection | None = None
        stopping = False
        while not stopping:
            job = self._writes.get()
            if job is None:
                break
            batch = [job]
            while len(batch) < BATCH:
                try:
                    more = self._writes.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    stopping = True
                    break
                batch.append(more)
            # Callers whose time was up have repeated their requests. To run both would make all others wait longer,
            # until their time was up, too.
            batch = [each for each in batch if not each.future.cancelled()]
            if not batch:
                continue
            try:
                if conn is None:
                    conn = self._engine.connect()
                _run_batch(conn, batch)
            except BaseException as error:  # e.g. a full disk: SQLite has rolled the whole batch back
                # A lock that another process holds would make each of them wait as long again.
                if conn is None or len(batch) == 1 or _is_busy(error):
                    _fail(conn, batch, error)
                else:
                    _run_each(conn, batch)
            for loop, group in itertools.groupby(batch, lambda each: each.loop):
                with contextlib.suppress(RuntimeError):  # the loop was closed while we worked
                    loop.call_soon_threadsafe(_resolve, list(group))
        if conn is not None:
            conn.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writes.put(None)
        for _ in self._threads[1:]:
            self._reads.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._engine.dispose()


def _read(conn: sa.Connection, fn: Callable[[sa.Connection], Any]) -> Any:
    # One snapshot for the whole function, also for what goes around SQLAlchemy (db.prepared).
    raw = _driver(conn)
    raw.execute("BEGIN")
    try:
        return fn(conn)
    finally:
        conn.rollback()
        raw.rollback()


def _run_batch(conn: sa.Connection, batch: list[_Job]) -> None:
    with conn.begin():
        if len(batch) == 1:  # no savepoint needed
            batch[0].result = batch[0].fn(conn)
            return
        # On the driver itself: SQLAlchemy's savepoints cost more than many of the transactions within them.
        raw = _driver(conn)
        for job in batch:
            raw.execute("SAVEPOINT job")
            try:
                job.result = job.fn(conn)
            except BaseException as error:
                raw.execute("ROLLBACK TO job")
                job.error = error
            raw.execute("RELEASE job")


def _run_each(conn: sa.Connection, batch: list[_Job]) -> None:
    """Run the transactions of a failed batch one by one, so that only those fail that cannot be done."""
    for job in batch:
        job.result = job.error = None
        try:
            conn.rollback()
            _run_batch(conn, [job])
        except BaseException as error:
            _fail(conn, [job], error)


def _fail(conn: sa.Connection | None, batch: list[_Job], error: BaseException) -> None:
    for job in batch:
        job.error = error
    if conn is not None:
        with contextlib.suppress(Exception):
            conn.rollback()


def _is_busy(error: BaseException) -> bool:
    return (getattr(getattr(error, "orig", error), "sqlite_errorcode", 0) or 0) & 0xFF == sqlite3.SQLITE_BUSY


def _sqlite_exhausted(error: BaseException) -> Unavailable | None:
    """Return Unavailable for a full disk, missing descriptors and the like: the same transaction may work later."""
    original = getattr(error, "orig", error)
    code = getattr(original, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _SQLITE_EXHAUSTED:
        return Unavailable("The database cannot be used at the moment. Try again later.")
    return resource_exhausted(error)


def _driver(conn: sa.Connection) -> sqlite3.Connection:
    raw: Any = conn.connection.dbapi_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


def _sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    connection.create_function("regexp", 2, regexp, deterministic=True)
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.execute("PRAGMA cache_size=-4096")
    cursor.close()


def _sqlite_begin(conn: sa.Connection) -> None:
    # IMMEDIATE takes the write lock at once, so that a transaction never fails half-way with "database is locked".
    # Readers have begun already.
    if not conn.get_execution_options().get("micronova_read"):
        _driver(conn).execute("BEGIN IMMEDIATE")


def open_database(url: str, *, schema: str | None = None, pool_size: int = 10, pool_timeout: float = 30.0) -> Database:
    """Open the database at `url` (`sqlite:///FILE` or `postgresql://…`); nothing is connected yet."""
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return SQLiteDatabase(parsed)
    if backend == "postgresql":
        from micronova.db.postgres import PostgresDatabase  # imports asyncpg, which takes long

        return PostgresDatabase(parsed, schema, pool_size, pool_timeout)
    raise ValueError(f"Unknown database {backend!r}: use sqlite:///FILE or postgresql://USER@HOST/NAME.")
