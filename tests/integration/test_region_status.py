"""`micronova status --config` of a region on PostgreSQL and RabbitMQ, whole and without one of them."""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from micronova.cli.region_status import SILENT_AFTER
from tests.cluster import Cluster, toml
from tests.command import ok
from tests.integration.test_check_region import Region, region, running  # noqa: F401 - fixtures
from tests.services.process import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


async def _status(config: Path, *options: str) -> tuple[int, str]:
    """Run the command as an operator does; return its exit code and what it prints."""
    command = [sys.executable, "-m", "micronova.cli.main", "status", "--config", str(config), *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def _status_without(config: Path, wrong: str, *options: str) -> tuple[int, str]:
    """Repeat the command while a text is in what it prints: on a busy machine a service may answer too late."""
    async with asyncio.timeout(120):
        while True:
            code, said = await _status(config, *options)
            if wrong not in said:
                return code, said


async def test_a_region_that_works(region: Region) -> None:
    code, said = await _status_without(region.config, "DOES NOT WORK")
    assert code == 0, said
    assert all(len(line) <= 80 for line in said.splitlines()), said
    assert "database: PostgreSQL " in said and "broker: amqp://control-" in said and "secret" not in said
    assert "identity, image, network, volume: " in said and said.count(" ready") == 2
    assert "nova-conductor: 1 up" in said and "nova-scheduler: 1 up" in said
    async with asyncio.timeout(120):
        while True:  # a process without the compute database records itself when there is one
            code, text = await _status(region.config, "--json")
            document: dict[str, Any] = json.loads(text)
            if len(document["database"]["processes"]) == 2:
                break
    own, control = sorted(document["database"]["processes"], key=lambda each: "conductor" in each["roles"])
    assert "conductor" in control["roles"] and control["seen_seconds_ago"] < SILENT_AFTER
    # Services of the embedded kind have databases of their own, and their release is shown, too.
    assert own["roles"] == "identity image network volume" and own["release"] == version("micronova")
    assert own["seen_seconds_ago"] < SILENT_AFTER
    assert document["broker"]["waiting"]["conductor:compute_task"] == 0


async def test_schedulers_on_one_machine_have_rows_of_their_own(region: Region, tmp_path: Path) -> None:
    """Also if nobody gave them names; one that is killed and started again has its row again."""

    async def names() -> set[str]:
        async with asyncio.timeout(120):
            while True:
                said = json.loads((await _status(region.config, "--json"))[1])
                found = {each["host"] for each in said["database"]["processes"] if each["pid"] in cluster.pids()}
                if len(found) == len(cluster.processes):
                    return found

    cluster = Cluster(tmp_path, region.sections["database"]["connection"], region.sections["default"]["transport_url"])
    cluster.add("first", "scheduler", region.config, MICRONOVA__DEFAULT__HOST="control-7")
    cluster.add("second", "scheduler", region.config, MICRONOVA__DEFAULT__HOST="control-7")
    try:
        cluster.start()
        assert await names() == {"control-7", "control-7-2"}
        cluster.kill("first")
        cluster.start("first")
        assert await names() == {"control-7", "control-7-2"}
        services = json.loads(ok("service", "list", "--config", region.config, "--dir", tmp_path / "tool", "--json"))
        rows = [each for each in services if each["host"].startswith("control-7")]
        assert {(each["host"], each["binary"]) for each in rows} == {
            ("control-7", "nova-scheduler"),
            ("control-7-2", "nova-scheduler"),
        }
    finally:
        cluster.stop()


@pytest.mark.parametrize("away", ["database", "broker", "service"])
async def test_what_is_away_is_said_and_the_rest_is_shown(region: Region, tmp_path: Path, away: str) -> None:
    changes = {
        "database": {"database": {"connection": f"postgresql://u:hidden@127.0.0.1:{free_port()}/none"}},
        "broker": {"default": {"transport_url": f"amqp://u:hidden@127.0.0.1:{free_port()}/none"}},
        "service": {"glance": {"endpoint_override": f"http://127.0.0.1:{free_port()}/image"}},
    }[away]
    config = tmp_path / "micronova.toml"
    config.write_text(toml({name: {**each, **changes.get(name, {})} for name, each in region.sections.items()}))
    never = "no such line" if away == "service" else "DOES NOT WORK"
    code, said = await _status_without(config, never)
    assert code == 1 and "hidden" not in said and "Traceback" not in said
    assert ("database: AWAY" in said) == (away == "database")
    assert ("broker: AWAY" in said) == (away == "broker")
    assert ("DOES NOT WORK" in said) == (away == "service")
    assert ("nova-conductor: 1 up" in said) == (away != "database")
