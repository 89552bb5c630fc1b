"""Programs in guests that open the channel of the guest agent and never answer: other guests do not wait for them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from micronova.compute.host import SLOW_CALLS
from micronova.conf.libvirt import LibvirtSettings
from micronova.metadata.vendordata import VendorDataSource
from micronova.objects import power_state
from micronova.objects.clock import SystemClock
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.connection import LANES, Connection
from micronova.virt.libvirt.client.events import EventQueues, start_event_loop
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.guests import domains
from micronova.virt.libvirt.guests.graceful import GracefulPower
from micronova.virt.libvirt.storage.layout import Layout
from tests.unit.virt.libvirt.world import IMAGE, plan

libvirt = pytest.importorskip("libvirt")
WITH_AGENT = msgspec.structs.replace(IMAGE, properties={"hw_qemu_guest_agent": "yes"})
CHANNEL = "<channel><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>"


class Guests:
    """Guests as libvirt shows them. What asks an agent blocks until the test ends; nothing else does."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.requests: list[tuple[str, int]] = []

    def find(self, connection: Any, uuid: str, cloud: str) -> Any:
        return _Guest(self, uuid)


class _Guest:
    def __init__(self, guests: Guests, uuid: str) -> None:
        self._guests = guests
        self._uuid = uuid

    def XMLDesc(self, flags: int = 0) -> str:
        agent = CHANNEL if self._uuid.startswith("agent") else ""
        return f"<domain><devices>{agent}</devices></domain>"

    def agentSetResponseTimeout(self, timeout: int, flags: int = 0) -> int:
        return 0

    def setUserPassword(self, user: str, password: str, flags: int = 0) -> int:
        self._guests.answers.wait(30)
        return 0

    def injectNMI(self, flags: int = 0) -> int:
        self._guests.requests.append((self._uuid, flags))
        return 0

    def shutdownFlags(self, flags: int = 0) -> int:
        self._guests.requests.append((self._uuid, flags))
        agent = self._uuid.startswith("agent")
        if agent and (not flags or flags & libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT):
            self._guests.answers.wait(30)
        return 0


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guests]:
    made = Guests()
    monkeypatch.setattr(domains, "find_ours", made.find)
    yield made
    made.answers.set()


@pytest_asyncio.fixture
async def connection() -> AsyncIterator[Connection]:
    """A connection to a libvirt without a hypervisor."""
    start_event_loop()
    made = Connection(
        "test:///default",
        SystemClock(),
        on_event=lambda _: None,
        on_restored=lambda: None,
        on_failed=lambda _: None,
        timeout=5.0,
    )
    await made.open()
    yield made
    await made.close()


async def test_other_guests_do_not_wait_for_passwords(
    guests: Guests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_event_loop()
    driver = LibvirtDriver(
        "host-1",
        settings=LibvirtSettings(call_timeout=5.0),
        layout=Layout(tmp_path),
        uri="test:///default",
        daemon=None,
        cloud_id="cloud-1",
        clock=SystemClock(),
        vendor_data=VendorDataSource(),
    )
    asked = [
        asyncio.create_task(driver.set_admin_password(_plan(number), "secret")) for number in range(LANES["work"] + 2)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await driver.trigger_crash_dump("other")
    assert guests.requests == [("other", 0)]
    guests.answers.set()
    await asyncio.gather(*asked)


async def test_a_password_does_not_wait_for_guests_that_shut_down(
    guests: Guests, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for those of one project: its agent has as many threads as requests that the host makes at once."""
    assert min(LANES["agent"], LANES["memory"]) >= SLOW_CALLS
    monkeypatch.setattr(domains, "describe", lambda connection, uuid: _running(uuid))
    monkeypatch.setattr("micronova.virt.libvirt.guests.graceful.ASK_AGAIN", 0.01)
    monkeypatch.setattr("micronova.virt.libvirt.guests.graceful.POLL_INTERVAL", 0.01)
    graceful = GracefulPower(connection, EventQueues(), SystemClock(), "cloud-1")
    stops = [asyncio.create_task(graceful.shut_down(f"agent-{number}", 30)) for number in range(LANES["agent"] + 1)]
    by_agent = libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT
    async with asyncio.timeout(10):
        while sum(flags == by_agent for _, flags in guests.requests) < LANES["shutdown"]:
            await asyncio.sleep(0.01)
        assert await connection.change("other", lambda opened: "asked", "set a password", lane="agent") == "asked"
    guests.answers.set()
    for task in stops:
        task.cancel()
    await asyncio.gather(*stops, return_exceptions=True)


def _running(uuid: str) -> domains.DomainInfo:
    return domains.DomainInfo(uuid=uuid, owner=None, power=power_state.RUNNING, active=True)


async def test_a_guest_that_shuts_down_does_not_wait_for_its_agent(
    guests: Guests, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = domains.DomainInfo(uuid="agent-1", owner=None, power=power_state.RUNNING, active=True)
    monkeypatch.setattr(domains, "describe", lambda *_: info)
    monkeypatch.setattr("micronova.virt.libvirt.guests.graceful.ASK_AGAIN", 0.01)
    monkeypatch.setattr("micronova.virt.libvirt.guests.graceful.POLL_INTERVAL", 0.01)
    graceful = GracefulPower(connection, EventQueues(), SystemClock(), "cloud-1")
    async with asyncio.timeout(2):
        assert await graceful.shut_down("agent-1", 0.2) is False
    flags = [flags for _, flags in guests.requests]
    assert flags[0] == libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN
    assert flags.count(libvirt.VIR_DOMAIN_SHUTDOWN_GUEST_AGENT) == 1


async def test_a_guest_without_an_agent_is_asked_as_libvirt_knows_best(
    guests: Guests, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = domains.DomainInfo(uuid="plain", owner=None, power=power_state.RUNNING, active=True)
    monkeypatch.setattr(domains, "describe", lambda *_: info)
    graceful = GracefulPower(connection, EventQueues(), SystemClock(), "cloud-1")
    assert await graceful.shut_down("plain", 0.05) is False
    assert guests.requests == [("plain", 0)]


async def test_the_connection_of_slow_calls_is_made_again_with_the_first_one(connection: Connection) -> None:
    async def used(lane: Any) -> Any:
        return await connection.change("a", lambda opened: opened, "look", lane=lane)

    work, agent = await used("work"), await used("agent")
    assert work is not agent and await used("freeze") is agent
    connection._lost(connection._generation, "test")
    assert await used("agent") is not agent


def _plan(number: int) -> GuestPlan:
    return plan(uuid=f"agent-{number}", image=WITH_AGENT)
