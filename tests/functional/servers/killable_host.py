"""A compute host that a test can kill, in addition to the hosts of a cloud in one process."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from micronova.compute.manager import ComputeManager
from micronova.conductor.rpcapi import HostConductorAPI
from micronova.rpc.bus import Bus, connect
from micronova.virt.loader import DriverSetup, create_drivers
from tests.compute_settings import compute_settings
from tests.functional.cloud import OneProcess


class KillableHost:
    """An agent with its own bus connection; its guests are kept in a file, so a new agent finds them."""

    def __init__(self, cloud: OneProcess, name: str, directory: Path, **options: Any) -> None:
        self.name = name
        self._cloud = cloud
        self._directory = directory
        self._options = options
        self._bus: Bus | None = None
        self._manager: ComputeManager | None = None
        self.driver: Any = None

    async def start(self, *rules: dict[str, Any]) -> None:
        """Start the agent with these fault rules; return when the cloud lists the host as up."""
        await self.start_unheard(*rules)
        await self._wait_for_state("up")

    async def start_unheard(self, *rules: dict[str, Any]) -> None:
        """Start the agent; a host that is forced down is not listed as up."""
        process = self._cloud.process
        setup = DriverSetup(
            host=self.name,
            cloud_id=process.keys.cloud_id,
            clock=process.clock,
            random=Random(3),
            state_dir=self._directory,
            options=self._options,
            images=process.clients.image_downloads(),
        )
        drivers = create_drivers("fake", setup)
        [self.driver] = drivers.values()
        self.driver.set_fault_rules(list(rules))
        url = f"local://{process.keys.cloud_id}"
        self._bus = connect(url, clock=process.clock, random=Random(3), name=self.name, grace=0.0)
        await self._bus.start()
        default = process.settings.default
        settings = compute_settings(
            report_interval=default.report_interval,
            shutdown_grace=0.1,
            boot_timeout=process.settings.compute.boot_timeout,
            resume_guests_state_on_host_boot=bool(default.resume_guests_state_on_host_boot),
        )
        self._manager = ComputeManager(
            settings,
            drivers,
            self._bus,
            HostConductorAPI(self._bus, process.clock, Random(3)),
            process.clock,
            Random(3),
            uploads=process.clients.image_uploads(),
        )
        await self._manager.start()

    async def kill(self) -> None:
        """End the agent as kill -9 does: nothing of it continues, it sends no message, its guests stay as they are."""
        manager, self._manager = self._manager, None
        assert manager is not None and self._bus is not None
        for agent in manager._agents.values():
            agent.refuse_orders()
        for loop in manager._loops:
            loop.cancel()
        self.driver.destroy = _never  # a killed agent undoes nothing
        tasks = [task for agent in manager._agents.values() for task in agent.tasks()]
        for _ in range(2):  # the first time may only start an undo, which the second ends
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await self._bus.stop()

    async def stop(self) -> None:
        """Stop the agent."""
        if self._manager is not None:
            assert self._bus is not None
            await self._manager.stop()
            await self._bus.stop()
            self._manager = None

    def lose_hypervisor(self, message: str) -> None:
        """Let the driver report that its hypervisor cannot be reached."""
        assert self._manager is not None
        [agent] = self._manager._agents.values()
        agent.host.connection_failed(message)

    async def wait_until_down(self) -> None:
        """Wait until the cloud lists the host as down."""
        await self._wait_for_state("down")

    async def has_guest(self, uuid: str) -> bool:
        """Return whether the hypervisor has a guest."""
        return await self.driver.info(uuid) is not None

    async def guest_removed(self, uuid: str) -> None:
        """Wait until the hypervisor has no such guest."""

        async def probe() -> bool | None:
            return None if await self.has_guest(uuid) else True

        await self._cloud.until(probe, f"{self.name} to remove the guest of {uuid}")

    async def _wait_for_state(self, state: str) -> None:
        admin = self._cloud.caller().admin

        async def probe() -> bool | None:
            found = (await admin.get(f"/os-services?binary=nova-compute&host={self.name}"))["services"]
            return True if found and found[0]["state"] == state else None

        await self._cloud.until(probe, f"{self.name} to be {state}")


@pytest_asyncio.fixture(loop_scope="module")
async def killable_host(cloud: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KillableHost]:
    """A host with so many resources that the scheduler prefers it for every server."""
    name = f"killable_host-{uuid.uuid4().hex[:6]}"
    host = KillableHost(cloud, name, tmp_path_factory.mktemp(name), memory_mb=1 << 24, vcpus=4096, local_gb=1 << 20)
    yield host
    await cloud.delete_all()
    await host.stop()


async def _never(*_: Any) -> None:
    await asyncio.get_running_loop().create_future()
