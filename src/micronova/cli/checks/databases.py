"""Checks of the databases: reachable, the right revision, all tables, the rights of the user, room for connections."""

import importlib
import time
from collections.abc import Iterator

import sqlalchemy as sa

from micronova.cli.checks.shape import Check, Finding, NotAsked, Subject
from micronova.cli.maintain import SCHEMAS
from micronova.cli.names import EMBEDDED_ROLES
from micronova.cli.wiring import WITH_COMPUTE_DATABASE
from micronova.cli.workers import worker_count
from micronova.db import schema
from micronova.db.clock import now_of
from micronova.db.engine import Database
from micronova.objects.errors import MicronovaError

OLDEST_POSTGRESQL = 130_000
CLOCK_SECONDS = 30.0
"""Seconds by which the clocks of a region may differ."""
RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def checks(subject: Subject) -> Iterator[Check]:
    """Return a check for each database that the roles have."""
    if not subject.settings.database.connection and (subject.on_bus or not subject.place.path.exists()):
        return
    right = "postgresql://USER:PASSWORD@HOST/NAME of a PostgreSQL that runs and knows this user"
    for name in SCHEMAS:
        roles = WITH_COMPUTE_DATABASE if name == "compute" else (name,)
        if subject.among(roles) or not subject.roles_are_named:
            yield Check(f"database {name}", roles, _Database(name), "database.connection", right)
    if subject.settings.database.connection.startswith("postgres"):
        with_database = (*WITH_COMPUTE_DATABASE, *EMBEDDED_ROLES)
        yield Check("database server", with_database, _server, "database.connection", right)
        yield Check("clock of the database", with_database, _clock, "database.connection")


