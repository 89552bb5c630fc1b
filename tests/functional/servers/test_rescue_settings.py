"""Settings of a rescue: the image for requests that name none, and the timeout; passwords that are not shown."""

from collections.abc import Iterator

import pytest

from micronova.conductor import rescue_timeout
from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image

pytestmark = only_in_one_process("has settings of its own")

TOOLS = "7c0ffee0-0000-4000-8000-000000000001"
CLOUD = CloudOptions(
    hosts=2,
    roles=("image",),
    settings={
        "default": {"rescue_timeout": 2.0},
        "api": {"enable_instance_password": False},
        "libvirt": {"rescue_image_id": TOOLS},
    },
)


@pytest.fixture(autouse=True, scope="module")
def often() -> Iterator[None]:
    """Look for overdue servers more often than a real cloud does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescue_timeout, "INTERVAL", 0.2)
        yield


async def test_the_operators_image_and_the_timeout(cloud: Cloud, user: Caller) -> None:
    created = (await user.post("/servers", user.body(imageRef=await image(user))))["server"]
    assert "adminPass" not in created
    id = created["id"]
    await user.wait_for(id, "ACTIVE")
    body = {"rescue": None}
    assert TOOLS in await user.refused(400, "POST", f"/servers/{id}/action", body), "the operator has removed it"
    # The user cannot see it.
    assert await image(cloud.caller().admin, id=TOOLS, name="tools", visibility="private") == TOOLS
    assert await user.act(id, "rescue", None, 200) == {}
    await user.wait_for(id, "RESCUE")
    assert "image tools" in (await user.act(id, "os-getConsoleOutput", {}, 200))["output"]
    await user.act(id, "lock")
    await user.wait_for(id, "ACTIVE")  # by itself, whoever has locked it
    await user.act(id, "unlock")
    _, last, *_ = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (last["action"], last["user_id"], last["message"]) == ("unrescue", None, None)
    await cloud.assert_clean()


async def test_no_answer_shows_a_password(cloud: Cloud, user: Caller) -> None:
    """Those of create and rescue are above."""
    own = await image(user)
    id = (await user.boot(imageRef=own))["id"]
    for version in (1, 104):
        answer = await user.at(version).request("POST", f"/servers/{id}/action", {"rebuild": {"imageRef": own}})
        assert answer.status == 202
        assert answer.json()["server"]["id"] == id
        assert "adminPass" not in answer.json()["server"]
        await user.wait_for(id, "ACTIVE")
    host = await user.host_of(id)
    async with cloud.forced_down(host):
        body = {"evacuate": {"onSharedStorage": False, "adminPass": "known"}}
        answer = await user.admin.at(13).request("POST", f"/servers/{id}/action", body)
        assert (answer.status, answer.body) == (200, b"")
        await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
