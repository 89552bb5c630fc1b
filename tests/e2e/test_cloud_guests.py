"""Two tenants with the same addresses, one guest each, from boot to deletion, on a whole cloud."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud, script
from tests.e2e.guests import Guest, Tenant, run, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

SHARED, HER_SECOND, HIS_SECOND = "10.77.0.10", "10.77.0.30", "10.77.0.20"
METADATA = "http://169.254.169.254"


@dataclass
class World:
    cloud: RealCloud
    alice: Guest
    """Reads the metadata service."""
    bob: Guest
    """Has a config drive."""


async def _boot(tenant: Tenant, name: str, second: str, *, config_drive: bool) -> Guest:
    port = await tenant.person.make(
        "/network/v2.0/ports", "port", network_id=tenant.network["id"], fixed_ips=[{"ip_address": SHARED}],
        allowed_address_pairs=[{"ip_address": second}],
    )  # fmt: skip
    return await tenant.boot(
        name, networks=[{"port": port["id"]}], config_drive=config_drive, metadata={"colour": f"{name}-blue"},
        user_data=script(f"echo mark-of-{name} on $(hostname) >/dev/console"),
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(cloud: RealCloud) -> AsyncIterator[World]:
    hers, his = await cloud.tenant(), await cloud.tenant()
    try:
        alice, bob = await asyncio.gather(
            _boot(hers, "alice", HER_SECOND, config_drive=False), _boot(his, "bob", HIS_SECOND, config_drive=True)
        )
        yield World(cloud, alice, bob)
    finally:
        await asyncio.gather(hers.clear(), his.clear())
    assert cloud.guest_leftovers() == []


async def test_guests_boot_with_what_they_were_given(world: World) -> None:
    for guest, source in ((world.alice, "metadata"), (world.bob, "config-drive")):
        await guest.wait("ACTIVE")
        said = await guest.ready()
        assert said == {"hostname": guest.name, "ip": SHARED, "ip6": "", "source": source, "uuid": guest.id}
        log = await guest.shows(f"mark-of-{guest.name} on {guest.name}")
        assert "MICRONOVA-GUEST-USER-DATA exit=0" in await guest.shows("USER-DATA exit"), log
        assert await guest.ssh("hostname") == f"{guest.name}\n"
        # By DHCP: the lease, and a route to the metadata service that it brought.
        assert f"inet {SHARED}/24" in await guest.ssh("ip address show dev eth0")
        assert "169.254.169.254" in await guest.ssh("ip route")


async def test_the_user_command_reaches_a_guest(world: World) -> None:
    address = await world.alice.floating_ip()
    way = f"{sys.executable} -m micronova.cli.main connect %h %p --dir {world.cloud.directory}"
    options = (*world.alice.tenant.ssh_options, "-o", f"ProxyCommand={way}")
    done = await run("ssh", *options, f"root@{address}", "hostname")
    assert (done.returncode, done.stdout) == (0, "alice\n"), done


async def test_metadata_from_inside(world: World) -> None:
    guest = world.alice
    document = json.loads(await guest.ssh(f"wget -q -O - {METADATA}/openstack/latest/meta_data.json"))
    assert (document["uuid"], document["name"], document["meta"]) == (guest.id, "alice", {"colour": "alice-blue"})
    assert document["public_keys"]["key"].split()[:2] == guest.tenant.key.with_suffix(".pub").read_text().split()[:2]
    network = json.loads(await guest.ssh(f"wget -q -O - {METADATA}/openstack/latest/network_data.json"))
    port = await guest.port()
    assert network["links"][0]["ethernet_mac_address"] == port["mac_address"]
    assert "mark-of-alice" in await guest.ssh(f"wget -q -O - {METADATA}/openstack/latest/user_data")
    ec2 = f"{METADATA}/latest/meta-data"
    assert await guest.ssh(f"wget -q -O - {ec2}/local-ipv4") == SHARED
    assert (await guest.ssh(f"wget -q -O - {ec2}/hostname")).startswith("alice")
    assert "public-keys/" in (await guest.ssh(f"wget -q -O - {ec2}/")).splitlines()
    assert "latest" in (await guest.ssh(f"wget -q -O - {METADATA}/")).splitlines()


async def test_config_drive_says_the_same(world: World) -> None:
    guest = world.bob
    drive = json.loads(await guest.ssh("cat /mnt/config/openstack/latest/meta_data.json"))
    service = json.loads(await guest.ssh(f"wget -q -O - {METADATA}/openstack/latest/meta_data.json"))
    assert drive["uuid"] == guest.id and drive["meta"] == {"colour": "bob-blue"}
    # A seed for randomness is new each time; the password is only told once.
    for each in (drive, service):
        each.pop("random_seed", None)
        each.pop("admin_pass", None)
    assert drive == service


async def test_tenants_with_the_same_addresses_do_not_see_each_other(world: World) -> None:
    alice, bob = world.alice, world.bob
    for guest, own, other in ((alice, HER_SECOND, HIS_SECOND), (bob, HIS_SECOND, HER_SECOND)):
        await guest.ssh(f"ip address replace {own}/24 dev eth0")
        assert "1 packets received" in await guest.ssh("ping -c 1 -W 5 10.77.0.1"), "its own router answers"
        assert "0 packets received" in await guest.ssh(f"ping -c 2 -W 1 {other}", check=False)
        assert "no" in await guest.ssh(f"nc -w 2 {other} 22 </dev/null && echo yes || echo no")
    # One address, two guests: each is told its own data, whatever it claims to be.
    for guest, claims in ((alice, bob), (bob, alice)):
        headers = " ".join(
            f"--header '{name}: {value}'"
            for name, value in (
                ("X-Instance-ID", claims.id),
                ("x-instance-id", claims.id),
                ("X-Tenant-ID", claims.tenant.person.project_id),
                ("X-Forwarded-For", HIS_SECOND),
                ("X-Instance-ID-Signature", "0" * 64),
            )
        )
        for spoofed in ("", headers):
            text = await guest.ssh(f"wget -q -O - {spoofed} {METADATA}/openstack/latest/meta_data.json")
            assert json.loads(text)["uuid"] == guest.id


async def test_a_security_group_opens_and_closes_a_port_of_a_running_guest(world: World) -> None:
    guest = world.alice
    await guest.floating_ip()

    async def opened() -> bool:
        return "alice" in await guest.answers_http()

    async def closed() -> bool:
        return not await guest.answers_http()

    assert await closed()
    rule = await guest.tenant.allow(protocol="tcp", port_range_min=80, port_range_max=80)
    await until(opened, "port 80 to be open")
    await guest.tenant.forbid(rule)
    await until(closed, "port 80 to be closed")
    assert await guest.answers_ping(), "what was open stays so"


async def test_floating_ip(world: World) -> None:
    guest = world.bob
    address = await guest.floating_ip()
    assert await guest.answers_ping()
    server = await guest.show()
    [addresses] = server["addresses"].values()
    assert address in {each["addr"] for each in addresses if each["OS-EXT-IPS:type"] == "floating"}
    # From inside, the world is reached as that address.
    assert "1 packets received" in await guest.ssh("ping -c 1 -W 5 203.0.113.1")
    await guest.release_floating_ip()

    async def unreachable() -> bool:
        return (await guest.outside("ping", "-c", "1", "-W", "1", address)).returncode != 0

    await until(unreachable, "the floating IP to lead nowhere")
    await guest.floating_ip()
    await until(guest.answers_ping, "the floating IP to lead to the guest again")
