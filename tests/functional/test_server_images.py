"""Images of servers with real tokens: the services may do no more with them than they need.

The service user has no rights to images of users. What conductors and hosts do with an image, they do by tickets.
"""

from typing import Any

import pytest

from tests.functional.full_cloud import FullCloud, Person, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

C, G = "/compute/v2.1", "/image/v2"


async def _boot(cloud: FullCloud, person: Person, name: str) -> str:
    image = await person.make_image("base", "raw", bytes(512))
    fields: dict[str, Any] = {"name": name, "imageRef": image, "flavorRef": "1", "networks": "none"}
    server = str((await person.make(f"{C}/servers", "server", **fields))["id"])
    await _rests(cloud, person, server)
    return server


async def _rests(cloud: FullCloud, person: Person, server: str) -> None:
    async def probe() -> bool | None:
        shown = (await person.do("GET", f"{C}/servers/{server}"))["server"]
        return True if (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", None) else None

    await cloud.until(probe, f"{server} to be at rest")
    await cloud.settled()


async def _ask(person: Person, server: str, action: str, **fields: Any) -> str:
    wanted = {action: {"name": "i", **fields}}
    return str((await person.do("POST", f"{C}/servers/{server}/action", wanted))["image_id"])


async def _delete(cloud: FullCloud, person: Person, server: str) -> None:
    await person.do("DELETE", f"{C}/servers/{server}")

    async def gone() -> bool | None:
        return True if (await person.request("GET", f"{C}/servers/{server}")).status == 404 else None

    await cloud.until(gone, f"{server} to be gone")


async def _status(person: Person, image: str) -> str | None:
    answer = await person.request("GET", f"{G}/images/{image}")
    return str(answer.json()["status"]) if answer.status == 200 else None


async def test_a_member_makes_images(full_cloud: FullCloud) -> None:
    member = await full_cloud.person("member")
    server = await _boot(full_cloud, member, "imaged")
    made = [await _ask(member, server, "createImage")]
    await _rests(full_cloud, member, server)
    for _ in range(3):
        made.append(await _ask(member, server, "createBackup", backup_type="daily", rotation=1))
        await _rests(full_cloud, member, server)
    assert [await _status(member, image) for image in made] == ["active", None, None, "active"]
    names = []
    for path, noun in ((f"users/{member.user_id}", "user"), (f"projects/{member.project_id}", "project")):
        names.append((await full_cloud.admin.do("GET", f"/identity/v3/{path}"))[noun]["name"])
    shown = await member.do("GET", f"{G}/images/{made[0]}")
    assert [shown["owner_user_name"], shown["owner_project_name"]] == names
    assert set(shown["boot_roles"].split(",")) == {"member", "reader"}
    reader = await full_cloud.person("reader")
    for person, status in ((reader, 404), (full_cloud.anonymous, 401)):
        body = {"createImage": {"name": "i"}}
        assert (await person.request("POST", f"{C}/servers/{server}/action", body)).status == status
    await _delete(full_cloud, member, server)
    await full_cloud.assert_clean()


@pytest.mark.parametrize("step", ["snapshot", "upload"])
async def test_an_image_that_is_not_complete_is_deleted(full_cloud: FullCloud, step: str) -> None:
    member = await full_cloud.person("member")
    server = await _boot(full_cloud, member, f"{step}-fails")
    async with full_cloud.faults({"operation": step, "kind": "fail", "name": "-fails$"}):
        made = await _ask(member, server, "createImage")
        await _rests(full_cloud, member, server)
    assert await _status(member, made) is None
    async with full_cloud.faults({"operation": step, "kind": "hang", "name": "-fails$"}):
        made = await _ask(member, server, "createImage")
        await full_cloud.fault_struck()
        await _delete(full_cloud, member, server)
    await full_cloud.settled()
    assert await _status(member, made) is None
    await full_cloud.assert_clean()


async def test_an_image_by_an_admin_is_shared_with_the_project_of_the_server(full_cloud: FullCloud) -> None:
    member = await full_cloud.person("member")
    server = await _boot(full_cloud, member, "shared")
    made = await _ask(full_cloud.admin, server, "createImage")
    await _rests(full_cloud, member, server)
    shown = await member.do("GET", f"{G}/images/{made}")
    assert (shown["status"], shown["visibility"], shown["owner"]) == ("active", "shared", full_cloud.admin.project_id)
    await full_cloud.admin.do("DELETE", f"{G}/images/{made}")
    await _delete(full_cloud, member, server)


async def test_a_ticket_is_good_for_one_thing(full_cloud: FullCloud) -> None:
    """Tickets for downloads, uploads and conductors are not interchangeable, nor those of two images or hosts."""
    client = full_cloud.process.clients.image_client()
    assert client is not None
    member = await full_cloud.person("member")
    one = await member.make_image("one", "raw", bytes(512))
    fields = {"name": "two", "disk_format": "raw", "container_format": "bare"}
    two = str((await member.do("POST", f"{G}/images", fields))["id"])
    download = str(client.download_url(one)).partition("?")[2]
    upload = str(client.upload_url(two, "fake-1")).partition("?")[2]
    octets = {"content-type": "application/octet-stream"}
    nobody = full_cloud.anonymous

    async def tried(method: str, path: str, query: str) -> int:
        body = bytes(512) if method == "PUT" else None
        return (await nobody.request(method, f"{G}/images/{path}?{query}", body, octets)).status

    for query in (download, upload):
        assert await tried("GET", one, query) == 401
        assert await tried("DELETE", one, query) == 401
        assert await tried("PATCH", one, query) == 401
        assert await tried("PUT", f"{one}/file", query) == 401
    assert await tried("PUT", f"{two}/file", download.replace(one, two)) == 401
    assert await tried("PUT", f"{two}/file", upload.replace("host=fake-1", "host=fake-2")) == 401
    assert await tried("PUT", f"{two}/file", upload + "&disk_format=nonsense") == 400
    assert await tried("GET", f"{two}/file", upload) == 401
    assert await tried("GET", f"{one}/file", download) == 200
    assert await tried("PUT", f"{two}/file", upload + "&disk_format=iso&container_format=bare") == 400, "it is no CD"
    assert await tried("PUT", f"{two}/file", upload + "&disk_format=raw") == 204
    assert await tried("PUT", f"{two}/file", upload) == 409, "once"
    assert await _status(member, one) == await _status(member, two) == "active"
