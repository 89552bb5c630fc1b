"""Bad bodies and bad paths for servers: refused with a message that says what is wrong, never a 500."""

import json
from typing import Any

import pytest

from micronova.http.client import error_message
from tests.functional.cloud import IMAGE, NEWEST, Caller, Cloud

UUID = "33333333-3333-4333-8333-333333333333"

# (fields of "server" that replace those of a good request, a word of the message)
CREATE: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "  "}, "name"),
    ({"name": " x"}, "name"),
    ({"name": "x "}, "name"),
    ({"name": "x" * 256}, "name"),
    ({"name": 5}, "name"),
    ({"name": ["x"]}, "name"),
    ({"name": "a\u0000b"}, "U+0000"),
    ({"name": "a\u0007b"}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"flavorRef": ""}, "Flavor"),
    ({"flavorRef": []}, "flavor"),
    ({"flavorRef": True}, "flavor"),
    ({"flavorRef": "x" * 300}, "lavor"),
    ({"flavorRef": "a\u0000b"}, "U+0000"),
    ({"imageRef": "no-uuid"}, "imageRef"),
    ({"imageRef": 7}, "imageRef"),
    ({"imageRef": "http://cloud/images/"}, "imageRef"),
    ({"networks": "some"}, "networks"),
    ({"networks": "None"}, "networks"),
    ({"networks": 3}, "networks"),
    ({"networks": {}}, "networks"),
    ({"networks": [{}]}, "networks"),
    ({"networks": [{"uuid": "x"}]}, "networks"),
    ({"networks": [{"port": "x"}]}, "networks"),
    ({"networks": [{"uuid": UUID, "fixed_ip": "300.1.1.1"}]}, "fixed_ip"),
    ({"networks": [{"uuid": UUID, "colour": "blue"}]}, "colour"),
    ({"networks": [{"uuid": UUID, "tag": "a/b"}]}, "tag"),
    ({"networks": [{"uuid": UUID, "tag": "x" * 61}]}, "tag"),
    ({"networks": [{"port": UUID, "fixed_ip": "10.0.0.1"}]}, "ixed"),
    ({"networks": [{"port": UUID}, {"port": UUID}]}, "twice"),
    ({"security_groups": "default"}, "security_groups"),
    ({"security_groups": [{}]}, "name"),
    ({"security_groups": [{"name": ""}]}, "name"),
    ({"security_groups": [{"name": "a", "id": "b"}]}, "id"),
    ({"key_name": ""}, "key_name"),
    ({"key_name": 1}, "key_name"),
    ({"key_name": "a" * 256}, "key_name"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": None}}, "metadata"),
    ({"metadata": {"": "x"}}, "metadata"),
    ({"metadata": {"x" * 256: "a"}}, "metadata"),
    ({"metadata": {"a": "x" * 256}}, "metadata"),
    ({"metadata": {"a/b": "x"}}, "metadata"),
    ({"user_data": "not base64!"}, "user_data"),
    ({"user_data": "YQ=x"}, "user_data"),
    ({"user_data": "A" * 65536}, "user_data"),
    ({"user_data": 7}, "user_data"),
    ({"config_drive": "perhaps"}, "config_drive"),
    ({"config_drive": ""}, "config_drive"),
    ({"config_drive": None}, "config_drive"),
    ({"availability_zone": None}, "availability_zone"),
    ({"key_name": None}, "key_name"),
    ({"user_data": None}, "user_data"),
    ({"accessIPv4": None}, "accessIPv4"),
    ({"config_drive": 1}, "config_drive"),
    ({"return_reservation_id": 1}, "return_reservation_id"),
    ({"accessIPv4": ""}, "accessIPv4"),
    ({"accessIPv6": ""}, "accessIPv6"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "destination_type": None}]}, "destination_type"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "destination_type": ""}]}, "destination_type"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "volume_size": None}]}, "volume_size"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "volume_size": "1" * 19}]}, "volume_size"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "device_name": ""}]}, "device_name"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "disk_bus": None}]}, "disk_bus"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "guest_format": "x" * 256}]}, "guest_format"),
    ({"block_device_mapping": [{"colour": "blue"}]}, "colour"),
    ({"block_device_mapping": [{"volume_id": "x"}]}, "volume_id"),
    ({"block_device_mapping": [{"volume_id": IMAGE, "volume_size": 0}]}, "volume_size"),
    ({"block_device_mapping": [{"volume_id": IMAGE, "device_name": "a b"}]}, "device_name"),
    ({"config_drive": 2}, "config_drive"),
    ({"config_drive": []}, "config_drive"),
    ({"availability_zone": ""}, "availability_zone"),
    ({"availability_zone": "x" * 256}, "availability_zone"),
    ({"availability_zone": 1}, "availability_zone"),
    ({"availability_zone": "a:b:c:d"}, "availability_zone"),
    ({"host": ""}, "host"),
    ({"host": "a b"}, "host"),
    ({"hypervisor_hostname": 1}, "hypervisor_hostname"),
    ({"min_count": 0}, "min_count"),
    ({"min_count": -1}, "min_count"),
    ({"min_count": "two"}, "min_count"),
    ({"min_count": 1.5}, "min_count"),
    ({"min_count": None, "max_count": 0}, "max_count"),
    ({"max_count": ""}, "max_count"),
    ({"max_count": 100_001}, "from 1 to 100000"),
    ({"max_count": "100001"}, "from 1 to 100000"),
    ({"max_count": 1e30}, "max_count"),
    ({"max_count": 10**30}, "max_count"),
    ({"max_count": "1" * 30}, "max_count"),
    ({"max_count": True}, "max_count"),
    ({"min_count": 3, "max_count": 2}, "min_count"),
    ({"return_reservation_id": "perhaps"}, "return_reservation_id"),
    ({"block_device_mapping": {}}, "block_device_mapping"),
    ({"block_device_mapping": [], "block_device_mapping_v2": []}, "block_device_mapping"),
    ({"block_device_mapping_v2": [{"boot_index": "first", "source_type": "blank"}]}, "boot_index"),
    ({"block_device_mapping_v2": [{"boot_index": 0, "source_type": "image", "uuid": IMAGE, "colour": 1}]}, "colour"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "device_name": "/dev/v da"}]}, "device_name"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "delete_on_termination": "perhaps"}]}, "delete_on"),
    ({"block_device_mapping_v2": [{"source_type": "blank", "tag": "a,b"}]}, "tag"),
    ({"accessIPv4": "1.2.3"}, "accessIPv4"),
    ({"accessIPv4": "::1"}, "accessIPv4"),
    ({"accessIPv6": "10.0.0.1"}, "accessIPv6"),
    ({"accessIPv6": 6}, "accessIPv6"),
    ({"adminPass": 7}, "adminPass"),
    ({"OS-DCF:diskConfig": "auto"}, "diskConfig"),
    ({"OS-DCF:diskConfig": None}, "diskConfig"),
    ({"description": "x" * 256}, "description"),
    ({"description": 7}, "description"),
    ({"description": "a\u0007b"}, "description"),
    ({"tags": "a"}, "tags"),
    ({"tags": ["a/b"]}, "tags"),
    ({"tags": [""]}, "tags"),
    ({"tags": ["x" * 61]}, "tags"),
    ({"tags": [f"t{n}" for n in range(51)]}, "tags"),
    ({"trusted_image_certificates": []}, "trusted_image_certificates"),
    ({"trusted_image_certificates": ["a"] * 51}, "trusted_image_certificates"),
    ({"trusted_image_certificates": ["a", "a"]}, "trusted_image_certificates"),
    ({"hostname": ""}, "hostname"),
    ({"hostname": "a b"}, "hostname"),
    ({"hostname": "a/b"}, "hostname"),
    ({"hostname": "a\n"}, "hostname"),
    ({"hostname": "a." * 130}, "hostname"),
    ({"personality": []}, "personality"),
    ({"colour": "blue"}, "colour"),
    ({"OS-EXT-AZ:availability_zone": "nova"}, "OS-EXT-AZ"),
]


