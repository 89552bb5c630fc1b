"""A cloud without retries of builds and with a default availability zone."""

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(
    hosts=2,
    settings={"scheduler": {"max_attempts": 1}},
    api={"default": {"default_schedule_zone": "west"}},
)


@only_in_one_process("a setting of all conductors and schedulers")
async def test_a_failure_is_not_tried_elsewhere(cloud: Cloud, user: Caller) -> None:
    rule = {"operation": "spawn", "kind": "fail", "name": user.project, "message": "no luck"}
    async with cloud.faults(rule):
        id = await user.create(name=user.project, availability_zone="nova")
        server = await user.wait_for(id, "ERROR")
    assert "no luck" in server["fault"]["message"]
    [action] = (await user.admin.get(f"/servers/{id}/os-instance-actions"))["instanceActions"]
    shown = (await user.admin.get(f"/servers/{id}/os-instance-actions/{action['request_id']}"))["instanceAction"]
    assert [event["result"] for event in shown["events"]] == ["Error"]
    await cloud.assert_clean()


async def test_the_default_zone(cloud: Cloud, user: Caller) -> None:
    admin, host = user.admin, cloud.hosts[0]
    nowhere = await user.wait_for(await user.create(), "ERROR")
    assert "not enough hosts" in nowhere["fault"]["message"]
    made = await admin.post("/os-aggregates", {"aggregate": {"name": "w", "availability_zone": "west"}}, 200)
    aggregate = f"/os-aggregates/{made['aggregate']['id']}"
    await admin.post(f"{aggregate}/action", {"add_host": {"host": host}}, 200)
    try:
        server = await user.boot()
        assert await user.host_of(server["id"]) == host
        assert (server["OS-EXT-AZ:availability_zone"], server["pinned_availability_zone"]) == ("west", "west")
        other = await user.boot(availability_zone="nova")
        assert await user.host_of(other["id"]) in cloud.hosts[1:]
        await cloud.delete_all()
    finally:
        await admin.post(f"{aggregate}/action", {"remove_host": {"host": host}}, 200)
        await admin.delete(aggregate, 200)
