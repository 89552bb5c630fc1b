"""A resize that nobody confirms is confirmed after `resize_confirm_window`."""

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

pytestmark = only_in_one_process("the conductor has settings of its own")
CLOUD = CloudOptions(
    hosts=2, settings={"default": {"resize_confirm_window": 0.3}, "conductor": {"sweep_interval": 0.1}}
)


async def test_a_resize_is_confirmed_by_itself(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot(flavorRef="2"))["id"]
    await user.act(id, "resize", {"flavorRef": "3"})
    await user.wait_for(id, "VERIFY_RESIZE")
    shown = await user.wait_for(id, "ACTIVE")
    assert shown["flavor"]["original_name"] == "m1.medium"
    [migration] = (await user.admin.get(f"/os-migrations?instance_uuid={id}"))["migrations"]
    assert migration["status"] == "confirmed"
    [action, *_] = (await user.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    assert (action["action"], action["user_id"]) == ("confirmResize", None)
    await cloud.assert_clean()