def _whole(user: Caller, fields: dict[str, Any]) -> dict[str, Any]:
    body = user.body(**fields)
    body["server"].update({key: value for key, value in fields.items() if value is None and key != "min_count"})
    return body


@pytest.mark.parametrize(("fields", "word"), CREATE)
async def test_a_bad_field_of_a_new_server(user: Caller, fields: dict[str, Any], word: str) -> None:
    message = await user.refused(400, "POST", "/servers", _whole(user, fields))
    assert word in message
    assert (await user.get("/servers"))["servers"] == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "server"),
        ([], "body"),
        ("server", "body"),
        (7, "body"),
        (None, "body"),
        ({"server": None}, "server"),
        ({"server": []}, "server"),
        ({"server": {}}, "name"),
        ({"server": {"name": "x"}}, "flavorRef"),
        ({"server": {"name": "x", "flavorRef": "1", "imageRef": IMAGE}}, "networks"),
        ({"servers": {}}, "servers"),
        ({"server": {"name": "x", "flavorRef": "1", "networks": "none"}}, "imageRef"),
    ],
)
async def test_a_bad_body_for_a_new_server(user: Caller, body: Any, word: str) -> None:
    assert word in await user.refused(400, "POST", "/servers", body)


@pytest.mark.parametrize(
    ("hints", "word"),
    [
        ({"group": "by-name"}, "group"),
        ({"group": [UUID, UUID]}, "group"),
        ({"group": 7}, "group"),
        ({"same_host": "x"}, "same_host"),
        ({"same_host": [UUID, "x"]}, "same_host"),
        ({"different_host": "x"}, "different_host"),
        ({"build_near_host_ip": "here"}, "build_near_host_ip"),
        ({"build_near_host_ip": []}, "build_near_host_ip"),
        ({"different_host": [UUID] * 300}, "8192 bytes"),
        ({"custom": "x" * 9000}, "8192 bytes"),
        ([], "scheduler_hints"),
        ("group", "scheduler_hints"),
    ],
)
async def test_bad_hints(user: Caller, hints: Any, word: str) -> None:
    body = {**user.body(), "os:scheduler_hints": hints}
    assert word in await user.refused(400, "POST", "/servers", body)


