"""Answers about servers match Tempest's schemas at every microversion that changes them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from micronova.http.client import Answer
from tests.functional.cloud import OTHER_IMAGE, Caller, Cloud
from tests.schemas.tempest import check, versions_of

SERVERS = versions_of("servers", 37, 52, 74, 90, 94)
TAGS = [26, 104]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owner(cloud: Cloud) -> AsyncIterator[Caller]:
    """A user with an active server, one in ERROR and one in a server group."""
    caller = cloud.caller()
    group = {"name": "g", "policy": "affinity"}
    made = await caller.post("/os-server-groups", {"server_group": group}, 200)
    await caller.boot(
        {"group": made["server_group"]["id"], "other": ["a", "b"]}, name="runs", metadata={"a": "b"}, tags=["t"],
        accessIPv4="192.0.2.1", config_drive=True, description="d",
    )  # fmt: skip
    await caller.boot(name="plain")
    async with cloud.faults({"operation": "spawn", "kind": "abort", "name": "breaks"}):
        await caller.wait_for(await caller.create(name="breaks"), "ERROR")
    yield caller
    cloud.callers.append(caller)
    await cloud.delete_all()


async def _id(caller: Caller, name: str) -> str:
    return str((await caller.get(f"/servers?name={name}"))["servers"][0]["id"])


def _checked(operation: str, minor: int, answer: Answer, resource: str = "servers") -> Any:
    body = answer.json() if answer.body else None
    check(resource, operation, minor, answer.status, body, answer.headers)
    return body


@pytest.mark.parametrize("minor", SERVERS)
@pytest.mark.parametrize("role", ["member", "admin"])
async def test_reading_servers(owner: Caller, minor: int, role: str) -> None:
    caller = owner.at(minor) if role == "member" else owner.admin.at(minor)
    _checked("list_servers", minor, await caller.request("GET", "/servers"))
    paged = _checked("list_servers", minor, await caller.request("GET", "/servers?limit=1"))
    assert paged["servers_links"]
    answer = await caller.request("GET", "/servers/detail")
    # Tempest lists details as an admin: some of its schemas require fields that only admins see.
    body = _checked("list_servers_detail", minor, answer) if role == "admin" else answer.json()
    by_name = {server["name"]: server for server in body["servers"]}
    assert set(by_name) == {"runs", "plain", "breaks"}
    for name in by_name:
        answer = await caller.request("GET", f"/servers/{by_name[name]['id']}")
        if role == "admin":
            shown = _checked("get_server", minor, answer)["server"]
        else:
            shown = answer.json()["server"]
        listed = {key: value for key, value in shown.items() if key != "server_groups"}
        assert listed == by_name[name], "a list shows what a look at one shows, but for its groups"
    assert ("server_groups" in shown) == (minor >= 71)


@pytest.mark.parametrize("minor", SERVERS)
async def test_what_admins_alone_see(owner: Caller, minor: int) -> None:
    id = await _id(owner, "runs")
    admin = set(await owner.admin.at(minor).show(id))
    member = set(await owner.at(minor).show(id))
    hidden = {"OS-EXT-SRV-ATTR:host", "OS-EXT-SRV-ATTR:hypervisor_hostname", "OS-EXT-SRV-ATTR:instance_name"}
    if minor >= 3:
        names = "reservation_id launch_index hostname kernel_id ramdisk_id root_device_name user_data"
        hidden |= {f"OS-EXT-SRV-ATTR:{name}" for name in names.split()}
    if minor >= 16:
        hidden.add("host_status")
    if minor >= 90:
        hidden.discard("OS-EXT-SRV-ATTR:hostname")
    assert admin - member == hidden
    assert member <= admin


@pytest.mark.parametrize("minor", SERVERS)
async def test_making_and_changing_servers(owner: Caller, minor: int) -> None:
    caller = owner.admin.at(minor)
    body = _checked("create_server_with_admin_pass", minor, await caller.request("POST", "/servers", caller.body()))
    id = body["server"]["id"]
    several = caller.body(min_count=2, return_reservation_id=True)
    answer = await caller.request("POST", "/servers", several)
    assert set(answer.json()) == {"reservation_id"}
    changed = await caller.request("PUT", f"/servers/{id}", {"server": {"name": "changed"}})
    _checked("update_server", minor, changed)
    await caller.wait_for(id, "ACTIVE")
    for action, value, status in (
        ("os-stop", None, "SHUTOFF"), ("os-start", None, "ACTIVE"), ("reboot", {"type": "HARD"}, "ACTIVE"),
        ("pause", None, "PAUSED"), ("unpause", None, "ACTIVE"), ("suspend", None, "SUSPENDED"),
        ("resume", None, "ACTIVE"), ("lock", None, "ACTIVE"), ("unlock", None, "ACTIVE"),
        ("os-resetState", {"state": "error"}, "ERROR"), ("os-resetState", {"state": "active"}, "ACTIVE"),
    ):  # fmt: skip
        _checked("server_actions_common_schema", minor, await caller.request(
            "POST", f"/servers/{id}/action", {action: value}
        ))  # fmt: skip
        await caller.wait_for(id, status)
    rescued = await caller.request("POST", f"/servers/{id}/action", {"rescue": {"adminPass": "first-aid"}})
    assert _checked("rescue_server_with_admin_pass", minor, rescued) == {"adminPass": "first-aid"}
    await caller.wait_for(id, "RESCUE")
    unrescued = await caller.request("POST", f"/servers/{id}/action", {"unrescue": None})
    _checked("server_actions_common_schema", minor, unrescued)
    await caller.wait_for(id, "ACTIVE")
    password = {"changePassword": {"adminPass": "second"}}
    changed = await caller.request("POST", f"/servers/{id}/action", password)
    _checked("server_actions_common_schema", minor, changed)
    rebuilt = await caller.request("POST", f"/servers/{id}/action", {"rebuild": {"imageRef": OTHER_IMAGE}})
    _checked("rebuild_server_with_admin_pass", minor, rebuilt)
    await caller.wait_for(id, "ACTIVE")
    output = await caller.request("POST", f"/servers/{id}/action", {"os-getConsoleOutput": {"length": 5}})
    _checked("get_console_output", minor, output)
    _checked("delete_server", minor, await caller.request("DELETE", f"/servers/{id}"))


@pytest.mark.parametrize("minor", [1, 104])
async def test_metadata_and_addresses(owner: Caller, minor: int) -> None:
    id = await _id(owner, "plain")
    caller, path = owner.at(minor), f"/servers/{id}"
    _checked("set_server_metadata", minor, await caller.request("PUT", f"{path}/metadata", {"metadata": {"a": "b"}}))
    _checked("list_server_metadata", minor, await caller.request("GET", f"{path}/metadata"))
    posted = await caller.request("POST", f"{path}/metadata", {"metadata": {"c": "d"}})
    _checked("update_server_metadata", minor, posted)
    _checked("set_show_server_metadata_item", minor, await caller.request("GET", f"{path}/metadata/a"))
    put = await caller.request("PUT", f"{path}/metadata/a", {"meta": {"a": "z"}})
    _checked("set_show_server_metadata_item", minor, put)
    _checked("delete_server_metadata_item", minor, await caller.request("DELETE", f"{path}/metadata/a"))
    _checked("list_addresses", minor, await caller.request("GET", f"{path}/ips"))


@pytest.mark.parametrize("minor", TAGS)
async def test_tags(owner: Caller, minor: int) -> None:
    id = await _id(owner, "plain")
    caller, path = owner.at(minor), f"/servers/{id}/tags"
    _checked("update_all_tags", minor, await caller.request("PUT", path, {"tags": ["a", "b"]}))
    _checked("list_tags", minor, await caller.request("GET", path))
    _checked("check_tag_existence", minor, await caller.request("GET", f"{path}/a"))
    _checked("update_tag", minor, await caller.request("PUT", f"{path}/c"))
    assert (await caller.request("PUT", f"{path}/c")).status == 204
    _checked("delete_tag", minor, await caller.request("DELETE", f"{path}/c"))
    _checked("delete_all_tags", minor, await caller.request("DELETE", path))


@pytest.mark.parametrize("minor", versions_of("servers", 21, 51, 58, 62, 84))
async def test_instance_actions(owner: Caller, minor: int) -> None:
    caller, id = owner.admin.at(minor), await _id(owner, "runs")
    path = f"/servers/{id}/os-instance-actions"
    listed = _checked("list_instance_actions", minor, await caller.request("GET", path))
    request = listed["instanceActions"][-1]["request_id"]
    _checked("show_instance_action", minor, await caller.request("GET", f"{path}/{request}"))
