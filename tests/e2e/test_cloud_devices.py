"""What a running guest has: IPv6, interfaces that come and go, figures, and consoles for programs."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud
from tests.e2e.guests import READY, TIMEOUT, Guest, until
from tests.functional.consoles import token_of
from tests.osc import OpenStackClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud) -> AsyncIterator[Guest]:
    tenant = await cloud.tenant("10.82.0.0/24")
    await tenant.add_ipv6("fd00:82::/64")
    try:
        made = await tenant.boot("dora")
        await made.ready()
        yield made
    finally:
        await tenant.clear()
    assert cloud.guest_leftovers() == []


async def test_an_ipv6_address_by_advertisement(guest: Guest) -> None:
    [address] = [each["ip_address"] for each in (await guest.port())["fixed_ips"] if ":" in each["ip_address"]]

    async def has_it() -> bool:
        return address in await guest.ssh("ip -6 address show dev eth0 scope global")

    async def reaches_its_router() -> bool:  # once the guest has found out that nobody else has the address
        return "1 packets received" in await guest.ssh("ping -6 -c 1 -W 5 fd00:82::1", check=False)

    await until(has_it, f"the guest to have {address}")
    await until(reaches_its_router, "the guest to reach its router by IPv6")


async def test_an_interface_comes_and_goes(guest: Guest) -> None:
    person = guest.tenant.person
    network = await person.make("/network/v2.0/networks", "network", name="second")
    await person.make("/network/v2.0/subnets", "subnet", network_id=network["id"], ip_version=4, cidr="10.83.0.0/24")
    made = await person.make(f"{guest.path}/os-interface", "interfaceAttachment", net_id=network["id"])
    [address] = [each["ip_address"] for each in made["fixed_ips"]]
    await guest.shows(f"MICRONOVA-GUEST-DEVICE added=eth1 ip={address}")
    assert made["mac_addr"] in await guest.ssh("cat /sys/class/net/eth1/address")
    assert {"net", "second"} == set((await guest.show())["addresses"])

    await person.do("DELETE", f"{guest.path}/os-interface/{made['port_id']}")
    await guest.shows("MICRONOVA-GUEST-DEVICE removed=eth1")

    async def gone() -> bool:
        return set((await guest.show())["addresses"]) == {"net"}

    await until(gone, "the address to be gone")
    assert (await person.request("GET", f"/network/v2.0/ports/{made['port_id']}")).status == 404
    assert await guest.answers_ping(), "the other interface is as it was"


async def test_a_serial_console_for_a_program(cloud: RealCloud, guest: Guest) -> None:
    token = token_of(await guest.console("serial", "serial"))
    url = f"{cloud.url}/console/websockify"
    seen = b""
    async with aiohttp.ClientSession() as client:
        async with client.ws_connect(url, params={"token": token}, protocols=["binary"]) as socket:
            await socket.send_bytes(b"\necho $((6 * 9))-is-not\n")
            async with asyncio.timeout(TIMEOUT):
                while b"54-is-not" not in seen:
                    seen += await socket.receive_bytes()
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await client.ws_connect(url, params={"token": "0" * len(token)}, protocols=["binary"])


async def test_diagnostics(guest: Guest) -> None:
    figures = await guest.tenant.cloud.admin.do("GET", f"{guest.path}/diagnostics")
    assert (figures["state"], figures["driver"], figures["num_cpus"]) == ("running", "libvirt", 1)
    assert figures["memory_details"]["maximum"] == 128
    assert figures["nic_details"][0]["rx_packets"] > 0


async def test_the_openstack_client_shows_the_console(cloud: RealCloud, guest: Guest) -> None:
    client = OpenStackClient(cloud.directory / "clouds.yaml")
    try:
        log = await asyncio.to_thread(client, "console log show", guest.id)
        url = (await asyncio.to_thread(client.json, "console url show", "--novnc", guest.id))["url"]
    finally:
        client.close()
    assert f"{READY} hostname=dora" in log
    assert url.startswith(f"{cloud.url}/console/")
