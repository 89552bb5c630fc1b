"""Bringing a database to the schema that this code knows.

An empty database gets its tables from the metadata and is stamped with the newest revision: Alembic, which takes
longer to import than the tables take to make, is not needed for a first start. Any other database is migrated by
Alembic. A test holds that both ways lead to the same tables.

The database says beside its revision which one an older release has to know to work with it: so an upgrade can be
backed out although the schema stays the newer one.
"""

import importlib
import importlib.resources
import logging
import re
from typing import Any

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

_VERSION = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), primary_key=True),
    sa.Column("works_with", sa.String(32)),  # Alembic leaves it alone
)
_LOCK = 0x6D6963726F6E6F76  # "micronov": the advisory lock of everybody who changes a schema


async def upgrade(
    database: Database, metadata: sa.MetaData, migrations: str, *, to: str | None = None, schema: str | None = None
) -> None:
    """Make the tables, or migrate them to the newest revision (or `to`) of the package `migrations`."""
    await database.migrate(_upgrade, metadata, migrations, to, schema)


def check_current(conn: sa.Connection, migrations: str) -> None:
    """Raise an error unless this release can work with the database as it is."""
    at, newest = current(conn), head(migrations)
    if at is None:
        raise MicronovaError("There is no cloud yet: its database is empty. Start it, or name it with --dir.")
    if at < newest:
        raise MicronovaError(
            f"The database is at revision {at}, and this version needs {newest}: run `micronova db upgrade`, "
            "or use the version of the services."
        )
    if not usable(conn, migrations):
        raise _too_new(at, newest)


def usable(conn: sa.Connection, migrations: str) -> bool:
    """Return whether this release can work with the database: it knows its revision, or that of a later release which
    has only added to it.
    """
    at, oldest = _stamp(conn)
    newest = head(migrations)
    return at == newest or (at is not None and at > newest and oldest is not None and oldest <= newest)


def works_with(migrations: str) -> str:
    """Return the oldest revision whose release works with the newest one of a package of migrations."""
    oldest: str = importlib.import_module(f"{migrations}.works_with").OLDEST
    return oldest


def exclusively(conn: sa.Connection) -> None:
    """Let one transaction at a time do what a first start needs; SQLite has one writer at a time anyway.

    For `Database.migrate`: the one that has its turn may take long.
    """
    if conn.dialect.name == "postgresql":
        conn.execute(sa.text("SET LOCAL lock_timeout = 0"))  # a migration may take longer than others wait for a lock
        conn.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        conn.execute(sa.text("SET LOCAL lock_timeout TO DEFAULT"))


def head(migrations: str) -> str:
    """Return the newest revision of a package of migrations."""
    found = revisions(migrations)
    if not found:
        raise MicronovaError(f"{migrations} has no revisions.")
    return found[-1]


def revisions(migrations: str) -> list[str]:
    """Return all revisions of a package of migrations, in the order of their names."""
    versions = importlib.resources.files(migrations) / "versions"
    return sorted(entry.name[:4] for entry in versions.iterdir() if re.match(r"\d{4}_\w+\.py$", entry.name))


def current(conn: sa.Connection) -> str | None:
    """Return the revision that the database is at; None when it is empty."""
    return _stamp(conn)[0]


def _stamp(conn: sa.Connection) -> tuple[str | None, str | None]:
    """Return the revision, and the oldest one that a release has to know; None if the database does not say it."""
    if not sa.inspect(conn).has_table("alembic_version"):
        return None, None
    row = conn.execute(sa.text("SELECT * FROM alembic_version")).mappings().first()
    return (None, None) if row is None else (row["version_num"], row.get("works_with"))


def _upgrade(conn: sa.Connection, metadata: sa.MetaData, migrations: str, to: str | None, schema: str | None) -> None:
    # Several roles may start at the same moment on an empty database: one makes the tables, the others wait.
    exclusively(conn)
    if conn.dialect.name == "postgresql" and schema:
        conn.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
    at, oldest = _stamp(conn)
    newest = head(migrations)
    if to is not None:
        if at != to:
            _alembic(conn, migrations, to)
        return
    if at is None:
        _VERSION.create(conn)
        metadata.create_all(conn)
        conn.execute(_VERSION.insert(), {"version_num": newest, "works_with": works_with(migrations)})
        return
    if at > newest:
        if not usable(conn, migrations):
            raise _too_new(at, newest)
        log.info("%s: the database is at revision %s of a later release, with which this one works", migrations, at)
        return
    if at < newest:
        log.info("migrating %s from %s to %s", migrations, at, newest)
        _alembic(conn, migrations, "head")
    if oldest != works_with(migrations):
        if "works_with" not in {column["name"] for column in sa.inspect(conn).get_columns("alembic_version")}:
            conn.execute(sa.text("ALTER TABLE alembic_version ADD COLUMN works_with VARCHAR(32)"))
        conn.execute(_VERSION.update(), {"works_with": works_with(migrations)})


def _too_new(at: str, newest: str) -> MicronovaError:
    return MicronovaError(
        f"The database is at revision {at}, newer than {newest}, the newest that this version knows, and its release "
        "does not say that they work together: use a newer micronova."
    )


def _alembic(conn: sa.Connection, migrations: str, revision: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files(migrations)))
    script = ScriptDirectory.from_config(config)

    def steps(at: Any, _context: Any) -> Any:
        return script._upgrade_revs(revision, at)

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=conn, transactional_ddl=False)
        environment.run_migrations()
