"""A migration to a host that the request names is asked by a rule of its own, in the place of the usual one."""

from pathlib import Path

from tests.functional.cloud import Caller, Cloud, CloudOptions

POLICY_FILE = Path(__file__).with_name("named_hosts.yaml")
CLOUD = CloudOptions(
    hosts=3,
    settings={"default": {"allow_resize_to_same_host": False}},
    api={"api": {"policy_file": str(POLICY_FILE)}},
)


async def test_the_rule_of_named_hosts_alone_decides(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    path, where = f"/servers/{id}/action", await user.host_of(id)
    other = next(host for host in cloud.hosts if host != where)
    for body in ({"migrate": None}, {"migrate": {"host": None}}):
        assert "migrate" in await user.refused(403, "POST", path, body)
    await user.refused(403, "POST", path, {"os-migrateLive": {"host": None, "block_migration": "auto"}})
    await user.act(id, "os-migrateLive", {"host": other, "block_migration": "auto"})
    await cloud.settled()
    assert await user.host_of(id) == other
    await user.act(id, "migrate", {"host": where})
    await user.wait_for(id, "VERIFY_RESIZE")
    assert await user.host_of(id) == where
    # Who may migrate, but not name hosts.
    await user.admin.refused(403, "POST", path, {"os-migrateLive": {"host": other, "block_migration": "auto"}})
    await user.act(id, "confirmResize", status=204)
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
