"""Lists of filters without those that micronova has by default: zones, excluded hosts and groups count in any case."""

import pytest

from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image

# The default of Nova, without the filters of server groups. Hosts with servers are preferred: those that a move leaves.
CLOUD = CloudOptions(
    hosts=3,
    roles=("image",),
    settings={
        "filter_scheduler": {
            "enabled_filters": ["ComputeFilter", "ComputeCapabilitiesFilter", "ImagePropertiesFilter"],
            "ram_weight_multiplier": -1.0,
            "cpu_weight_multiplier": -1.0,
            "disk_weight_multiplier": -1.0,
            "io_ops_weight_multiplier": 0.0,
            "build_failure_weight_multiplier": 0.0,
        },
    },
)
pytestmark = only_in_one_process("the processes that tests share have the default filters")
LIVE = {"host": None, "block_migration": "auto"}


async def test_a_server_is_built_and_unshelved_in_its_zone(cloud: OneProcess, user: Caller) -> None:
    made = await image(user)
    anywhere = await user.host_of((await user.boot(imageRef=made))["id"])  # where the next one would go
    [host, *_] = [each for each in cloud.hosts if each != anywhere]
    aggregate = {"aggregate": {"name": user.project, "availability_zone": user.project}}
    path = f"/os-aggregates/{(await user.admin.post('/os-aggregates', aggregate, 200))['aggregate']['id']}"
    await user.admin.post(f"{path}/action", {"add_host": {"host": host}}, 200)
    server = await user.boot(imageRef=made, availability_zone=user.project)
    assert await user.host_of(server["id"]) == host
    await user.act(server["id"], "shelve")
    await user.wait_for(server["id"], "SHELVED_OFFLOADED")
    await user.act(server["id"], "unshelve")
    await user.wait_for(server["id"], "ACTIVE")
    assert await user.host_of(server["id"]) == host
    await cloud.delete_all()
    await user.admin.post(f"{path}/action", {"remove_host": {"host": host}}, 200)


@pytest.mark.parametrize("kind", ["migrate", "os-migrateLive", "evacuate"])
async def test_a_move_leaves_its_host(cloud: OneProcess, user: Caller, kind: str) -> None:
    id = (await user.boot(imageRef=await image(user)))["id"]
    source = await user.host_of(id)
    if kind == "evacuate":
        async with cloud.forced_down(source):
            await user.admin.at(94).act(id, kind, {}, 200)
            await user.wait_for(id, "ACTIVE")
    else:
        await user.admin.act(id, kind, LIVE if kind == "os-migrateLive" else None)
        await user.wait_for(id, "ACTIVE" if kind == "os-migrateLive" else "VERIFY_RESIZE")
    assert await user.host_of(id) != source


async def test_no_host_is_tried_twice(cloud: OneProcess, user: Caller) -> None:
    fails, made = {"operation": "spawn", "kind": "fail", "name": user.project}, await image(user)
    async with cloud.faults(fails):
        id = await user.create(name=user.project, imageRef=made)
        await user.wait_for(id, "ERROR")
    [action] = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    path = f"/servers/{id}/os-instance-actions/{action['request_id']}"
    events = (await user.admin.get(path))["instanceAction"]["events"]
    assert sorted(event["host"] for event in events if event["host"]) == sorted(cloud.hosts)


async def test_a_server_group_needs_no_filter(cloud: OneProcess, user: Caller) -> None:
    body = {"server_group": {"name": "g", "policy": "anti-affinity"}}
    group = (await user.post("/os-server-groups", body, 200))["server_group"]["id"]
    made = await image(user)
    ids = [(await user.boot({"group": group}, imageRef=made))["id"] for _ in cloud.hosts]
    assert sorted([await user.host_of(id) for id in ids]) == sorted(cloud.hosts)
    late = await user.wait_for(await user.create({"group": group}, imageRef=made), "ERROR")
    words = "no host is without a member of the anti-affinity group; 3 hosts have members of the group."
    assert words in late["fault"]["message"]
