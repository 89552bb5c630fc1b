"""Compute's image client against the embedded service and against responses in the form of Glance."""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from micronova.clients.image.client import ImageClient
from micronova.http.client import Answer, ASGITransport, ServiceClient
from micronova.http.tickets import Tickets
from micronova.objects.errors import Forbidden, NotFound, Unavailable
from micronova.objects.image import ImageMeta
from tests.unit.embedded.image.world import ALICE, BOB, KEY, READER, World, world

GLANCE = {
    "id": "9c1f2f8e-0000-4000-8000-000000000001", "name": None, "status": "active", "visibility": "public",
    "disk_format": "qcow2", "container_format": "bare", "size": 21692416, "virtual_size": 117440512,
    "checksum": "c8", "os_hash_algo": "sha512", "os_hash_value": "10", "os_hidden": False,
    "protected": False, "min_disk": 1, "min_ram": 0, "owner": "p", "tags": ["a"],
    "created_at": "2024-01-01T00:00:00Z", "updated_at": "2024-01-01T00:00:00Z", "self": "/v2/images/9c",
    "file": "/v2/images/9c/file", "schema": "/v2/schemas/image", "stores": "ceph", "direct_url": "rbd://x",
    "locations": [{"url": "rbd://x", "metadata": {}}], "hw_disk_bus": "scsi", "kernel_id": None,
}  # fmt: skip


async def own_token() -> str:
    return READER


@pytest.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.fixture
def client(cloud: World) -> ImageClient:
    service = ServiceClient(ASGITransport(cloud.app), own_token)
    return ImageClient(service, url="http://cloud/image/", tickets=Tickets(KEY), now=cloud.clock.now)


class Recorded:
    """A transport that answers from a list."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        self.asked.append(f"{method} {url}")
        answer = self.answers.pop(0)
        return answer if isinstance(answer, Answer) else Answer(200, {}, json.dumps(answer).encode())

    async def close(self) -> None:
        pass


async def test_an_image_as_compute_knows_it(cloud: World, client: ImageClient) -> None:
    made = await cloud.create(name="n", data=b"data", min_ram=64, hw_disk_bus="virtio", visibility="private")
    meta = await client.get(made["id"], ALICE)
    assert meta == ImageMeta(
        id=made["id"], name="n", status="active", disk_format="raw", container_format="bare", size=4, min_ram=64,
        checksum="8d777f385d3dfec8815d20f7496026dc", os_hash_algo="sha512",
        os_hash_value=hashlib.sha512(b"data").hexdigest(), owner="p1", properties={"hw_disk_bus": "virtio"},
    )  # fmt: skip
    with pytest.raises(NotFound):
        await client.get(made["id"], BOB)
    assert (await client.get(made["id"])).name == "n"  # as the service user


async def test_a_real_glance_is_read_alike() -> None:
    transport = Recorded(GLANCE)
    meta = await ImageClient(ServiceClient(transport, own_token)).get(str(GLANCE["id"]), "token")
    assert transport.asked == [f"GET /v2/images/{GLANCE['id']}"]
    assert meta == ImageMeta(
        id=str(GLANCE["id"]), disk_format="qcow2", size=21692416, min_disk=1, checksum="c8", os_hash_algo="sha512",
        os_hash_value="10", owner="p",
        properties={"hw_disk_bus": "scsi", "kernel_id": None},
    )  # fmt: skip


async def test_a_queued_image_has_neither_size_nor_formats(cloud: World, client: ImageClient) -> None:
    answer = await cloud.call("POST", "/v2/images", {})
    meta = await client.get(answer.json()["id"], ALICE)
    assert (meta.status, meta.size, meta.name) == ("queued", 0, "")


@pytest.mark.parametrize(
    "image_id", ["", ".", "..", "../../v3/users", "a/b", "a?b=c", "a#b", "%2e%2e", "\0", "é", "x" * 5000]
)
async def test_ids_of_users_lead_nowhere_else(cloud: World, client: ImageClient, image_id: str) -> None:
    with pytest.raises(NotFound):
        await client.get(image_id, ALICE)


async def test_errors_keep_their_meaning(client: ImageClient) -> None:
    for status, error in ((403, Forbidden), (404, NotFound), (500, Unavailable), (503, Unavailable)):
        transport = Recorded(Answer(status, {"x-openstack-request-id": "req-1"}, b"<html>Glance says no</html>"))
        with pytest.raises(error):
            await ImageClient(ServiceClient(transport, own_token)).get("x", "token")


@pytest.mark.parametrize(
    "headers, body, gone",
    [
        ({"x-openstack-request-id": "req-1"}, b"<html>No image found with ID 9c<br /></html>", True),
        ({"x-openstack-request-id": "req-1"}, b"<html>The resource could not be found.</html>", False),
        ({"server": "proxy"}, b"<html>No image found with ID 9c</html>", False),
    ],
)
async def test_an_image_of_a_server_is_gone_only_if_the_service_says_so(
    headers: dict[str, str], body: bytes, gone: bool
) -> None:
    made = ImageClient(ServiceClient(Recorded(*[Answer(404, headers, body)] * 3), own_token))
    for call in (made.get_made, made.delete_made):
        with pytest.raises(NotFound if gone else Unavailable):
            await call("9c")
    if gone:
        assert await made.status_of_made("9c") is None
    else:
        with pytest.raises(Unavailable):
            await made.status_of_made("9c")


async def test_lists_are_read_to_their_end(cloud: World, client: ImageClient) -> None:
    for n in range(3):
        await cloud.create(name=f"{n}", data=b"x" if n else None)
    assert sorted(image.name for image in await client.list(ALICE)) == ["0", "1", "2"]
    assert sorted(image.name for image in await client.list(ALICE, status="active", limit="1")) == ["1", "2"]
    assert await client.list(BOB) == []
    transport = Recorded({"images": [GLANCE], "next": "/v2/images?marker=9c"}, {"images": []})
    assert len(await ImageClient(ServiceClient(transport, own_token)).list("token", status="active")) == 1
    assert transport.asked == ["GET /v2/images?status=active&limit=100", "GET /v2/images?marker=9c"]


async def test_a_host_fetches_by_the_url_alone(cloud: World, client: ImageClient) -> None:
    image = await cloud.create(data=b"data", visibility="private")
    url = client.download_url(image["id"])
    assert url is not None
    parts = urlsplit(url)
    assert url.startswith(f"http://cloud/image/v2/images/{image['id']}/file?ticket=")
    path = f"{parts.path.removeprefix('/image')}?{parts.query}"
    assert (await cloud.call("GET", path, token=None)).body == b"data"
    cloud.clock.time += 901
    assert (await cloud.call("GET", path, token=None)).status == 401


async def test_without_tickets_the_url_is_plain(cloud: World) -> None:
    service = ServiceClient(ASGITransport(cloud.app), own_token)
    assert (
        ImageClient(service, url="http://glance:9292").download_url("a/b") == "http://glance:9292/v2/images/a%2Fb/file"
    )
    assert ImageClient(service).download_url("x") is None
