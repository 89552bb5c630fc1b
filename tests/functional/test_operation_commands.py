"""`micronova operation` and `micronova quota recount`, beside a cloud that runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.db.tables import operations, quota_usages
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


async def _run(cloud: OneProcess, *arguments: str, code: int = 0) -> str:
    command = [*arguments, "--dir", str(cloud.process.directory.path)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert done.exit_code == code, done.output
    return done.output


async def _of(cloud: OneProcess, server: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await _run(cloud, "operation", "list", "--json", "--server", server))
    return found


async def _at_host(cloud: OneProcess, server: str) -> dict[str, Any]:
    """Wait until a host has the operation of a server."""

    async def probe() -> dict[str, Any] | None:
        found = await _of(cloud, server)
        return found[0] if found and (found[0]["owner"] or "").startswith("host:") else None

    return await cloud.until(probe, "the host to get the order")


async def test_an_operation_is_listed_shown_and_cancelled(cloud: OneProcess, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "delay", "delay": 60.0, "name": "slow"}):
        server = await user.create(name="slow")
        found = await _at_host(cloud, server)
        id, host = found["id"], found["owner"].removeprefix("host:")
        listed = await _run(cloud, "operation", "list", "--kind", "build", "--owner", host)
        assert id in listed
        assert f"{server} slow" in listed
        assert "the host has it" in listed
        assert "works on operation" in await _run(cloud, "operation", "retry", id, code=1)
        assert "A conductor ends it" in await _run(cloud, "operation", "cancel", id)
        failed = await user.wait_for(server, "ERROR")
    assert failed["fault"]["message"] == "The build operation was cancelled by an operator."
    shown = await _run(cloud, "operation", "show", id)
    assert "result          error" in shown.splitlines()
    assert f"project_id      {user.project}" in shown.splitlines()
    assert "has ended already" in await _run(cloud, "operation", "cancel", id, code=1)
    await user.delete(f"/servers/{server}")
    await user.gone(server)
    await cloud.assert_clean()


async def test_a_delete_cannot_be_cancelled(cloud: OneProcess, user: Caller) -> None:
    server = (await user.boot(name="kept"))["id"]
    async with cloud.faults({"operation": "destroy", "kind": "delay", "delay": 3.0, "name": "kept"}):
        await user.delete(f"/servers/{server}")
        found = await _at_host(cloud, server)
        assert "must be completed" in await _run(cloud, "operation", "cancel", found["id"], code=1)
        await user.gone(server)


async def test_an_operation_that_waits_is_tried_at_once(cloud: OneProcess, user: Caller) -> None:
    server = (await user.boot(name="waits"))["id"]
    async with cloud.faults({"operation": "power_off", "kind": "unavailable", "name": "waits"}):
        await user.post(f"/servers/{server}/action", {"os-stop": None})
        [found] = await _of(cloud, server)
        later = int((cloud.process.clock.now() + 3600) * 1e6)
        postpone = operations.update().where(operations.c.id == found["id"], operations.c.owner.not_like("host:%"))

        async def postponed() -> bool | None:
            """Let it wait as after many attempts, when no conductor is at it."""
            assert cloud.process.database is not None
            await cloud.process.database.write(lambda conn: conn.execute(postpone.values(lease_until=later)))
            return "in 60 min" in await _run(cloud, "operation", "list", "--server", server) or None

        await cloud.until(postponed, "the operation to wait")
    assert "tries it again" in await _run(cloud, "operation", "retry", found["id"])
    await user.wait_for(server, "SHUTOFF")


async def test_words_for_what_is_not_there(cloud: OneProcess) -> None:
    await cloud.settled()
    assert await _run(cloud, "operation", "list", "--kind", "none") == "No operation is open.\n"
    for command in ("show", "retry", "cancel"):
        assert "There is no operation nothing" in await _run(cloud, "operation", command, "nothing", code=1)


async def test_usage_is_recounted(cloud: OneProcess, user: Caller) -> None:
    await user.boot()
    await cloud.settled()
    assert "Every recorded usage is right" in await _run(cloud, "quota", "recount")
    wrong = quota_usages.update().where(quota_usages.c.project_id == user.project, quota_usages.c.resource == "cores")
    assert cloud.process.database is not None
    await cloud.process.database.write(lambda conn: conn.execute(wrong.values(in_use=7)))
    said = await _run(cloud, "quota", "recount")
    assert f"project {user.project}: cores was 7, is 1" in said
    assert "Every recorded usage is right" in await _run(cloud, "quota", "recount", "--project", user.project)
    refused = await _run(cloud, "quota", "recount", "--project", f"{user.project}x", code=1)
    assert "openstack project list" in refused
    await cloud.delete_all()
