"""Requests that the volume service refuses, and what it says."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.unit.embedded.volume.world import World, world


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.mark.parametrize("size", [-1, 0, 2**31, 2**63, 1.5, "x", "-1", "0", "9" * 40, True, [], {}, None])
async def test_sizes(cloud: World, size: Any) -> None:
    answer = await cloud.call("POST", "/volumes", {"volume": {"size": size}})
    assert answer.status == 400, answer
    assert "size" in answer.json()["badRequest"]["message"]
    assert cloud.files() == []


@pytest.mark.parametrize(("fields", "status", "said"), [
    ({"name": "x" * 256}, 400, "name"),
    ({"metadata": {"k": 1}}, 400, "metadata"),
    ({"metadata": {"": "v"}}, 400, "metadata"),
    ({"metadata": {"k": "v" * 256}}, 400, "metadata"),
    ({"availability_zone": "mars"}, 400, "mars"),
    ({"volume_type": "none such"}, 404, "none such"),
    ({"snapshot_id": "x"}, 400, "snapshot_id"),
    ({"snapshot_id": "00000000-0000-4000-8000-000000000000"}, 404, "Snapshot"),
    ({"source_volid": "00000000-0000-4000-8000-000000000000"}, 404, "Volume"),
    ({"backup_id": "00000000-0000-4000-8000-000000000000"}, 404, "Backup"),
    ({"imageRef": "no such image"}, 400, "no such image"),
    ({"multiattach": True}, 400, "multiattach"),
    ({"group_id": "00000000-0000-4000-8000-000000000000"}, 400, "group"),
    ({"zork": 1}, 400, "zork"),
])  # fmt: skip
async def test_fields(cloud: World, fields: dict[str, Any], status: int, said: str) -> None:
    answer = await cloud.call("POST", "/volumes", {"volume": {"size": 1, **fields}})
    assert answer.status == status, answer
    assert said in answer.body.decode()
    assert (await cloud.do("GET", "/volumes"))["volumes"] == []


@pytest.mark.parametrize("kind", ["volumes", "snapshots", "types"])
@pytest.mark.parametrize("wanted", [
    "", "zork", "[]", "{[]: 1}", "{{}: 1}", "{'a'", "{" * 5000, "-" * 5000 + "1", r"{'a': '\ud800'}", r"{'\x00': 'b'}",
    "{'a': 0x" + "f" * 5000 + "}", str({f"k{number}": "v" for number in range(129)}),
])  # fmt: skip
async def test_filters_that_are_no_dictionary_or_too_large(cloud: World, kind: str, wanted: str) -> None:
    name = "extra_specs" if kind == "types" else "metadata"
    answer = await cloud.call("GET", f"/{kind}?{name}={quote(wanted)}")
    assert answer.status == 400, answer
    assert name in answer.json()["badRequest"]["message"]


@pytest.mark.parametrize("name", ['a"b', '"', "a\\", 'a" || "', "$.*", "a]["])
async def test_filters_by_image_metadata_with_any_name(cloud: World, name: str) -> None:
    """Names are part of a path in JSON, whose characters mean something to the database."""
    volume = await cloud.create()
    await cloud.act(volume["id"], "os-set_image_metadata", metadata={"a": "x"})
    answer = await cloud.call("GET", f"/volumes?glance_metadata={quote(str({name: 'x'}))}")
    assert (answer.status, answer.json()) == (200, {"volumes": []})
    assert len(await cloud.names(f"glance_metadata={quote(str({'a': 'x'}))}")) == 1


async def test_old_clients_send_fields_that_are_ignored(cloud: World) -> None:
    body = {"volume": {"size": 1, "status": "creating", "user_id": None, "attach_status": "detached"}}
    assert (await cloud.call("POST", "/volumes", body, minor=52)).status == 202
    assert (await cloud.call("POST", "/volumes", body, minor=53)).status == 400
    hints = {"volume": {"size": 1}, "OS-SCH-HNT:scheduler_hints": {"same_host": "x"}}
    assert (await cloud.call("POST", "/volumes", hints)).status == 400


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"volume": null}', b'{"volume": []}', b'{"a": 1}'])
async def test_bodies(cloud: World, raw: bytes) -> None:
    assert (await cloud.call("POST", "/volumes", raw)).status == 400
