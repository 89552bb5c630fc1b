"""A role whose database or broker is away when it is started waits; commands and wrong settings end at once."""

import asyncio
import itertools
import logging
import random
import socket
from pathlib import Path

import pamqp.frame
import pytest
from pamqp import commands

from micronova.cli import connections
from micronova.cli.connections import when_available
from micronova.cli.names import ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import SettingsError, load
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Unavailable
from tests.services.postgres import Postgres
from tests.unit.rpc.amqp.fake_broker import FakeBroker

SAID = "this process waits until it can start"


class Said(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.event.set()

    async def __aenter__(self) -> asyncio.Event:
        logging.getLogger("micronova").addHandler(self)
        return self.event

    async def __aexit__(self, *_: object) -> None:
        logging.getLogger("micronova").removeHandler(self)


def process_of(directory: Path, *roles: str, waits: bool = True, database: str = "", bus: str = "") -> Process:
    settings = load(
        environ={},
        default={"transport_url": bus, "secret_key": "ab" * 32} if bus else {},
        database={"connection": database} if database else {},
        glance={"endpoint_override": "http://127.0.0.1:1/"},
        neutron={"endpoint_override": "http://127.0.0.1:1/"},
    )
    return Process(settings, roles, StateDirectory(directory / "state"), waits=waits)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Hours(SystemClock):
    """A clock that a sleeper moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


async def test_the_wait_is_said_once_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    clock = Hours()
    attempts: list[float] = []

    async def attempt() -> str:
        attempts.append(clock.monotonic())
        if clock.monotonic() < 86_400:
            raise Unavailable("The database is away.")
        return "done"

    assert await when_available(attempt, clock, random.Random(1)) == "done"
    assert max(b - a for a, b in itertools.pairwise(attempts)) <= connections.LONGEST_PAUSE
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{SAID} (0 s so far): The database is away."
    assert 8 <= len(said) <= 15 and said[-1].startswith("this process can start now; it has waited for 864")


async def test_nothing_is_said_where_nothing_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def attempt() -> None:
        pass

    await when_available(attempt, Hours(), random.Random(1))
    assert not caplog.records


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_waits_for_its_database_or_broker(tmp_path: Path, role: str, closed_port: int) -> None:
    """Both are away; the first that a role needs is waited for. A stop ends the wait."""
    process = process_of(
        tmp_path,
        role,
        database=f"postgresql://u:secret@127.0.0.1:{closed_port}/x",
        bus=f"amqp://u:secret@127.0.0.1:{closed_port}/",
    )
    async with Said(SAID) as said:
        starting = asyncio.create_task(process.start())
        await asyncio.wait_for(said.wait(), 50)
        assert not starting.done()
        starting.cancel()
        await asyncio.wait({starting})
    assert starting.cancelled()


async def test_a_role_starts_once_its_database_is_there(tmp_path: Path) -> None:
    process = process_of(tmp_path, "identity", database=f"sqlite:///{tmp_path}/databases/x")
    async with Said(SAID) as said:
        starting = asyncio.create_task(process.start())
        await asyncio.wait_for(said.wait(), 50)
        (tmp_path / "databases").mkdir()
        await asyncio.wait_for(starting, 50)
    await process.stop()


async def test_a_role_starts_once_its_broker_is_there(tmp_path: Path, closed_port: int) -> None:
    process = process_of(tmp_path, "console", bus=f"amqp://u:p@127.0.0.1:{closed_port}/")
    async with Said(SAID) as said:
        starting = asyncio.create_task(process.start())
        await asyncio.wait_for(said.wait(), 50)
        async with FakeBroker(closed_port):
            await asyncio.wait_for(starting, 50)
            await process.stop()


async def test_commands_say_at_once_what_is_away(tmp_path: Path, closed_port: int) -> None:
    process = process_of(
        tmp_path,
        "conductor",
        waits=False,
        database=f"postgresql://u:secret@127.0.0.1:{closed_port}/x",
        bus=f"amqp://u:secret@127.0.0.1:{closed_port}/",
    )
    with pytest.raises(Unavailable, match=r"Cannot open the database postgresql://u@127.0.0.1:.*") as caught:
        await process.open_database("compute")
    assert "secret" not in caught.value.message
    in_query = f"postgresql://u@127.0.0.1:{closed_port}/x?password=s@cret"
    with pytest.raises(Unavailable, match=r"database postgresql://u@127.0.0.1:\d+/x\?password=\*{8}: ") as caught:
        await process_of(tmp_path, "conductor", waits=False, database=in_query).open_database("compute")
    assert "cret" not in caught.value.message
    with pytest.raises(Unavailable, match=r"Cannot use the broker at amqp://u@127.0.0.1:.*nothing accepts connections"):
        await process.connect_bus()


async def test_wrong_settings_are_not_waited_for(tmp_path: Path, postgres: Postgres) -> None:
    wrong = postgres.url.rpartition("/")[0] + "/no_such_database"
    for url, said in ((wrong, "no_such_database"), ("mysql://u@h/x", "mysql"), ("postgresql://u@h:port/x", "")):
        with pytest.raises(SettingsError, match=f"Cannot open the database .*{said}"):
            await asyncio.wait_for(process_of(tmp_path, "metadata", database=url).start(), 50)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(pamqp.frame.marshal(commands.Connection.Close(403, "ACCESS_REFUSED - no.", 0, 0), 0))
        writer.close()

    broker = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = broker.sockets[0].getsockname()[1]
    for url, said in (
        (f"amqp://u:p@127.0.0.1:{port}/", "correct user and password"),
        (f"amqp://u:p@127.0.0.1:1,127.0.0.1:{port}/", "correct user and password"),
        ("amqps://u:p@127.0.0.1/?cafile=/no/such/file", "cannot be used"),
        ("http://u:p@127.0.0.1/", "not valid"),
    ):
        with pytest.raises(Exception, match=said) as caught:
            await asyncio.wait_for(process_of(tmp_path, "console", bus=url).start(), 50)
        assert not isinstance(caught.value, Unavailable)
    broker.close()
