"""`micronova audit --config FILE`: it connects once, however much it repairs."""

import asyncio
import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.cli.wiring import Process
from micronova.db import schema
from micronova.db.engine import open_database
from micronova.db.tables import metadata, quota_usages

PROJECTS = 5


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The settings of a region whose broker is away, and whose quotas were counted wrong."""

    async def fill() -> None:
        database = open_database(f"sqlite:///{tmp_path}/compute.db")
        await schema.upgrade(database, metadata, "micronova.db.migrations")
        rows = [{"project_id": f"p{number}", "resource": "instances", "in_use": 7} for number in range(PROJECTS)]
        await database.write(lambda conn: conn.execute(quota_usages.insert(), rows))
        await database.close()

    asyncio.run(fill())
    (tmp_path / "settings.toml").write_text(
        f'[default]\nstate_path = "{tmp_path}/state"\ntransport_url = "amqp://user:word@127.0.0.1:1/"\n'
        f'[database]\nconnection = "sqlite:///{tmp_path}/compute.db"\n'
    )
    return tmp_path / "settings.toml"


def _charged(settings: Path) -> int:
    async def read() -> int:
        database = open_database(f"sqlite:///{settings.parent}/compute.db")
        found = await database.read(lambda conn: conn.execute(sa.select(sa.func.sum(quota_usages.c.in_use))).scalar())
        await database.close()
        return int(found or 0)

    return asyncio.run(read())


def test_all_repairs_share_a_connection(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = 0
    original = Process.connect

    async def connect(self: Process, *, without_bus: bool = False) -> None:
        nonlocal connected
        connected += 1
        await original(self, without_bus=without_bus)

    monkeypatch.setattr(Process, "connect", connect)
    command = ["audit", "--config", str(settings), "--repair", "--yes", "--json"]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert len(json.loads(done.stdout)["repaired"]) == PROJECTS, done.output
    assert _charged(settings) == 0
    assert connected == 1


def test_settings_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[database]\nconnection = 7\n")
    done = CliRunner().invoke(main, ["audit", "--config", str(tmp_path / "settings.toml")])
    assert done.exit_code != 0 and "database.connection" in done.output
    assert "Traceback" not in done.output
