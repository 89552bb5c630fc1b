"""`micronova host show | remove | add`, `service list | forget` and `db current`, beside a cloud that runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.db import services
from micronova.db.tables import compute_nodes, hosts
from micronova.objects.clock import micros
from tests.functional.cloud import Caller, CloudOptions, OneProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneProcess]:
    found = OneProcess(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=2))
    await found.start()
    yield found
    await found.assert_clean()
    await found.stop()


@pytest.fixture
def user(cloud: OneProcess) -> Caller:
    return cloud.caller()


async def _run(cloud: OneProcess, *arguments: str, code: int = 0, typed: str = "") -> str:
    command = [*arguments, "--dir", str(cloud.process.directory.path)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, typed)
    assert done.exit_code == code, done.output
    return done.output


async def test_a_host_is_shown_with_its_servers(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot(name="web"))["id"]
    name = await user.host_of(id)
    text = await _run(cloud, "host", "show", name)
    assert "state             up" in text and id in text and "web" in text and "none of its own" in text
    shown = json.loads(await _run(cloud, "host", "show", name, "--json"))
    assert [each["uuid"] for each in shown["servers"]] == [id] and shown["nodes"] == [name]
    listed = json.loads(await _run(cloud, "host", "list", "--json"))
    assert {each["host"]: each["state"] for each in listed} == dict.fromkeys(cloud.hosts, "up")
    assert "There is no host nobody" in await _run(cloud, "host", "show", "nobody", code=1)
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_the_removal_of_a_host_with_servers_is_asked_for(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot(name="stays"))["id"]
    name = await user.host_of(id)
    database = cloud.process.database
    assert database is not None
    await database.write(services.register_host_user, name, 1)
    refused = await _run(cloud, "host", "remove", name, code=1, typed="n\n")
    assert id in refused and "delete_user" not in refused
    assert name in (await database.read(services.host_users)).registered
    assert f"rabbitmqctl delete_user {name}" in await _run(cloud, "host", "remove", name, typed="y\n")
    await database.write(services.register_host_user, name, micros(cloud.process.clock.now()))
    assert f"rabbitmqctl delete_user {name}" in await _run(cloud, "host", "remove", name, "--yes")
    await database.write(services.register_host_user, name, micros(cloud.process.clock.now()))
    await database.write(lambda conn: conn.execute(hosts.delete()))
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_a_drained_host_says_how_its_servers_get_away(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot(name="moves"))["id"]
    name = await user.host_of(id)
    database = cloud.process.database
    assert database is not None
    assert f"migrate --live-migration {id}" in await _run(cloud, "host", "drain", name)
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    stopped = await _run(cloud, "host", "drain", name)
    assert f"openstack server migrate {id}; then openstack server migration confirm {id}" in stopped
    real = {"supports_migrate": "false", "supports_live_migrate": "false"}
    node = sa.select(compute_nodes.c.capabilities).where(compute_nodes.c.host == name)
    await database.write(_report_abilities, name, (await database.read(lambda c: c.execute(node).scalar_one())) | real)
    assert f"openstack server shelve --offload {id}; then openstack server unshelve {id}" in await _run(
        cloud, "host", "drain", name
    )
    await _run(cloud, "host", "enable", name)
    await user.delete(f"/servers/{id}")
    await user.gone(id)


def _report_abilities(conn: sa.Connection, host: str, abilities: dict[str, str]) -> None:
    conn.execute(compute_nodes.update().where(compute_nodes.c.host == host).values(capabilities=abilities))


async def test_a_conductor_that_is_gone_is_forgotten(cloud: OneProcess, user: Caller) -> None:
    database = cloud.process.database
    assert database is not None
    await database.write(services.heartbeat, "nova-conductor", ["gone"], 1)
    listed = {
        (each["binary"], each["host"]): each for each in json.loads(await _run(cloud, "service", "list", "--json"))
    }
    assert listed["nova-conductor", "gone"]["state"] == "down"
    assert "gone" in await _run(cloud, "service", "list")
    assert "is forgotten" in await _run(cloud, "service", "forget", "gone")
    assert "There is no service gone" in await _run(cloud, "service", "forget", "gone", code=1)
    running = next(each for key, each in listed.items() if key[0] == "nova-conductor" and key[1] != "gone")
    assert "stop it first" in await _run(cloud, "service", "forget", running["id"], code=1)
    assert "compute host" in await _run(cloud, "service", "forget", cloud.hosts[0], code=1)


async def test_revisions_are_shown(cloud: OneProcess) -> None:
    found = json.loads(await _run(cloud, "db", "current", "--json", code=1))
    assert found["compute"][0] == found["compute"][1]
    text = await _run(cloud, "db", "current", code=1)
    assert "is current" in text and "this release needs" in text  # this cloud has no embedded services


async def test_a_cloud_that_is_not_there(tmp_path: Path) -> None:
    for command in (["service", "list"], ["db", "current"], ["host", "show", "h"]):
        done = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--dir", str(tmp_path / "none")])
        assert done.exit_code == 1 and "There is no cloud" in done.output
