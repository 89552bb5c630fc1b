"""The limits of the settings reach the services: what a tenant may use up, and the refusal beyond that."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.tables import operations
from tests.functional.full_cloud import FullCloud, Person

pytestmark = pytest.mark.asyncio(loop_scope="module")

KIND = {"content-type": "application/octet-stream"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FullCloud]:
    limits = {
        "image": {
            "user_storage_quota": 5 << 20,
            "image_size_cap": 4 << 20,
            "uploads_per_project": 1,
            "image_count_total": 3,
            "image_metadata_size_cap": 1000,
        },
        "identity": {"max_password_checks": 3},
    }
    made = FullCloud(tmp_path_factory.mktemp("cloud"), **limits)
    await made.start()
    yield made
    await made.stop()


async def _queued(person: Person) -> str:
    body = {"name": "x", "disk_format": "raw", "container_format": "bare"}
    return str((await person.do("POST", "/image/v2/images", body))["id"])


async def test_the_image_data_of_a_project(cloud: FullCloud) -> None:
    person = await cloud.person("member")
    await person.make_image("first", "raw", bytes(3 << 20))
    usage = (await person.do("GET", "/image/v2/info/usage"))["usage"]["image_size_total"]
    assert usage == {"limit": 5, "usage": 3}
    second = await _queued(person)
    answer = await person.request("PUT", f"/image/v2/images/{second}/file", bytes(3 << 20), KIND)
    assert answer.status == 413 and b"The project may keep" in answer.body
    await person.do("PUT", f"/image/v2/images/{second}/file", bytes(2 << 20), KIND)
    await (await cloud.person("member")).make_image("of another project", "raw", bytes(3 << 20))


async def test_the_size_of_an_image(cloud: FullCloud) -> None:
    person = await cloud.person("member")
    answer = await person.request("PUT", f"/image/v2/images/{await _queued(person)}/file", bytes((4 << 20) + 1), KIND)
    assert answer.status == 413 and b"An image may have" in answer.body


async def test_the_images_of_a_project(cloud: FullCloud) -> None:
    person = await cloud.person("member")
    ids = [await _queued(person) for _ in range(3)]
    usage = (await person.do("GET", "/image/v2/info/usage"))["usage"]["image_count_total"]
    assert usage == {"limit": 3, "usage": 3}
    answer = await person.request("POST", "/image/v2/images", {"name": "x"})
    assert answer.status == 413 and b"The project has 3 images" in answer.body
    await person.do("DELETE", f"/image/v2/images/{ids[0]}")
    await _queued(person)
    await _queued(await cloud.person("member"))  # of another project


async def test_images_of_a_project_that_are_made_at_once(cloud: FullCloud) -> None:
    person = await cloud.person("member")
    answers = await asyncio.gather(*(person.request("POST", "/image/v2/images", {"name": "x"}) for _ in range(10)))
    assert sorted(answer.status for answer in answers) == [201] * 3 + [413] * 7


async def test_the_metadata_of_an_image(cloud: FullCloud) -> None:
    person = await cloud.person("member")
    answer = await person.request("POST", "/image/v2/images", {"name": "x", "p": "\u00e4" * 500})
    assert answer.status == 413 and b"may have 1000 bytes, not 1001" in answer.body
    await person.do("POST", "/image/v2/images", {"name": "x", "p": "x" * 999})


async def test_passwords_that_wait_to_be_checked(cloud: FullCloud) -> None:
    def login() -> dict[str, object]:
        user = {"name": f"nobody-{uuid.uuid4().hex}", "domain": {"id": "default"}, "password": "x"}
        return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}

    nobody = Person(cloud)
    answers = await asyncio.gather(*(nobody.request("POST", "/identity/v3/auth/tokens", login()) for _ in range(40)))
    assert {answer.status for answer in answers} == {401, 503}
    refused = next(answer for answer in answers if answer.status == 503)
    assert b"Too many log-ins" in refused.body
    assert (await nobody.request("POST", "/identity/v3/auth/tokens", login())).status == 401


async def test_a_snapshot_waits_for_other_uploads(cloud: FullCloud) -> None:
    """Else of many servers that are shelved at once only the first ones would be, and the others left stopped."""
    person = await cloud.person("member")
    base = await person.make_image("base", "raw", bytes(512))
    body = {"imageRef": base, "flavorRef": "1", "networks": "none"}
    first, second = [
        (await person.make("/compute/v2.1/servers", "server", **body, name=name))["id"] for name in ("slow", "waits")
    ]

    async def both() -> bool | None:
        found = [await _status(person, f"/compute/v2.1/servers/{id}", "server") for id in (first, second)]
        return True if found == ["ACTIVE", "ACTIVE"] else None

    await cloud.until(both, "the servers to be active")
    image = {"createImage": {"name": "i"}}
    async with cloud.faults({"operation": "upload", "kind": "hang", "name": "slow"}):
        await person.do("POST", f"/compute/v2.1/servers/{first}/action", image)
        await cloud.fault_struck()
        queued = f"/image/v2/images/{await _queued(person)}"
        answer = await person.request("PUT", f"{queued}/file", bytes(512), KIND)
        assert answer.status == 413 and answer.headers["retry-after"] == "5"
        await person.do("DELETE", queued)
        made = (await person.do("POST", f"/compute/v2.1/servers/{second}/action", image))["image_id"]

        async def again() -> bool | None:
            [row] = await cloud.read(sa.select(operations).where(operations.c.id == made))
            return True if row.leases > 1 else None

        await cloud.until(again, "the second image to be tried again")
        assert await _status(person, f"/image/v2/images/{made}") == "queued"
        await person.do("DELETE", f"/compute/v2.1/servers/{first}")

        async def complete() -> bool | None:
            return True if await _status(person, f"/image/v2/images/{made}") == "active" else None

        await cloud.until(complete, "the second image to be complete")


async def _status(person: Person, path: str, noun: str = "") -> str:
    found = await person.do("GET", path)
    return str((found[noun] if noun else found)["status"])
