"""The audit goes through guests, hosts and findings a few times, and not once for each other thing that it has read."""

from collections import UserDict
from collections.abc import AsyncIterator, ItemsView, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.conductor.findings.finding import Finding
from micronova.conductor.findings.network import compare_agents
from micronova.conductor.findings.volumes import compare_volumes
from micronova.db.engine import Database
from micronova.db.tables import instances
from micronova.objects.orders import Guest
from tests.clocks import SetClock
from tests.unit.db.databases import compute_database
from tests.unit.scheduler.rows import add_instances

SERVERS = [f"server-{number:03}" for number in range(100)]


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database("sqlite", request) as opened:
        yield opened


class Answers(UserDict[str, Any]):
    """What hosts have answered; counts how often somebody goes through all of it."""

    walks = 0

    def items(self) -> ItemsView[str, Any]:
        self.walks += 1
        return super().items()


class Volumes:
    """A volume service with an attachment of each server that nobody has recorded."""

    async def server_attachments(self) -> dict[str, tuple[str, str]]:
        return {f"attachment-of-{server}": (f"volume-of-{server}", server) for server in SERVERS}


async def _leaked(database: Database, answers: Answers) -> list[Finding]:
    """Return what the audit finds of volumes if the database was restored from a backup."""
    await database.write(_boot)
    return await compare_volumes(database, SetClock(), Volumes(), answers)


def _boot(conn: sa.Connection) -> None:
    add_instances(conn, *SERVERS)
    conn.execute(instances.update().values(host="host"))


async def test_guests_are_not_searched_for_each_attachment(database: Database) -> None:
    guests = tuple(
        Guest(uuid=each, node="host", epoch=1, power_state=1, volumes=(f"volume-of-{each}",)) for each in SERVERS
    )
    answers = Answers({"host": guests, "other": ()})
    found = await _leaked(database, answers)
    assert len(found) == len(SERVERS)
    assert all(each.repairs[0].destroys and "The guest on host uses it" in each.repairs[0].text for each in found)
    assert answers.walks <= 4  # of two looks


class Host(str):
    """The name of a host, which counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Host.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_hosts_are_not_searched_for_each_agent() -> None:
    def agents() -> Iterator[dict[str, Any]]:
        for number in range(300):
            yield {"host": f"host-{number}", "alive": False, "configurations": {}}

    up = [Host(f"host-{number}") for number in range(0, 300, 2)]
    found = compare_agents([*agents()], up)
    assert [each.subject for each in found] == [str(each) for each in up]
    assert Host.compared <= 3 * len(up)