class _Database:
    """Looks at the database of one service."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._tables, self._migrations = SCHEMAS[service]

    async def __call__(self, subject: Subject) -> list[Finding]:
        """Return what is wrong with it."""
        if not subject.has_database(self._service):
            return [Finding("", "the first start makes it", outcome="ok")]
        database = await subject.database(self._service)
        at, newest = await database.read(schema.current), schema.head(self._migrations)
        metadata = importlib.import_module(self._tables).metadata
        named = subject.process.schema_of(self._service)
        if at is not None and at > newest and not await database.read(schema.usable, self._migrations):
            found = f"the schema is at revision {at}, and this release knows {newest} as the newest"
            return [Finding("database.connection", found, "a newer micronova, or the database of this one")]
        if at is None and not subject.roles_are_named and self._service != "compute":
            return [Finding("", "it is not used yet", outcome="ok")]
        findings: list[Finding] = (
            await database.read(_rights, metadata, named, at) if database.dialect != "sqlite" else []
        )
        if at is None:
            return findings or [Finding("", "it is empty; the first start makes its tables", outcome="ok")]
        if at < newest:
            found = f"the schema is at revision {at}, and this release needs {newest}"
            right = "run `micronova db upgrade --config FILE`, which the start of a role does as well"
            findings.insert(0, Finding("database.connection", found, right))
            return findings
        if database.dialect == "sqlite":
            findings += await database.read(_missing_tables, metadata, None)
        return findings


def _missing_tables(conn: sa.Connection, metadata: sa.MetaData, named: str | None) -> list[Finding]:
    missing = sorted({table.name for table in metadata.tables.values()} - set(sa.inspect(conn).get_table_names(named)))
    if not missing:
        return []
    found = f"the tables {', '.join(missing[:5])} are missing, though the revision says that they are there"
    return [Finding("database.connection", found, "the database of this cloud; restore it from a backup")]


def _rights(conn: sa.Connection, metadata: sa.MetaData, named: str | None, at: str | None) -> list[Finding]:
    """Return which rights the user lacks: on the tables that there are, and to make new ones."""
    found = []
    user = conn.execute(sa.text("SELECT current_user")).scalar_one()
    where = named or "public"
    exists = conn.execute(sa.text("SELECT to_regnamespace(:name) IS NOT NULL"), {"name": where}).scalar_one()
    if not exists:
        may = conn.execute(sa.text("SELECT has_database_privilege(current_database(), 'CREATE')")).scalar_one()
        if not may:
            right = f'GRANT CREATE ON DATABASE "{conn.engine.url.database}" TO "{user}"'
            found.append(Finding("database.connection", f"the user {user} may not make the schema {where}", right))
        return found
    where = where if named else conn.execute(sa.text("SELECT current_schema()")).scalar_one() or where
    for right_name in ("USAGE", "CREATE") if at is None else ("USAGE",):
        may = conn.execute(
            sa.text("SELECT has_schema_privilege(:name, :right)"), {"name": where, "right": right_name}
        ).scalar_one()
        if not may:
            what = "make tables in" if right_name == "CREATE" else "use"
            right = f'GRANT {right_name} ON SCHEMA "{where}" TO "{user}", or make {user} the owner of the database'
            found.append(Finding("database.connection", f"the user {user} may not {what} the schema {where}", right))
    if at is None or found:
        return found
    found += _missing_tables(conn, metadata, where)
    if found:
        return found
    lacking: dict[str, list[str]] = {}
    for table in metadata.tables.values():
        for right_name in RIGHTS:
            values = {"name": f'"{where}"."{table.name}"', "right": right_name}
            if not conn.execute(sa.text("SELECT has_table_privilege(:name, :right)"), values).scalar_one():
                lacking.setdefault(right_name, []).append(table.name)
    for right_name, tables in lacking.items():
        named_tables = ", ".join(tables[:3]) + (f" and {len(tables) - 3} more" if len(tables) > 3 else "")
        said = f"the user {user} has no right {right_name} on {named_tables}"
        right = f'GRANT {right_name} ON ALL TABLES IN SCHEMA "{where}" TO "{user}"'
        found.append(Finding("database.connection", said, right))
    return found


async def _server(subject: Subject) -> list[Finding]:
    """Ask the server for its version, whether it takes writes, and whether the pools fit."""
    database = await _open(subject)
    return await database.read(
        _ask_server, subject.settings.database.pool_size * worker_count(subject.settings, subject.roles)
    )


async def _open(subject: Subject) -> Database:
    name = "compute" if not subject.roles_are_named else next(
        (each for each in SCHEMAS if subject.among(WITH_COMPUTE_DATABASE if each == "compute" else (each,))), "compute"
    )  # fmt: skip
    try:
        return await subject.database(name)
    except MicronovaError:
        raise NotAsked("the database cannot be asked, as said above") from None


def _ask_server(conn: sa.Connection, wanted: int) -> list[Finding]:
    def show(name: str) -> str:
        return str(conn.execute(sa.text(f"SHOW {name}")).scalar_one())

    found = []
    if int(show("server_version_num")) < OLDEST_POSTGRESQL:
        found.append(Finding("database.connection", f"PostgreSQL is {show('server_version')}", "13 or newer"))
    if (
        conn.execute(sa.text("SELECT pg_is_in_recovery()")).scalar_one()
        or show("default_transaction_read_only") == "on"
    ):
        right = "the primary server, with default_transaction_read_only off"
        found.append(Finding("database.connection", "the server takes no writes", right))
    if show("server_encoding") != "UTF8":
        right = "a database made with ENCODING 'UTF8'"
        found.append(Finding("database.connection", f"the database has the encoding {show('server_encoding')}", right))
    free = free_connections(conn)
    if wanted > free:
        said = f"{wanted} connections (times workers) are more than the {free} that the server has"
        right = f"{max(1, free // 4)} or less, or a larger max_connections in postgresql.conf"
        found.append(Finding("database.pool_size", said, right))
    return found


def free_connections(conn: sa.Connection) -> int:
    """Return how many connections the server has for users without special rights."""
    numbers = sa.text(
        "SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END) FROM pg_settings "
        "WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
    )
    return int(conn.execute(numbers).scalar_one())


async def _clock(subject: Subject) -> list[Finding]:
    """Compare the clock of this machine with that of the database, which roles use."""
    database = await _open(subject)
    begin = time.time()
    theirs = await database.read(now_of)
    return clock_finding(theirs, begin, time.time(), "the database server")


def clock_finding(theirs: float, begin: float, end: float, whose: str) -> list[Finding]:
    """Return a finding if another clock is more than CLOCK_SECONDS from ours, whenever it was read meanwhile."""
    apart = max(theirs - end, begin - theirs)
    if apart <= CLOCK_SECONDS:
        return []
    said = f"the clocks of this machine and of {whose} are {apart:.0f} s apart"
    return [Finding("", said, f"at most {CLOCK_SECONDS:g} s: run an NTP client on both machines")]
