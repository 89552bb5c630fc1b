"""Creating a server: every field of the request, in the answer and in the order to its host."""

import base64
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.db.tables import operations
from micronova.virt.driver import GuestPlan
from tests.functional.cloud import IMAGE, Caller, Cloud
from tests.functional.servers.spawning import spawned  # noqa: F401

Plans = dict[str, list[tuple[str, GuestPlan]]]


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_the_answer_names_the_server_and_its_password(user: Caller) -> None:
    answer = await user.request("POST", "/servers", user.body(name="web"))
    assert answer.status == 202
    server = answer.json()["server"]
    assert set(server) == {"id", "links", "OS-DCF:diskConfig", "security_groups", "adminPass"}
    assert server["OS-DCF:diskConfig"] == "MANUAL"
    assert server["security_groups"] == [{"name": "default"}]
    assert len(server["adminPass"]) >= 12
    assert answer.headers["location"] == server["links"][0]["href"]
    assert answer.headers["location"].endswith(f"/compute/v2.1/servers/{server['id']}")
    assert answer.headers["x-compute-request-id"] == answer.headers["x-openstack-request-id"]
    shown = await user.wait_for(server["id"], "ACTIVE")
    assert "adminPass" not in shown
    assert shown["name"] == "web"
    assert (shown["OS-EXT-STS:vm_state"], shown["OS-EXT-STS:power_state"]) == ("active", 1)
    assert shown["OS-SRV-USG:launched_at"] and shown["OS-SRV-USG:terminated_at"] is None
    assert shown["hostId"] and "OS-EXT-SRV-ATTR:host" not in shown


@pytest.mark.parametrize("path", ["/v2.1", "/v2.1/PROJECT", "/v2", "/v2/PROJECT"])
async def test_the_links_are_those_that_the_server_shows(cloud: Cloud, user: Caller, path: str) -> None:
    old = user.at(1)
    base = "/compute" + path.replace("PROJECT", user.project)
    headers = {"x-auth-token": user.token, "content-type": "application/json"}
    made = await cloud.transport.request("POST", f"{base}/servers", headers, msgspec.json.encode(old.body()))
    server = made.json()["server"]
    shown = await cloud.transport.request("GET", f"{base}/servers/{server['id']}", headers, None)
    assert server["links"] == shown.json()["server"]["links"]
    assert made.headers["location"] == server["links"][0]["href"]
    assert made.headers["location"].endswith(f"{base}/servers/{server['id']}")
    await user.wait_for(server["id"], "ACTIVE")


async def test_the_host_id_is_the_same_within_a_project_only(cloud: Cloud, user: Caller) -> None:
    other = cloud.caller()
    zone = f"nova:{cloud.hosts[0]}"
    mine = [await user.admin.boot(availability_zone=zone) for _ in range(2)]
    foreign = await other.admin.boot(availability_zone=zone)
    assert mine[0]["hostId"] == mine[1]["hostId"] != foreign["hostId"]


