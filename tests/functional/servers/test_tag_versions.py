"""Tags of servers, interfaces and block devices: the microversions at which Nova has them, at both sides of limits."""

from typing import Any

import pytest

from tests.functional.cloud import NEWEST, Caller

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
DEVICE = {"boot_index": 0, "uuid": UUID, "source_type": "image", "destination_type": "local", "tag": "t"}
FIELDS: dict[str, dict[str, Any]] = {
    "tags": {"tags": ["t"]},
    "interface": {"networks": [{"uuid": UUID, "tag": "t"}]},
    "device": {"block_device_mapping_v2": [DEVICE]},
}


@pytest.mark.parametrize(
    ("field", "known", "unknown"),
    [
        ("tags", (52, 53, NEWEST), (1, 26, 51)),
        ("interface", (32, 33, 36, 42, NEWEST), (1, 31, 37, 41)),
        ("device", (32, 42, 43, NEWEST), (1, 31, 33, 36, 37, 41)),
    ],
)
async def test_of_a_new_server(user: Caller, field: str, known: tuple[int, ...], unknown: tuple[int, ...]) -> None:
    for minor in sorted((*known, *unknown)):
        answer = await user.at(minor).request("POST", "/servers", user.at(minor).body(**FIELDS[field]))
        assert (b"was unexpected at this microversion" not in answer.body) == (minor in known), (minor, answer.body)
        assert answer.status == 400 or minor in known


@pytest.mark.parametrize("minor", [1, 48, 49, NEWEST])
async def test_of_an_interface_that_is_attached(user: Caller, minor: int) -> None:
    id = await user.create()
    body = {"interfaceAttachment": {"net_id": UUID, "tag": "t"}}
    answer = await user.at(minor).request("POST", f"/servers/{id}/os-interface", body)
    assert (b"was unexpected at this microversion" in answer.body) == (minor < 49)


@pytest.mark.parametrize("minor", [1, 25, 26, 51, 52, NEWEST])
async def test_of_a_server_that_is_shown_listed_and_changed(user: Caller, minor: int) -> None:
    id = (await user.boot(tags=["t"]))["id"]
    other = (await user.boot())["id"]
    at, there = user.at(minor), minor >= 26

    def tags(server: dict[str, Any]) -> Any:
        return server.get("tags")

    wanted = ["t"] if there else None
    assert tags(await at.show(id)) == wanted
    assert tags((await at.put(f"/servers/{id}", {"server": {"name": "x"}}))["server"]) == wanted
    listed = {each["id"]: each for each in (await at.get("/servers/detail"))["servers"]}
    assert tags(listed[id]) == wanted and tags(listed[other]) == ([] if there else None)
    assert "tags" not in (await at.get("/servers"))["servers"][0]
    filtered = (await at.get("/servers?tags=t"))["servers"]
    assert {each["id"] for each in filtered} == ({id} if there else {id, other})
    path = f"/servers/{id}/tags"
    for method, to, body, status in (
        ("GET", path, None, 200), ("GET", f"{path}/t", None, 204), ("PUT", f"{path}/u", None, 201),
        ("PUT", path, {"tags": ["t"]}, 200), ("DELETE", f"{path}/t", None, 204), ("DELETE", path, None, 204),
    ):  # fmt: skip
        assert (await at.request(method, to, body)).status == (status if there else 404), (method, to)
