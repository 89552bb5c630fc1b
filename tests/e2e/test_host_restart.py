"""A host of a region is stopped and started, as for a new password or a new release: its guests go on."""

import asyncio

import pytest

from tests.command import ok, refused
from tests.e2e.cloud import processes
from tests.e2e.guest_view import process_of
from tests.e2e.guests import IDLE_DISK, SERVERS, until
from tests.e2e.split import SplitCloud, split_cloud
from tests.services.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


async def test_guests_outlive_the_stop_of_their_host_until_they_are_ended(
    can_run_guests: None, amqp_url: str, rabbitmq: RabbitMQ
) -> None:
    async with split_cloud(amqp_url, rabbitmq) as cloud:
        image = await cloud.admin.make_image("idle", "raw", IDLE_DISK)
        network = await cloud.admin.make("/network/v2.0/networks", "network", name="net")
        await cloud.admin.make(
            "/network/v2.0/subnets", "subnet", network_id=network["id"], ip_version=4, cidr="10.79.0.0/24"
        )
        fields = {"name": "erna", "imageRef": image, "flavorRef": cloud.flavor}
        server = await cloud.admin.make(SERVERS, "server", **fields, networks=[{"uuid": network["id"]}])
        await _wait(cloud, server["id"], "ACTIVE")
        guest = process_of(server["id"]).pid

        said = await asyncio.to_thread(refused, "down", "--dir", cloud.host)
        assert "stop them first" in said

        await cloud.terminate("host")
        assert cloud.processes["host"].returncode == 0
        assert process_of(server["id"]).pid == guest, "it goes on without its agent"
        served = [line for line in processes(cloud.prefix) if "dnsmasq" in line]
        assert served, "and so does its network"
        await cloud.restart_host()
        await until(cloud.host_is_up, "the host to be up")
        assert process_of(server["id"]).pid == guest
        await _act(cloud, server["id"], "os-stop", "SHUTOFF")  # the new agent has it in hand
        await _act(cloud, server["id"], "os-start", "ACTIVE")

        await cloud.terminate("host")
        await asyncio.to_thread(ok, "down", "--dir", cloud.host)
        assert processes(str(cloud.host), cloud.prefix) == []
        await cloud.restart_host()
        await cloud.admin.do("DELETE", f"{SERVERS}/{server['id']}")

        async def gone() -> bool:
            return not (await cloud.admin.do("GET", SERVERS))["servers"]

        await until(gone, "the server to be gone")


async def _act(cloud: SplitCloud, server: str, action: str, status: str) -> None:
    await cloud.admin.do("POST", f"{SERVERS}/{server}/action", {action: None})
    await _wait(cloud, server, status)


async def _wait(cloud: SplitCloud, server: str, status: str) -> None:
    async def reached() -> bool:
        found = (await cloud.admin.do("GET", f"{SERVERS}/{server}"))["server"]
        assert found["status"] != "ERROR", found
        return bool(found["status"] == status)

    await until(reached, lambda: f"the server to be {status}: {cloud.log('host')[-2000:]}")