async def test_the_server_is_visible_at_once(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": "slow-one"}):
        id = await user.create(name="slow-one")
        first = await user.show(id)
        assert (first["status"], first["OS-EXT-STS:vm_state"]) == ("BUILD", "building")
        assert first["OS-EXT-STS:task_state"] in ("scheduling", "spawning")
        building = await user.wait_for(id, "BUILD", task="spawning")
        assert building["progress"] == 0
        assert id in [server["id"] for server in (await user.get("/servers"))["servers"]]
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDiqPbvxVvKQ+Hbz0vXS0EHZzTOiAdPoGfEBp4Ol7zKC a@b"


async def _with_all_fields(user: Caller) -> dict[str, Any]:
    await user.post("/os-keypairs", {"keypair": {"name": "k", "public_key": KEY, "type": "ssh"}}, status=201)
    return await user.boot(
        name="My Server_1",
        key_name="k",
        metadata={"purpose": "test", "empty": ""},
        user_data=_encoded("#!/bin/sh"),
        config_drive=True,
        accessIPv4="192.0.2.7",
        accessIPv6="2001:db8:0::7",
        adminPass="secret",
        description="what it is for",
        tags=["blue", "green"],
        hostname="other-name",
        security_groups=[{"name": "web"}, {"name": "db"}, {"name": "web"}],
        **dict[str, Any]({"OS-DCF:diskConfig": "AUTO"}),
    )


async def test_all_fields_are_shown(user: Caller) -> None:
    server = await _with_all_fields(user)
    assert server["name"] == "My Server_1"
    assert server["key_name"] == "k"
    assert server["metadata"] == {"purpose": "test", "empty": ""}
    assert server["config_drive"] == "True"
    assert (server["accessIPv4"], server["accessIPv6"]) == ("192.0.2.7", "2001:db8::7")
    assert server["description"] == "what it is for"
    assert server["tags"] == ["blue", "green"]
    assert server["trusted_image_certificates"] is None
    assert server["OS-DCF:diskConfig"] == "AUTO"
    assert "security_groups" not in server  # they belong to ports, and it has none
    assert server["OS-EXT-SRV-ATTR:hostname"] == "other-name"
    detail = await user.admin.show(server["id"])
    assert detail["OS-EXT-SRV-ATTR:user_data"] == _encoded("#!/bin/sh")
    assert detail["OS-EXT-SRV-ATTR:root_device_name"] == "/dev/vda"
    assert detail["OS-EXT-SRV-ATTR:launch_index"] == 0


async def test_all_fields_arrive_at_the_host(user: Caller, spawned: Plans) -> None:
    server = await _with_all_fields(user)
    [(host, plan)] = spawned[server["id"]]
    assert host == await user.host_of(server["id"])
    ordered = plan.instance
    assert (ordered.name, ordered.hostname) == ("My Server_1", "other-name")
    assert (ordered.key_name, ordered.key_data) == ("k", KEY)
    assert ordered.user_data == _encoded("#!/bin/sh")
    assert ordered.config_drive is True
    assert ordered.metadata == server["metadata"]
    assert ordered.tags == ("blue", "green")
    assert (ordered.project_id, ordered.user_id) == (user.project, user.user)
    assert (ordered.flavor.ram, ordered.flavor.vcpus, ordered.flavor.disk) == (512, 1, 1)
    assert ordered.image is not None and ordered.image.id == IMAGE
    assert plan.admin_password == "secret"
    [root] = plan.block_devices
    assert (root.boot_index, root.image_id, root.destination_type) == (0, IMAGE, "local")


async def test_files_and_the_generated_password_arrive_and_leave_no_trace(
    cloud: Cloud, user: Caller, spawned: Plans
) -> None:
    old = user.at(56)
    answer = await old.post("/servers", old.body(personality=[{"path": "/etc/motd", "contents": _encoded("hello")}]))
    id, password = answer["server"]["id"], answer["server"]["adminPass"]
    server = await user.wait_for(id, "ACTIVE")
    [(_, plan)] = spawned[id]
    assert plan.instance.config_drive and server["config_drive"] == "True"  # the only way to give files to a guest
    assert plan.admin_password == password
    assert [(file.path, file.contents) for file in plan.injected_files] == [("/etc/motd", b"hello")]
    [row] = await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id))
    assert row.secrets is None, "secrets are erased when the operation ends"
    assert password.encode() not in row.payload + row.context


async def test_secrets_are_sealed_while_the_operation_waits(cloud: Cloud, user: Caller) -> None:
    async with cloud.faults({"operation": "spawn", "kind": "hang", "name": "sealed"}):
        id = await user.create(name="sealed", adminPass="very-secret")
        await user.wait_for(id, "BUILD", task="spawning")
        [row] = await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id))
        assert row.secrets and b"very-secret" not in row.secrets
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        for row in await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id)):
            assert row.secrets is None


@pytest.mark.parametrize(
    ("name", "hostname"),
    [
        ("My Server_1.example", "my-server-1-example"),
        ("grün", "grn"),
        ("---a", "a"),
        ("x" * 80, "x" * 63),
    ],
)
async def test_the_host_name_is_made_of_the_name(user: Caller, name: str, hostname: str) -> None:
    id = await user.create(name=name)
    assert (await user.show(id))["OS-EXT-SRV-ATTR:hostname"] == hostname


async def test_a_name_without_letters_gives_a_host_name_of_the_id(user: Caller) -> None:
    id = await user.create(name="雲")
    assert (await user.show(id))["OS-EXT-SRV-ATTR:hostname"] == f"server-{id}"


async def test_descriptions_by_version(user: Caller) -> None:
    old = await user.at(18).create(name="d")
    none = await user.create(name="d")
    assert (await user.show(old))["description"] == "d"
    assert (await user.show(none))["description"] is None


