"""A compute database for a test: SQLite always, PostgreSQL where a private one is offered."""

import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from micronova.db.engine import Database, open_database
from micronova.db.tables import metadata
from tests.services.postgres import Postgres

KINDS = ("sqlite", "postgresql")


@contextlib.asynccontextmanager
async def compute_database(kind: str, directory: Path) -> AsyncIterator[Database]:
    """Open an empty compute database with its tables."""
    if kind == "sqlite":
        database = open_database(f"sqlite:///{directory}/compute.db")
        await database.write(metadata.create_all)
        try:
            yield database
        finally:
            await database.close()
        return
    with _private_postgres() as url:
        schema = f"t{uuid.uuid4().hex}"
        database = open_database(url, schema=schema)
        from sqlalchemy import schema as ddl

        await database.write(lambda conn: conn.execute(ddl.CreateSchema(schema)))
        await database.write(metadata.create_all)
        try:
            yield database
        finally:
            await database.write(lambda conn: conn.execute(ddl.DropSchema(schema, cascade=True)))
            await database.close()


_started: Postgres | None = None


@contextlib.contextmanager
def _private_postgres():
    """Give the URL of the PostgreSQL of this test run; the first test that needs one starts it."""
    global _started
    offered = os.environ.get("MICRONOVA_TEST_SERVICES")
    if offered:
        yield json.loads(Path(offered).read_text())["postgres"]
        return
    if _started is None:
        import atexit
        import shutil
        import tempfile

        directory = Path(tempfile.mkdtemp(prefix="micronova-postgres-"))
        directory.chmod(0o755)
        _started = Postgres.start(directory / "postgres")

        def stop() -> None:
            assert _started is not None
            _started.stop()
            shutil.rmtree(directory, ignore_errors=True)

        atexit.register(stop)
    yield _started.url
