"""Servers whose group was deleted: nothing of it rules them any more, and nothing counts them."""

import pytest
import sqlalchemy as sa

from micronova.db.tables import server_group_hosts
from micronova.objects.scheduling import GroupSpec
from micronova.servers import create
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import image

CLOUD = CloudOptions(hosts=2, roles=("image",))
pytestmark = only_in_one_process("there are two hosts alone")


async def _group(user: Caller, policy: str) -> str:
    body = {"server_group": {"name": "g", "policy": policy}}
    return str((await user.post("/os-server-groups", body, 200))["server_group"]["id"])


async def _members(user: Caller, policy: str) -> tuple[str, str]:
    """Return two servers whose group was deleted."""
    group, made = await _group(user, policy), await image(user)
    first, second = [(await user.boot({"group": group, "custom": "x"}, imageRef=made))["id"] for _ in range(2)]
    assert set((await user.show(first))["scheduler_hints"]) == {"custom", "group"}
    await user.delete(f"/os-server-groups/{group}")
    return first, second


async def _freed(cloud: OneProcess, user: Caller, *servers: str) -> None:
    """Assert that nothing is left of the group."""
    for id in servers:
        shown = await user.show(id)
        assert (shown["server_groups"], set(shown["scheduler_hints"])) == ([], {"custom"})
    assert await cloud.read(sa.select(server_group_hosts)) == []
    await cloud.assert_clean()


async def _migrate(user: Caller, id: str) -> None:
    before = await user.host_of(id)
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) != before


@pytest.mark.parametrize("policy", ["anti-affinity", "affinity"])
async def test_former_members_move_wherever_there_is_room(cloud: OneProcess, user: Caller, policy: str) -> None:
    first, second = await _members(user, policy)
    for id in (first, first, first, second, first):
        await _migrate(user, id)
    await _freed(cloud, user, first, second)


async def test_former_members_are_unshelved_together(cloud: OneProcess, user: Caller) -> None:
    first, second = await _members(user, "anti-affinity")
    other = await user.host_of(second)
    for id in (first, second):
        await user.act(id, "shelve")
        await user.wait_for(id, "SHELVED_OFFLOADED")
    for id in (first, second):
        await user.admin.act(id, "unshelve", {"host": other})
        await user.wait_for(id, "ACTIVE")
        assert await user.host_of(id) == other
    await _freed(cloud, user, first, second)


async def test_former_members_are_evacuated_together(cloud: OneProcess, user: Caller) -> None:
    first, second = await _members(user, "anti-affinity")
    async with cloud.forced_down(await user.host_of(first)):
        await user.admin.at(94).act(first, "evacuate", {}, 200)
        await user.wait_for(first, "ACTIVE")
        assert await user.host_of(first) == await user.host_of(second)
    await _freed(cloud, user, first, second)


async def test_a_build_that_is_under_way_is_free_when_its_group_is_deleted(cloud: OneProcess, user: Caller) -> None:
    group, made = await _group(user, "anti-affinity"), await image(user)
    taken = await user.boot({"group": group, "custom": "x"}, imageRef=made)
    host = await user.host_of(taken["id"])
    [free] = [each for each in cloud.hosts if each != host]
    fails = {"operation": "spawn", "kind": "unavailable", "name": user.project, "host": free}
    async with cloud.faults(fails):
        id = await user.create({"group": group, "custom": "x"}, name=user.project, imageRef=made)
        await cloud.fault_struck()  # there is no other host that the group allows
        await user.delete(f"/os-server-groups/{group}")
        await user.wait_for(id, "ACTIVE")
    assert await user.host_of(id) == host
    await _freed(cloud, user, taken["id"], id)


async def test_no_server_joins_a_group_that_is_deleted_meanwhile(user: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is looked up at first, and is gone when the server is recorded."""
    group, made = await _group(user, "anti-affinity"), await image(user)
    await user.delete(f"/os-server-groups/{group}")
    monkeypatch.setattr(create, "hinted_group", lambda *_: GroupSpec(id=group, policy="anti-affinity"))
    message = await user.refused(400, "POST", "/servers", user.body({"group": group}, imageRef=made))
    assert f"Instance group {group} could not be found." in message
