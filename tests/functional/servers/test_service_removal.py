"""A service that is deleted leaves nothing of its compute host behind."""

import pytest

from micronova.clients.network.client import NetworkClient
from micronova.compute.rpcapi import ComputeAPI, InstanceEvent
from micronova.db import departures, services
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.rpc.errors import BusUnavailable
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICES = "/compute/v2.1/os-services"


async def test_what_belongs_to_a_host_goes_with_its_service(full_cloud: FullCloud) -> None:
    process, admin = full_cloud.process, full_cloud.admin
    database, now = process.database, micros(process.clock.now())
    assert database is not None and process.bus is not None
    for host in ("gone", "kept"):
        await database.write(services.heartbeat, "nova-compute", [host], now)
        await database.write(departures.record, host, "8f0a4c9e-0000-4000-8000-000000000001", 3, now)
        report = {"host": host, "started": True}
        await admin.do("POST", "/network/v2.0/agent-reports", report)
    compute = ComputeAPI(process.bus)
    event = InstanceEvent(instance_uuid="8f0a4c9e-0000-4000-8000-000000000001", name="network-changed")
    await compute.external_instance_event(Context(), "gone", event)
    listed = (await admin.do("GET", SERVICES))["services"]
    try:
        [id] = [each["id"] for each in listed if each["host"] == "gone"]
        await admin.do("DELETE", f"{SERVICES}/{id}")
        assert [row["host"] for row in await database.read(departures.of_hosts, ["gone", "kept"])] == ["kept"]
        agents = (await admin.do("GET", "/network/v2.0/agents"))["agents"]
        assert [agent["host"] for agent in agents] == ["kept"]
        with pytest.raises(BusUnavailable, match="no server has declared the queue"):
            await compute.get_host_uptime(Context(), "gone")
    finally:
        [id] = [each["id"] for each in listed if each["host"] == "kept"]
        await admin.do("DELETE", f"{SERVICES}/{id}")


async def test_a_network_service_that_does_not_answer_delays_the_removal(
    full_cloud: FullCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, admin = full_cloud.process, full_cloud.admin
    assert process.database is not None
    await process.database.write(services.heartbeat, "nova-compute", ["late"], micros(process.clock.now()))
    [id] = [each["id"] for each in (await admin.do("GET", SERVICES))["services"] if each["host"] == "late"]

    async def away(self: NetworkClient, host: str) -> None:
        raise Unavailable("The network service does not answer.")

    with monkeypatch.context() as patched:
        patched.setattr(NetworkClient, "delete_network_agents", away)
        answer = await admin.request("DELETE", f"{SERVICES}/{id}")
        assert answer.status == 503, answer.body
    await admin.do("DELETE", f"{SERVICES}/{id}")  # it is still there, so the request can be repeated
