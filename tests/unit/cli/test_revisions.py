"""Commands that read or write a database leave its revision alone, and refuse one that is at another revision."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.db import schema
from micronova.db.engine import open_database
from micronova.db.tables import metadata

MIGRATIONS = "micronova.db.migrations"
NEWEST = schema.head(MIGRATIONS)
BEFORE = schema.revisions(MIGRATIONS)[-2]


def _revision(url: str) -> str | None:
    async def read() -> str | None:
        database = open_database(url)
        found = await database.read(schema.current)
        await database.close()
        return found

    return asyncio.run(read())


def _make(url: str, revision: str) -> None:
    async def make() -> None:
        database = open_database(url)
        await schema.upgrade(database, metadata, MIGRATIONS, to=min(revision, NEWEST))
        if revision > NEWEST:  # of a later release that has taken something away
            stamp = sa.text("ALTER TABLE alembic_version ADD COLUMN works_with VARCHAR(32)")
            await database.write(lambda conn: conn.execute(stamp) and None)
            later = sa.text("UPDATE alembic_version SET version_num = :revision, works_with = :revision")
            await database.write(lambda conn: conn.execute(later, {"revision": revision}) and None)
        await database.close()

    asyncio.run(make())


@pytest.mark.parametrize(
    "command", ["audit", "timeline web", "explain web", "host list", "db purge --before 2020-01-01"]
)
@pytest.mark.parametrize(
    ("revision", "remedy"), [(BEFORE, "micronova db upgrade"), ("9999", "newer micronova"), (None, "is empty")]
)
def test_another_revision_is_refused(tmp_path: Path, command: str, revision: str | None, remedy: str) -> None:
    url = f"sqlite:///{tmp_path}/compute.db"
    if revision is not None:
        _make(url, revision)
    (tmp_path / "settings.toml").write_text(f'[database]\nconnection = "{url}"\n')
    options = ["--dir", str(tmp_path / "cloud"), "--config", str(tmp_path / "settings.toml")]
    done = CliRunner().invoke(main, [*command.split(), *options])
    assert done.exit_code == 1, done.output
    assert remedy in done.stderr
    assert _revision(url) == revision
