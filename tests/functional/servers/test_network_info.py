"""An admin can have the stored network information of a server refreshed."""

from typing import Any

import pytest
import sqlalchemy as sa

from micronova.clients.network.client import NetworkClient
from micronova.db.tables import instances
from micronova.objects import states
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import network

CLOUD = CloudOptions(roles=("network",))
INJECT = {"injectNetworkInfo": None}


async def _put(cloud: Cloud, id: str, **values: Any) -> None:
    assert cloud.process.database is not None
    change = sa.update(instances).where(instances.c.uuid == id).values(**values)
    await cloud.process.database.write(lambda conn: conn.execute(change))


async def test_it_is_looked_up_anew(cloud: Cloud, user: Caller) -> None:
    place = await network(user)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    path = f"/servers/{server['id']}/action"
    await _put(cloud, server["id"], network_info=[])
    assert (await user.show(server["id"]))["addresses"] == {}

    await user.refused(403, "POST", path, INJECT)
    await user.admin.post(path, INJECT)
    assert (await user.show(server["id"]))["addresses"] == server["addresses"]

    home = await user.host_of(server["id"])
    await _put(cloud, server["id"], host=None)
    assert "no host" in await user.admin.refused(409, "POST", path, INJECT)
    await _put(cloud, server["id"], host=home)


async def test_an_update_shows_plain_addresses_until_2_74(user: Caller) -> None:
    place = await network(user)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    [(label, [address])] = server["addresses"].items()
    assert "OS-EXT-IPS:type" in address
    plain = {label: [{"version": 4, "addr": address["addr"]}]}
    for minor, expected in ((1, plain), (74, plain), (75, server["addresses"])):
        answer = await user.at(minor).put(f"/servers/{server['id']}", {"server": {"name": "x"}})
        assert answer["server"]["addresses"] == expected


async def _event(user: Caller, name: str, server: str, port: str) -> int:
    event = {"name": name, "server_uuid": server, "tag": port}
    answer = await user.admin.request("POST", "/os-server-external-events", {"events": [event]})
    return int(answer.json()["events"][0]["code"])


@only_in_one_process("changes the server between two steps of the API")
async def test_an_event_that_could_not_be_recorded_is_sent_again(
    cloud: Cloud, user: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as done, and the server showed old interfaces until the next event."""
    place = await network(user)
    server = await user.boot(networks=[{"uuid": place["id"]}])
    id = server["id"]
    [port] = (await user.get(f"/servers/{id}/os-interface"))["interfaceAttachments"]
    await _put(cloud, id, network_info=[])
    read, reads = NetworkClient.network_info, 0

    async def changing(self: NetworkClient, uuid: str) -> Any:
        nonlocal reads
        reads += 1
        await user.post(f"/servers/{uuid}/metadata", {"metadata": {"reads": str(reads)}}, 200)
        return await read(self, uuid)

    with monkeypatch.context() as busy:
        busy.setattr(NetworkClient, "network_info", changing)
        assert await _event(user, "network-changed", id, port["port_id"]) == 422
        assert "Try again later" in await user.admin.refused(503, "POST", f"/servers/{id}/action", INJECT)
    assert reads > 2 and (await user.show(id))["addresses"] == {}
    assert await _event(user, "network-changed", id, port["port_id"]) == 200
    assert (await user.show(id))["addresses"] == server["addresses"]


async def test_a_port_that_is_deleted_during_an_action_is_detached_after_it(cloud: Cloud, user: Caller) -> None:
    """The event counted as done, and the guest kept a dead interface."""
    place = await network(user)
    id = (await user.boot(networks=[{"uuid": place["id"]}]))["id"]
    [port] = (await user.get(f"/servers/{id}/os-interface"))["interfaceAttachments"]
    await _put(cloud, id, task_state=states.REBOOTING)
    assert await _event(user, "network-vif-deleted", id, port["port_id"]) == 422
    await _put(cloud, id, task_state=None)
    assert await _event(user, "network-vif-deleted", id, port["port_id"]) == 200

    async def detached() -> bool | None:
        return True if not (await user.show(id))["addresses"] else None

    await cloud.until(detached, "the interface to be detached")
