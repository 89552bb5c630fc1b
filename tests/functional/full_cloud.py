"""A whole cloud in this process: compute with its embedded services, on SQLite, with real tokens.

Tests call it over HTTP without a socket, as users who log in through the identity API. The tests of a module share it.
"""

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.cli.names import ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.embedded.volume.tables import operations
from micronova.http.client import ASGITransport
from micronova.http.service import Route, Service
from tests.functional.cloud import CloudOptions, OneProcess
from tests.people import NEWEST, People, Person
from tests.schemas.openapi import Judge

__all__ = ["NEWEST", "FullCloud", "Person", "full_cloud"]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # A disk or a machine that stands still holds up heartbeats; tests that lose a host have settings of their own.
    "default": {"report_interval": 0.5, "service_down_time": 600.0, "host": "controller"},
    "conductor": {"lease": 6.0, "sweep_interval": 0.5},
    "scheduler": {"refresh_interval": 0.01},
    "quota": {"instances": -1, "cores": -1, "ram": -1, "server_groups": -1, "key_pairs": -1},
    "volume": {"quota_volumes": -1, "quota_gigabytes": -1, "quota_snapshots": -1, "quota_backups": -1},
    "fake": {"hosts": 2},
    "api": {"fault_injection": True},
}


class FullCloud(OneProcess, People):
    """Every role that changes nothing on the machine, in this process; on SQLite unless the settings say otherwise."""

    def __init__(self, directory: Path, **sections: Mapping[str, Any]) -> None:
        super().__init__(directory, CloudOptions(hosts=2))
        roles = [role for role in ROLES if role != "network-agent"]  # it would change the network of this machine
        self.process = Process(load(None, {}, **{**SETTINGS, **sections}), roles, StateDirectory(directory))
        self.anonymous = Person(self)

    async def start(self, sock: socket.socket | None = None) -> None:
        await self.process.start(sock)
        assert self.process.database is not None
        self._watch_writes(self.process.database)
        self._watch_writes(self.process._databases["volume"])
        self.transport = Judge(
            ASGITransport(self.process.application(), "cloud:8774"), lambda: self.process.services["compute"].routes
        )
        self.admin = await self.login("admin", self.process.keys.admin_password, "admin")
        await self.until(self._hosts_up, "all hosts to be up")

    async def _hosts_up(self) -> bool | None:
        found = (await self.admin.do("GET", "/compute/v2.1/os-services?binary=nova-compute"))["services"]
        return True if sum(service["state"] == "up" for service in found) == 2 else None

    def routes(self) -> list[tuple[Service, Route]]:
        """Return every route of every service."""
        return [(service, route) for service in self.process.services.values() for route in service.routes]

    async def open_operations(self) -> Sequence[Any]:
        """Return the operations of compute and of the volume service that are not finished."""
        of_volumes = await self.process._databases["volume"].read(_all_operations)
        return [*await super().open_operations(), *of_volumes]

    async def assert_clean(self) -> None:
        await self.settled()
        assert await run_audit(self.process) == []


def _all_operations(conn: sa.Connection) -> Sequence[Any]:
    """Return the operations of the volume service, which removes them when they end, as compute shows its own."""
    no_step = sa.literal("").label("step")
    return conn.execute(sa.select(operations.c.kind, no_step, operations.c.host.label("owner"))).all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FullCloud]:
    """The module's cloud."""
    cloud = FullCloud(tmp_path_factory.mktemp("cloud"))
    await cloud.start()
    yield cloud
    await cloud.assert_clean()
    await cloud.stop()
