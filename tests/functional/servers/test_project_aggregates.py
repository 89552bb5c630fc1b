"""Projects whose servers go only to hosts of their aggregates (limit_tenants_to_placement_aggregate)."""

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process

CLOUD = CloudOptions(hosts=2, settings={"scheduler": {"limit_tenants_to_placement_aggregate": True}})
pytestmark = only_in_one_process("a setting of all schedulers")


async def test_a_project_stays_in_its_aggregates_also_if_these_have_no_host(cloud: Cloud, user: Caller) -> None:
    first, second = cloud.hosts
    await user.boot()  # no aggregate names the project yet
    await cloud.delete_all()
    made = await user.admin.post("/os-aggregates", {"aggregate": {"name": user.project}}, 200)
    actions = f"/os-aggregates/{made['aggregate']['id']}/action"
    named = {"set_metadata": {"metadata": {"filter_tenant_id_3": user.project}}}
    await user.admin.post(actions, named, 200)
    empty = await user.wait_for(await user.create(), "ERROR")
    assert "no host is in an aggregate of the project" in empty["fault"]["message"]
    await user.admin.post(actions, {"add_host": {"host": first}}, 200)
    server = (await user.boot())["id"]
    assert await user.host_of(server) == first
    refused = await user.admin.wait_for(await user.admin.create(host=second), "ERROR")
    assert "the only possible host is not open to this project" in refused["fault"]["message"]
    live = {"os-migrateLive": {"host": second, "block_migration": "auto"}}
    await user.admin.post(f"/servers/{server}/action", live)
    await user.wait_for(server, "ACTIVE")
    assert await user.host_of(server) == first
    await user.admin.post(actions, {"remove_host": {"host": first}}, 200)
    left = await user.wait_for(await user.create(), "ERROR")
    assert "no host is in an aggregate of the project" in left["fault"]["message"]
