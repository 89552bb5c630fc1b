"""A compute host that can be killed, beside those of a cloud in one process."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from micronova.compute.manager import ComputeManager
from micronova.compute.settings import ComputeSettings
from micronova.rpc.bus import Bus, connect
from micronova.virt.loader import DriverSetup, create_drivers
from tests.functional.cloud import OneProcess


class MortalHost:
    """An agent on a bus connection of its own; its guests are in a file and outlive it."""

    def __init__(self, cloud: OneProcess, name: str, directory: Path, **options: Any) -> None:
        self.name = name
        self._cloud = cloud
        self._directory = directory
        self._options = options
        self._bus: Bus | None = None
        self._manager: ComputeManager | None = None
        self.driver: Any = None

    async def start(self, *rules: dict[str, Any]) -> None:
        """Begin, or come back, with these fault rules; returns when the cloud knows that it is up."""
        process = self._cloud.process
        setup = DriverSetup(
            host=self.name,
            cloud_id=process.keys.cloud_id,
            clock=process.clock,
            random=Random(3),
            state_dir=self._directory,
            options=self._options,
        )
        drivers = create_drivers("fake", setup)
        [self.driver] = drivers.values()
        self.driver.set_fault_rules(list(rules))
        url = f"local://{process.keys.cloud_id}"
        self._bus = connect(url, clock=process.clock, random=Random(3), name=self.name, grace=0.0)
        await self._bus.start()
        default = process.settings.default
        settings = ComputeSettings(
            report_interval=default.report_interval,
            shutdown_grace=0.1,
            boot_timeout=process.settings.compute.boot_timeout,
        )
        self._manager = ComputeManager(settings, drivers, self._bus, process.clock, Random(3))
        await self._manager.start()
        await self._is("up")

    async def kill(self) -> None:
        """End it as kill -9 would: nothing of it runs on, nothing is said, its guests stay as they are."""
        manager, self._manager = self._manager, None
        assert manager is not None and self._bus is not None
        for agent in manager._agents.values():
            agent.refuse_orders()
        for loop in manager._loops:
            loop.cancel()
        self.driver.destroy = _never  # a killed agent does not clean up after itself
        tasks = [task for agent in manager._agents.values() for task in agent.tasks()]
        for _ in range(2):  # the second time ends what the first has only interrupted
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await self._bus.stop()

    async def stop(self) -> None:
        """End it cleanly."""
        if self._manager is not None:
            assert self._bus is not None
            await self._manager.stop()
            await self._bus.stop()
            self._manager = None

    async def is_down(self) -> None:
        """Wait until the cloud believes that it is dead."""
        await self._is("down")

    async def has(self, uuid: str) -> bool:
        """Say whether its hypervisor has a guest."""
        return await self.driver.info(uuid) is not None

    async def rid_of(self, uuid: str) -> None:
        """Wait until its hypervisor has no such guest any more."""

        async def probe() -> bool | None:
            return None if await self.has(uuid) else True

        await self._cloud.until(probe, f"{self.name} to be rid of {uuid}")

    async def _is(self, state: str) -> None:
        admin = self._cloud.caller().admin

        async def probe() -> bool | None:
            found = (await admin.get(f"/os-services?binary=nova-compute&host={self.name}"))["services"]
            return True if found and found[0]["state"] == state else None

        await self._cloud.until(probe, f"{self.name} to be {state}")


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(cloud: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MortalHost]:
    """A host with so much room that every server goes there first."""
    name = f"mortal-{uuid.uuid4().hex[:6]}"
    host = MortalHost(cloud, name, tmp_path_factory.mktemp(name), memory_mb=1 << 24, vcpus=4096, local_gb=1 << 20)
    yield host
    await cloud.delete_all()
    await host.stop()


async def _never(*_: Any) -> None:
    await asyncio.get_running_loop().create_future()
