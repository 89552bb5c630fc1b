"""Hosts that give every guest a config drive."""

from tests.functional.cloud import Caller, CloudOptions, only_in_one_process

pytestmark = only_in_one_process("hosts with a setting of their own")
CLOUD = CloudOptions(hosts=2, settings={"libvirt": {"force_config_drive": True}})


async def test_a_drive_that_the_host_forces_is_shown_once_the_guest_is_built(user: Caller) -> None:
    accepted = await user.create()
    server = await user.wait_for(accepted, "ACTIVE")
    assert server["config_drive"] == "True"
    listed = await user.get("/servers/detail?config_drive=true")
    assert [each["id"] for each in listed["servers"]] == [accepted]
    figures = await user.admin.at(48).get(f"/servers/{accepted}/diagnostics")
    assert figures["config_drive"] is True