async def test_the_flavor_is_kept_as_it_was(user: Caller) -> None:
    admin = user.admin
    flavor = (await admin.post("/flavors", {"flavor": {"name": user.project, "ram": 64, "vcpus": 1, "disk": 1}}, 200))[
        "flavor"
    ]
    await admin.post(f"/flavors/{flavor['id']}/os-extra_specs", {"extra_specs": {"hw:cpu_policy": "shared"}}, 200)
    server = await user.boot(flavorRef=flavor["id"])
    await admin.delete(f"/flavors/{flavor['id']}", 202)
    shown = (await user.show(server["id"]))["flavor"]
    assert shown == {
        "original_name": user.project, "ram": 64, "vcpus": 1, "disk": 1, "ephemeral": 0, "swap": 0,
        "extra_specs": {"hw:cpu_policy": "shared"},
    }  # fmt: skip
    assert (await user.at(46).show(server["id"]))["flavor"]["id"] == flavor["id"]


async def test_ephemeral_and_swap_disks_come_from_the_flavor_or_the_request(user: Caller, spawned: Plans) -> None:
    wanted = {"name": user.project, "ram": 64, "vcpus": 1, "disk": 1, "OS-FLV-EXT-DATA:ephemeral": 6, "swap": 2048}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    root = {"boot_index": 0, "uuid": IMAGE, "source_type": "image", "destination_type": "local"}
    blank = {"boot_index": -1, "source_type": "blank", "destination_type": "local", "delete_on_termination": True}
    plain = await user.boot(flavorRef=flavor)
    divided = await user.boot(
        flavorRef=flavor,
        block_device_mapping_v2=[
            root,
            {**blank, "volume_size": 2, "guest_format": "ext4", "tag": "scratch"},
            {**blank, "volume_size": 3},
            {**blank, "volume_size": 1, "guest_format": "swap"},
        ],
    )
    [(_, plan)] = spawned[plain["id"]]
    assert [(d.source_type, d.size_gb, d.guest_format) for d in plan.block_devices] == [
        ("image", None, None), ("blank", 6, None), ("blank", 2, "swap"),
    ]  # fmt: skip
    [(_, plan)] = spawned[divided["id"]]
    assert [(d.source_type, d.size_gb, d.guest_format, d.tag) for d in plan.block_devices] == [
        ("image", None, None, None), ("blank", 2, "ext4", "scratch"), ("blank", 3, None, None),
        ("blank", 1, "swap", None),
    ]  # fmt: skip


async def test_blank_disks_in_the_oldest_form(user: Caller, spawned: Plans) -> None:
    wanted = {"name": f"v1-{user.project}", "ram": 64, "vcpus": 1, "disk": 1, "OS-FLV-EXT-DATA:ephemeral": 3}
    flavor = (await user.admin.post("/flavors", {"flavor": {**wanted, "swap": 1024}}, 200))["flavor"]["id"]
    server = await user.boot(
        flavorRef=flavor,
        block_device_mapping=[
            {"virtual_name": "swap", "volume_size": 1},
            {"virtual_name": "ephemeral0", "volume_size": 2, "delete_on_termination": False},
        ],
    )
    [(_, plan)] = spawned[server["id"]]
    assert [(d.source_type, d.size_gb, d.guest_format, d.boot_index) for d in plan.block_devices] == [
        ("image", None, None, 0), ("blank", 1, "swap", -1), ("blank", 2, None, -1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([{"source_type": "blank", "volume_size": 7}], "Ephemeral disks requested are larger"),
        ([{"source_type": "blank", "volume_size": 1, "guest_format": "swap"}], "Swap drive requested is larger"),
        ([{"boot_index": 0, "uuid": IMAGE, "source_type": "image"}] * 2, "Boot sequence"),
        ([{"boot_index": 0, "uuid": "2" * 8 + IMAGE[8:], "source_type": "image"}], "is not the server's imageRef"),
        ([{"source_type": "image"}], "needs a uuid"),
        ([{"source_type": "tape"}], "source_type"),
        ([{"source_type": "blank", "destination_type": "tape"}], "destination_type"),
        ([{"source_type": "blank", "volume_size": 0}], "volume_size"),
        ([{"source_type": "blank", "volume_size": "many"}], "volume_size"),
        ([{"source_type": "blank", "uuid": IMAGE}], "uuid"),
    ],
)
async def test_bad_block_devices(user: Caller, devices: list[dict[str, Any]], words: str) -> None:
    message = await user.refused(400, "POST", "/servers", user.body(block_device_mapping_v2=devices))
    assert words in message