@pytest.mark.parametrize(
    ("minor", "fields", "word"),
    [
        (1, {"description": "d"}, "description"),
        (18, {"description": "d"}, "description"),
        (31, {"networks": [{"uuid": UUID, "tag": "t"}]}, "tag"),
        (36, {"networks": "auto"}, "networks"),
        (36, {"networks": "none"}, "networks"),
        (51, {"tags": ["a"]}, "tags"),
        (57, {"personality": []}, "personality"),
        (62, {"trusted_image_certificates": ["a"]}, "trusted_image_certificates"),
        (66, {"block_device_mapping_v2": [{"source_type": "blank", "volume_type": "x"}]}, "volume_type"),
        (73, {"host": "h"}, "host"),
        (73, {"hypervisor_hostname": "h"}, "hypervisor_hostname"),
        (89, {"hostname": "h"}, "hostname"),
        (93, {"hostname": "a.example"}, "hostname"),
    ],
)
async def test_fields_of_other_microversions(user: Caller, minor: int, fields: dict[str, Any], word: str) -> None:
    old = user.at(minor)
    assert word in await old.refused(400, "POST", "/servers", old.body(**fields))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "action"),
        ([], "body"),
        (None, "action"),
        ({"os-stop": None, "os-start": None}, "one key"),
        ({"fly": None}, "fly"),
        ({"reboot": None}, "reboot"),
        ({"reboot": {}}, "type"),
        ({"reboot": {"type": "GENTLE"}}, "type"),
        ({"reboot": {"type": 1}}, "type"),
        ({"reboot": {"type": "SOFT", "now": True}}, "now"),
        ({"reboot": "SOFT"}, "reboot"),
        ({"os-getConsoleOutput": None}, "os-getConsoleOutput"),
        ({"os-getConsoleOutput": {"length": "a"}}, "length"),
        ({"os-getConsoleOutput": {"lines": 1}}, "lines"),
    ],
)
async def test_bad_actions(user: Caller, body: Any, word: str) -> None:
    id = await user.create()
    assert word in await user.refused(400, "POST", f"/servers/{id}/action", body)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"{'server': 1}", b"\xff\xfe{}", b'{"server": "\xc3\x28"}', b'{"server": {"name": "\\ud800"}}',
        b"[" * 100_000, b'{"a":' * 15_000 + b"1" + b"}" * 15_000, b'{"server": NaN}', b'{"server": 1e999}',
        b"\x00" * 100, b"<server/>", b'{"server": {}} trailing', b'{"server": {"name": "a", "name": "b"}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/servers", "/servers/{id}/action", "/servers/{id}/metadata"])
