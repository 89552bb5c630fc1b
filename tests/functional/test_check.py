"""`micronova check` asks the services that the settings name."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.db import schema, services
from micronova.db.engine import open_database
from micronova.db.tables import metadata
from micronova.objects.clock import SystemClock, micros
from micronova.objects.service_names import COMPUTE
from tests.command import micronova

SERVICES = ("identity", "image", "network", "volume")


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Process]:
    """The services of a cloud that listens on a port."""
    made = Process(load(environ={}), ["identity", "image", "network", "volume"], StateDirectory(tmp_path / "cloud"))
    await made.start(socket.create_server(("127.0.0.1", 0)))
    yield made
    await made.stop()


async def _services(directory: Path, **sections: dict[str, str]) -> dict[str, str]:
    """Return the lines about services by their names."""
    file = directory / "micronova.toml"
    sections["default"] = {"state_path": str(directory / "state")}
    lines = [
        (f"[{name}]", *(f'{option} = "{value}"' for option, value in each.items())) for name, each in sections.items()
    ]
    file.write_text("\n".join(line for section in lines for line in section))
    done: Any = await asyncio.to_thread(micronova, "check", "--config", file)
    assert "Traceback" not in done.stderr
    found = {}
    for line in done.stdout.splitlines():
        mark, _, rest = line.partition(" ")
        if rest.strip().startswith("service "):
            name, _, reason = rest.strip().removeprefix("service ").partition(": ")
            found[name] = f"{mark} {reason}".strip()
    assert done.returncode == any(line.startswith("FAIL") for line in found.values())
    return found


async def test_services_that_answer(cloud: Process, tmp_path: Path) -> None:
    identity = {"auth_url": f"{cloud.url}/identity/v3", "password": cloud.keys.service_password}
    assert await _services(tmp_path, identity=identity) == dict.fromkeys(SERVICES, "ok")


async def test_a_key_manager_that_answers_or_does_not(cloud: Process, tmp_path: Path) -> None:
    """Any service that lists its versions does here."""
    found = await _services(tmp_path, barbican={"barbican_endpoint": f"{cloud.url}/image/v1"})
    assert found["key-manager"].startswith("? barbican.barbican_endpoint: it answers; certificates are asked for")
    found = await _services(tmp_path, barbican={"barbican_endpoint": f"{cloud.url}/nowhere"})
    assert found["key-manager"].startswith("FAIL")


async def test_services_that_do_not_know_us(cloud: Process, tmp_path: Path) -> None:
    identity = {"auth_url": f"{cloud.url}/identity/v3", "password": "wrong"}
    found = await _services(tmp_path, identity=identity)
    refused = "The identity service does not accept the service user micronova"
    assert found.keys() == set(SERVICES) and all(refused in line for line in found.values())
    assert found["identity"].startswith(f"FAIL identity.password: {refused}. Right: ")


async def test_a_host_has_no_service_user(cloud: Process, tmp_path: Path) -> None:
    found = await _services(tmp_path, neutron={"endpoint_override": f"{cloud.url}/network"})
    assert set(found) == {"network"} and found["network"].startswith(
        "? neutron.endpoint_override: it answers, but without a service user"
    )
    found = await _services(tmp_path, neutron={"endpoint_override": f"{cloud.url}/nowhere"})
    assert found["network"].startswith("FAIL ")


async def test_a_cloud_of_its_own_has_nobody_to_ask(tmp_path: Path) -> None:
    assert await _services(tmp_path) == {}


async def test_a_bus_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = f"127.0.0.1:{taken.getsockname()[1]}"
    file = tmp_path / "micronova.toml"
    state = tmp_path / "state"
    file.write_text(f'[default]\ntransport_url = "amqp://guest:hush@{broker}/"\nstate_path = "{state}"\n')
    done: Any = await asyncio.to_thread(micronova, "check", "--config", file)
    assert done.returncode == 1 and "Errno" not in done.stdout and "hush" not in done.stdout
    assert (
        f"FAIL  broker: default.transport_url: {broker} as guest: nothing accepts connections there: "
        "start RabbitMQ, or correct transport_url. Right: amqp://USER:PASSWORD@HOST" in done.stdout
    )


@pytest.mark.parametrize(
    ("hosts", "down_time", "expected"),
    [
        (10, 20, "ok    heartbeats: of 10 hosts"),
        (4_000, 20, "FAIL  heartbeats: default.service_down_time: 4000 hosts send 600 heartbeats per second"),
        (4_000, 24, "ok    heartbeats: of 4000 hosts"),
    ],
)
async def test_settings_that_are_made_for_fewer_hosts(
    tmp_path: Path, hosts: int, down_time: int, expected: str
) -> None:
    database = open_database(f"sqlite:///{tmp_path}/compute.db")
    await schema.upgrade(database, metadata, "micronova.db.migrations")
    now = micros(SystemClock().now())
    await database.write(services.heartbeat, COMPUTE, [f"host{number}" for number in range(hosts)], now)
    await database.close()
    file = tmp_path / "micronova.toml"
    file.write_text(
        f'[default]\nstate_path = "{tmp_path}/state"\nservice_down_time = {down_time}\n'
        f'[conductor]\nlease = 60\n[database]\nconnection = "sqlite:///{tmp_path}/compute.db"\n'
    )
    done: Any = await asyncio.to_thread(micronova, "check", "--config", file)
    [line] = [line for line in done.stdout.splitlines() if "heartbeats" in line]
    assert line.startswith(expected)


@pytest.mark.parametrize("roles", [(), ("api", "conductor", "scheduler"), ("identity",)])
def test_a_check_makes_no_database(tmp_path: Path, roles: tuple[str, ...]) -> None:
    file, place = tmp_path / "micronova.toml", tmp_path / "place"
    place.mkdir()
    file.write_text(
        f'[default]\nsecret_key = "{secrets.token_hex(32)}"\nstate_path = "{place}"\n'
        f'[database]\nconnection = "sqlite:///{place}/compute.db"\n'
    )
    done: Any = micronova("check", *roles, "--config", file)
    assert "the first start makes it" in done.stdout and "cannot be asked" not in done.stdout
    assert list(place.iterdir()) == []
