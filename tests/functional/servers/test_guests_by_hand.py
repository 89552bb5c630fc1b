"""Guests that change without having been asked to, and hosts whose hypervisor cannot do everything."""

from pathlib import Path

import pytest

from micronova.virt.fake.driver import FakeDriver
from tests.functional.cloud import Caller, OneProcess, Wanted
from tests.functional.servers.mortal import MortalHost

CLOUD = Wanted(hosts=2)


async def test_what_is_done_to_a_guest_by_hand_is_seen_at_once(cloud: OneProcess, user: Caller, tmp_path: Path):
    host = MortalHost(cloud, "by-hand", tmp_path)
    await host.start()
    id = (await user.admin.boot(availability_zone="nova:by-hand"))["id"]
    for event, status, power in (
        ("paused", "PAUSED", 3), ("resumed", "ACTIVE", 1), ("suspended", "SUSPENDED", 7), ("resumed", "ACTIVE", 1),
        ("paused", "PAUSED", 3), ("stopped", "SHUTOFF", 4), ("started", "ACTIVE", 1), ("crashed", "SHUTOFF", 6),
    ):  # fmt: skip
        host.driver.guest_becomes(id, event)
        server = await user.wait_for(id, status)
        assert server["OS-EXT-STS:power_state"] == power
    await cloud.assert_clean()
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await host.stop()


@pytest.mark.parametrize("there", ["pause", "suspend"])
async def test_a_host_that_cannot_says_so_before(
    cloud: OneProcess, user: Caller, there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    able = FakeDriver.capabilities
    monkeypatch.setattr(FakeDriver, "capabilities", lambda driver: able(driver) - {there})
    host = MortalHost(cloud, f"plain-{there}", tmp_path)
    await host.start()
    try:
        id = (await user.admin.boot(availability_zone=f"nova:plain-{there}"))["id"]
        message = await user.refused(501, "POST", f"/servers/{id}/action", {there: None})
        assert id in message and "not able" in message
        shown = await user.show(id)
        assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", None)
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    finally:
        await host.stop()
