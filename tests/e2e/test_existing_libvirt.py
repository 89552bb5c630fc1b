"""`micronova up` with an existing libvirt: its guests have all that those of a private one have."""

import asyncio
import os
import pwd
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.command import refused
from tests.e2e.cloud import nothing, real_cloud
from tests.e2e.existing_libvirt import DistributionLibvirt, GuestCloud
from tests.e2e.guest_view import process_of, reach
from tests.e2e.guests import TIMEOUT, Guest, until
from tests.e2e.test_cloud_restart import kill
from tests.functional.consoles import token_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="module")
def libvirt(can_run_guests: None) -> Iterator[DistributionLibvirt]:
    made = DistributionLibvirt()
    try:
        made.start()
        before = made.foreign_life()
        yield made
        assert made.foreign_life() == before, "the guest made by hand was touched"
        assert made.guests() == {} and made.pools() == []
    finally:
        made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cloud(libvirt: DistributionLibvirt) -> AsyncIterator[GuestCloud]:
    async with real_cloud(GuestCloud(libvirt)) as made:
        assert isinstance(made, GuestCloud)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: GuestCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.86.0.0/24")
    try:
        made = await tenant.boot("gerda")
        said = await made.ready()
        assert (said["hostname"], said["source"]) == ("gerda", "metadata")
        yield made
    finally:
        await tenant.clear()


def _taps(*where: str) -> set[str]:
    shown = subprocess.run(["ip", *where, "-o", "link"], check=True, capture_output=True, text=True).stdout
    return {name for line in shown.splitlines() if (name := line.split(":")[1].strip()).startswith("tap")}


async def test_its_tap_is_in_the_clouds_namespace_and_its_files_are_the_clouds(
    libvirt: DistributionLibvirt, cloud: GuestCloud, guest: Guest
) -> None:
    tap = f"tap{(await guest.port())['id'][:11]}"
    assert tap in _taps("-n", cloud.prefix) and tap not in _taps()
    assert libvirt.tap in _taps()
    assert (await guest.ssh("hostname")).strip() == "gerda"
    owner = pwd.getpwnam("micronova-agent").pw_uid
    files = [*(cloud.libvirt / "base").iterdir(), cloud.libvirt / "instances" / guest.id / "disk"]
    for file in files:
        assert file.stat().st_uid == owner, file
    # Guests do not pass through the cloud's directory, and its owner cannot replace theirs.
    assert stat.S_IMODE(cloud.directory.stat().st_mode) == 0o700
    assert cloud.libvirt.parent.stat().st_uid == 0


async def test_each_guest_has_a_user_of_its_own_who_reaches_its_own_files_only(cloud: GuestCloud, guest: Guest) -> None:
    other = await guest.tenant.boot("greta", networks="none")
    await other.wait("ACTIVE")
    mine, theirs = process_of(guest.id), process_of(other.id)
    assert mine.uid != theirs.uid and mine.status["Groups"] == str(mine.gid) == str(mine.uid)
    folder = cloud.libvirt / "instances" / guest.id
    assert reach(mine, str(cloud.directory), str(cloud.libvirt)) == {
        str(folder / "disk"): {"read", "write"},
        str(folder / "disk.base"): {"read"},
    }
    await other.delete()


async def test_consoles(cloud: GuestCloud, guest: Guest) -> None:
    for protocol, kind, said, answer in (
        ("serial", "serial", b"\necho $((6 * 9))-is-not\n", b"54-is-not"),
        ("vnc", "novnc", b"", b"RFB 003.008"),
    ):
        token = token_of(await guest.console(protocol, kind))
        seen = b""
        async with aiohttp.ClientSession() as client, asyncio.timeout(TIMEOUT):
            url = f"{cloud.url}/console/websockify"
            async with client.ws_connect(url, params={"token": token}, protocols=["binary"]) as socket:
                await socket.send_bytes(said)
                while answer not in seen:
                    seen += await socket.receive_bytes()


async def test_an_interface_comes_and_goes(cloud: GuestCloud, guest: Guest) -> None:
    person = guest.tenant.person
    network = await person.make("/network/v2.0/networks", "network", name="second")
    await person.make("/network/v2.0/subnets", "subnet", network_id=network["id"], ip_version=4, cidr="10.87.0.0/24")
    made = await person.make(f"{guest.path}/os-interface", "interfaceAttachment", net_id=network["id"])
    await guest.shows(f"MICRONOVA-GUEST-DEVICE added=eth1 ip={made['fixed_ips'][0]['ip_address']}")
    assert len(_taps("-n", cloud.prefix)) == 2
    await person.do("DELETE", f"{guest.path}/os-interface/{made['port_id']}")
    await guest.shows("MICRONOVA-GUEST-DEVICE removed=eth1")
    assert await guest.answers_ping(), "the other interface is as it was"


async def test_its_wire_is_there_again_after_a_suspension_and_a_hard_reboot(
    libvirt: DistributionLibvirt, guest: Guest
) -> None:
    life = await guest.ssh("cat /proc/sys/kernel/random/boot_id")
    await asyncio.to_thread(libvirt.restart)
    assert await guest.answers_ping(), "libvirt's restart is nothing to a guest"
    await guest.act("suspend", status="SUSPENDED")
    await guest.act("resume", status="ACTIVE")
    assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") == life
    await guest.act("reboot", {"type": "HARD"}, status="ACTIVE")
    assert await guest.ssh("cat /proc/sys/kernel/random/boot_id") != life


async def test_down_switches_it_off_even_if_its_cloud_was_killed_and_the_next_start_finds_it(
    libvirt: DistributionLibvirt, cloud: GuestCloud, guest: Guest
) -> None:
    await kill(cloud)
    assert libvirt.guests() == {guest.id: True}
    await cloud.down()
    assert libvirt.guests() == {guest.id: False}
    nothing("of the cloud", cloud.leftovers())
    await cloud.up()

    async def runs() -> bool:
        return libvirt.guests() == {guest.id: True}

    await until(runs, "the guest to be started again, because it ran before")
    await guest.wait("ACTIVE")
    other = await guest.tenant.boot("hanna")
    await other.wait("ACTIVE")
    assert len(_taps("-n", cloud.prefix)) == 2, "both are wired, and stand on one cached image"
    assert len(list((cloud.libvirt / "base").iterdir())) == 1


async def test_what_cannot_be_is_said_in_one_line(libvirt: DistributionLibvirt, tmp_path: Path) -> None:
    def said(uri: str, directory: Path = libvirt.folder / "other") -> str:
        config = tmp_path / "c.toml"
        config.write_text(f'[libvirt]\nconnection_uri = "{uri}"\n')
        return refused("up", "--driver", "libvirt", "--port", "0", "--dir", directory, "--config", config)

    closed = libvirt.folder / "closed"
    closed.mkdir(mode=0o700)
    assert f"users of their own, who cannot pass {closed}: " in said(libvirt.uri, closed / "c")
    nowhere = f"qemu+unix:///system?socket={tmp_path}/none"
    assert f"No libvirt answers at {nowhere}" in said(nowhere)
    assert "names the machine elsewhere" in said("qemu+ssh://elsewhere/system")
    assert not (libvirt.folder / "other").exists() and os.geteuid() == 0
