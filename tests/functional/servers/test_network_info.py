"""An admin can have the stored network information of a server refreshed."""

from typing import Any

import sqlalchemy as sa

from micronova.db.tables import instances
from tests.functional.cloud import Caller, Cloud, CloudOptions
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
