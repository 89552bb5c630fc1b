"""Diagnostics of a server, in both formats."""

import pytest

from tests.functional.cloud import Caller, Cloud
from tests.schemas.tempest import check


async def test_the_format_before_2_48(user: Caller) -> None:
    id = (await user.boot(flavorRef="2"))["id"]
    answer = await user.admin.at(47).request("GET", f"/servers/{id}/diagnostics")
    check("servers", "show_server_diagnostics", 47, answer.status, answer.json())
    figures = answer.json()
    assert figures["memory"] == (await user.show(id))["flavor"]["ram"] * 1024
    assert {"cpu0_time", "vda_read", "vda_write_req", "vda_errors"} <= set(figures)
    assert all(isinstance(value, int) for value in figures.values())


@pytest.mark.parametrize("minor", [48, 104])
async def test_the_format_since_2_48(user: Caller, minor: int) -> None:
    id = (await user.boot(config_drive=True))["id"]
    answer = await user.admin.at(minor).request("GET", f"/servers/{id}/diagnostics")
    check("servers", "show_server_diagnostics", minor, answer.status, answer.json())
    figures = answer.json()
    assert (figures["state"], figures["hypervisor"], figures["config_drive"]) == ("running", "fake", True)
    assert (figures["num_cpus"], figures["num_disks"], figures["num_nics"]) == (1, 1, 0)
    assert figures["memory_details"]["maximum"] == 512
    assert "device" not in figures["disk_details"][0]


async def test_refusals(cloud: Cloud, user: Caller) -> None:
    id = (await user.boot())["id"]
    path = f"/servers/{id}/diagnostics"
    await user.refused(403, "GET", path)
    await user.admin.refused(404, "GET", "/servers/6f70656e-7374-4163-8b00-000000000000/diagnostics")
    await user.act(id, "os-stop")
    await user.wait_for(id, "SHUTOFF")
    assert "power_state" in await user.admin.refused(409, "GET", path)
