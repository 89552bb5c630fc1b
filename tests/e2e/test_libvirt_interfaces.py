"""Interfaces of a real guest: confirmed before it runs, plugged and unplugged while it does."""

import asyncio

import pytest

from micronova.objects import power_state
from micronova.objects.errors import BuildAborted
from micronova.objects.network import VIF
from tests.e2e.host import Host, console

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def vif(number: int) -> VIF:
    return VIF(
        port_id=f"e2e{number:05x}-1111-4222-8333-444444444444",
        network_id="net",
        network_label="net",
        mac_address=f"fa:16:3e:e2:e0:{number:02x}",
        vif_type="bridge",
        mtu=1400,
        details={"bridge_name": "brqe2e"},
    )


def tap(vif: VIF) -> str:
    return f"tap{vif.port_id[:11]}"


async def test_interfaces(host: Host) -> None:
    first, second = vif(1), vif(2)
    seen: list[tuple[str, int | None]] = []

    async with host.agent() as (driver, _):

        async def plugged() -> None:
            """Do what the network's agent does: join the tap, which is there, to the bridge."""
            for each in host.taps():
                host.ip("link", "set", each, "master", host.bridge)
            guest = await driver._connection.read(lambda connection: connection.lookupByUUIDString(uuid).state(0)[0])
            seen.append((" ".join(sorted(host.taps())), guest))

        plan = host.plan(vifs=(first,), plugged=plugged, config_drive=True)
        uuid = plan.instance.uuid
        await driver.spawn(plan)
        paused = 3
        assert seen == [(tap(first), paused)]
        assert f"{host.bridge}" in host.ip("-o", "link", "show", tap(first))
        assert "mtu 1400" in host.ip("-o", "link", "show", tap(first))
        await console(driver, uuid, "MICRONOVA-GUEST-READY")

        await driver.attach_interface(plan, second)
        await driver.attach_interface(plan, second)
        assert sorted(host.taps()) == sorted([tap(first), tap(second)])
        figures = await driver.get_diagnostics(uuid)
        assert [nic.mac_address for nic in figures.nic_details] == [first.mac_address, second.mac_address]
        await driver.detach_interface(uuid, second)
        await driver.detach_interface(uuid, second)
        assert host.taps() == [tap(first)]

        # A guest that does not run can have one, too: for its next start.
        await driver.power_off(uuid, 0)
        assert host.taps() == []
        await driver.attach_interface(plan, second)
        await driver.detach_interface(uuid, second)
        await driver.power_on(plan)
        assert host.taps() == [tap(first)]
        await driver.destroy(uuid)
    assert host.leftovers() == []


async def test_a_guest_does_not_run_unless_the_network_confirms(host: Host) -> None:
    async def refuse() -> None:
        raise BuildAborted("The network did not plug the port.")

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    async with host.agent() as (driver, events):
        plan = host.plan(vifs=(vif(1),), plugged=refuse)
        uuid = plan.instance.uuid
        with pytest.raises(BuildAborted):
            await driver.spawn(plan)
        guest = await driver.info(uuid)
        assert guest is not None and guest.power_state == power_state.NOSTATE
        await driver.destroy(uuid)

        plan = host.plan(vifs=(vif(1),), plugged=never)
        uuid = plan.instance.uuid
        build = asyncio.create_task(driver.spawn(plan))
        async with asyncio.timeout(60):
            while not host.taps():
                await asyncio.sleep(0.02)
        build.cancel()
        await asyncio.gather(build, return_exceptions=True)
        await driver.destroy(uuid)
        assert events.of(uuid) == []
    assert host.leftovers() == []