async def test_bodies_that_are_no_json(user: Caller, raw: bytes, path: str) -> None:
    answer = await user.request("POST", path.replace("{id}", UUID), raw)
    # A body that is valid JSON is checked only after the server was found.
    assert answer.status in (400, 404), answer.body[:300]
    assert error_message(answer)
    json.loads(answer.body)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/servers", {"content-type": "application/xml"}, 415),
        ("POST", "/servers", {"content-type": "multipart/form-data"}, 415),
        ("POST", "/servers", {"openstack-api-version": "compute 2.105"}, 406),
        ("POST", "/servers", {"openstack-api-version": "compute 3.1"}, 406),
        ("POST", "/servers", {"openstack-api-version": "compute two"}, 400),
        ("POST", "/servers", {"openstack-api-version": "compute 2.1.1"}, 400),
        ("POST", "/servers", {"x-auth-token": ""}, 401),
        ("PATCH", "/servers", {}, 404),
        ("DELETE", "/servers", {}, 404),
        ("POST", "/servers/detail", {}, 404),
        ("GET", "/servers/no-such", {}, 404),
        ("GET", f"/servers/{UUID}", {}, 404),
        ("GET", "/servers/" + "x" * 4000, {}, 404),
        ("GET", "/servers/%00", {}, 404),
        ("GET", "/servers/%ff", {}, 404),
        ("GET", "/servers/..%2f..%2fetc", {}, 404),
        ("DELETE", f"/servers/{UUID}", {}, 404),
        ("PUT", f"/servers/{UUID}/tags/x", {}, 404),
        ("GET", f"/servers/{UUID}/ips/x", {}, 404),
        ("GET", "/server", {}, 404),
        ("GET", "/servers?limit=%ff", {}, 400),
        ("GET", "/servers?" + "&".join(f"a{n}=1" for n in range(1100)), {}, 400),
    ],
)
async def test_bad_requests(user: Caller, method: str, path: str, headers: dict[str, str], status: int) -> None:
    body = user.body() if method == "POST" else None
    answer = await user.request(method, path, body, headers)
    assert answer.status == status, answer.body[:300]
    assert error_message(answer)


async def test_a_body_that_is_too_large(user: Caller) -> None:
    answer = await user.request("POST", "/servers", b" " * 200_000)
    assert answer.status == 413
    assert "too large" in error_message(answer)


async def test_the_old_api_ignores_what_it_does_not_know(user: Caller) -> None:
    body = user.at(1).body(colour="blue", name=" spaces ")
    headers = {"x-auth-token": user.token, "content-type": "application/json"}
    answer = await user.cloud.transport.request("POST", "/compute/v2/servers", headers, json.dumps(body).encode())
    assert answer.status == 202, answer.body
    server = await user.wait_for(answer.json()["server"]["id"], "ACTIVE")
    assert server["name"] == "spaces"


async def test_errors_tell_nothing_of_the_inside(cloud: Cloud, user: Caller) -> None:
    answer = await user.at(NEWEST).request("POST", "/servers", _whole(user, {"name": 5}))
    text = answer.body.decode()
    assert "Traceback" not in text and "msgspec" not in text and "micronova" not in text


@pytest.mark.parametrize("name", ["name", "ip6", "tags", "not-tags-any", "flavor", "kernel_id", "config_drive"])
@pytest.mark.parametrize("text", ["", "("])
async def test_filters_that_are_no_expressions(user: Caller, name: str, text: str) -> None:
    for caller in (user, user.admin):
        assert name in await caller.refused(400, "GET", f"/servers/detail?{name}={text}")


async def test_sizes_of_volumes_in_the_oldest_form(user: Caller) -> None:
    for size in (0, "0", 2**31):
        devices = [{"device_name": "vda", "volume_id": UUID, "volume_size": size}]
        assert "volume_size" in await user.refused(400, "POST", "/servers", user.body(block_device_mapping=devices))