async def test_a_server_needs_something_to_boot_from(user: Caller) -> None:
    message = await user.refused(400, "POST", "/servers", user.body(imageRef=""))
    assert "imageRef" in message


async def test_booting_from_the_image_of_a_device(user: Caller) -> None:
    root = {"boot_index": 0, "uuid": IMAGE, "source_type": "image", "destination_type": "local"}
    server = await user.boot(imageRef="", block_device_mapping_v2=[root])
    assert server["image"]["id"] == IMAGE


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"flavorRef": "no-such"}, "Flavor no-such could not be found"),
        ({"key_name": "no-such"}, "key_name"),
        ({"availability_zone": "no-such"}, "availability zone 'no-such'"),
    ],
)
async def test_what_does_not_exist_is_refused(user: Caller, fields: dict[str, Any], words: str) -> None:
    assert words in await user.refused(400, "POST", "/servers", user.body(**fields))


async def test_a_key_pair_of_another_user_does_not_exist(cloud: Cloud, user: Caller) -> None:
    other = cloud.caller()
    await other.at(91).post("/os-keypairs", {"keypair": {"name": "theirs"}}, status=201)
    assert "key_name" in await user.refused(400, "POST", "/servers", user.body(key_name="theirs"))


async def test_references_may_be_urls(user: Caller) -> None:
    server = await user.boot(imageRef=f"http://cloud/images/{IMAGE}", flavorRef="http://cloud/compute/v2.1/flavors/1")
    assert server["image"]["id"] == IMAGE
    assert server["flavor"]["original_name"] == "m1.tiny"


async def test_the_old_name_of_the_resource_boots_as_well(user: Caller) -> None:
    old = user.at(90)
    answer = await old.post("/os-volumes_boot", old.body())
    await user.wait_for(answer["server"]["id"], "ACTIVE")
    await user.refused(404, "POST", "/os-volumes_boot", user.body())


async def test_a_flavor_without_disk_is_for_admins(user: Caller) -> None:
    wanted = {"name": user.project, "ram": 64, "vcpus": 1, "disk": 0}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    assert "zero disk" in await user.refused(403, "POST", "/servers", user.body(flavorRef=flavor))
    await user.admin.boot(flavorRef=flavor)


async def test_a_private_flavor_is_for_its_projects(user: Caller) -> None:
    wanted = {"name": user.project, "ram": 64, "vcpus": 1, "disk": 1, "os-flavor-access:is_public": False}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    await user.refused(400, "POST", "/servers", user.body(flavorRef=flavor))
    access = {"addTenantAccess": {"tenant": user.project}}
    await user.admin.post(f"/flavors/{flavor}/action", access, 200)
    await user.boot(flavorRef=flavor)


async def test_a_stranger_sees_and_changes_nothing(cloud: Cloud, user: Caller) -> None:
    server = await user.boot()
    stranger = cloud.caller()
    path = f"/servers/{server['id']}"
    for method, where, body in (
        ("GET", path, None),
        ("PUT", path, {"server": {"name": "mine"}}),
        ("DELETE", path, None),
        ("POST", f"{path}/action", {"os-stop": None}),
        ("POST", f"{path}/action", {"os-getConsoleOutput": {}}),
        ("GET", f"{path}/metadata", None),
        ("PUT", f"{path}/tags", {"tags": ["x"]}),
        ("GET", f"{path}/ips", None),
        ("GET", f"{path}/os-instance-actions", None),
    ):
        await stranger.refused(404, method, where, body)
    assert (await stranger.get("/servers"))["servers"] == []
    assert (await user.show(server["id"]))["status"] == "ACTIVE"


async def test_a_long_name_of_several_servers_is_cut(cloud: Cloud, user: Caller) -> None:
    """The names of servers are in the messages of hosts, which refuse longer ones."""
    created = await user.boot_many(2, name="n" * 255)
    shown = [await user.show(id) for id in created]
    assert sorted(each["name"] for each in shown) == ["n" * 253 + "-1", "n" * 253 + "-2"]
    for each in shown:
        assert each["id"] in await cloud.guests(await user.host_of(each["id"]))
