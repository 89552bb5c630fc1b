"""`micronova db purge`: counts, or deletes in batches and says how far it is."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.db import retention, schema
from micronova.db.engine import open_database
from micronova.db.tables import deleted_instances, metadata, operations
from tests.unit.db.test_retention import _instance, _operation

DAY = 86_400_000_000


@pytest.fixture
def cloud(tmp_path: Path) -> Path:
    """A cloud of which one server and one operation are two days old, one server and one operation an hour."""
    directory = tmp_path / "cloud"
    directory.mkdir()

    async def fill() -> None:
        database = open_database(f"sqlite:///{tmp_path}/compute.db")
        await schema.upgrade(database, metadata, "micronova.db.migrations")
        ages = {"old": 0, "new": 2 * DAY}
        await database.write(
            lambda conn: [
                conn.execute(deleted_instances.insert(), [_instance(id, deleted_at=at) for id, at in ages.items()]),
                conn.execute(operations.insert(), [_operation(id, at) for id, at in ages.items()]),
            ]
        )
        await database.close()

    asyncio.run(fill())
    (tmp_path / "settings.toml").write_text(f'[database]\nconnection = "sqlite:///{tmp_path}/compute.db"\n')
    return tmp_path


def _run(cloud: Path, *options: str) -> str:
    command = ["db", "purge", "--dir", str(cloud / "cloud"), "--config", str(cloud / "settings.toml"), *options]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def _left(cloud: Path) -> tuple[int, int]:
    async def count() -> tuple[int, int]:
        database = open_database(f"sqlite:///{cloud}/compute.db")
        found = (
            await database.read(retention.count_operations, 10 * DAY),
            await database.read(retention.count_servers, 10 * DAY),
        )
        await database.close()
        return found

    return asyncio.run(count())


def test_a_dry_run_only_counts(cloud: Path) -> None:
    said = _run(cloud, "--before", "1970-01-02", "--dry-run")
    counts = ("1 finished operations", "1 deleted servers", "0 logs of usage audits")
    assert said.splitlines() == [f"{count} would be purged" for count in counts]
    assert _left(cloud) == (2, 2)


def test_what_is_older_goes(cloud: Path) -> None:
    said = _run(cloud, "--before", "1970-01-02T00:00:00")
    assert said == "1 finished operations purged\n1 deleted servers purged\n0 logs of usage audits purged\n"
    assert _left(cloud) == (1, 1)
