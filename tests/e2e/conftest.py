"""A host for real guests; skipped where the machine cannot run them."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from micronova.cli.image import default_cache
from micronova.cli.supervisor import probe as cloud_obstacle
from micronova.conf.settings import load
from micronova.testimage.builder import available, build
from micronova.virt.libvirt.setup import probe
from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.fault_machine import FaultMachine
from tests.e2e.host import Host, ImageServer

SHARED = """
[libvirt]
spice_enabled = true
"""
FAULTY = """
[default]
disk_allocation_ratio = 20.0
shutdown_timeout = 2.0
[compute]
boot_timeout = 10.0
[image_format]
require_image_format_match = false
[quota]
instances = -1
cores = -1
"""


_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@pytest.fixture(scope="session", autouse=True)
def outside() -> Iterator[Path]:
    """Run these tests in a new network namespace, and return the original one.

    So a test sees what it leaves there, and not what other programs do. Processes that it starts are in it, too.
    """
    if available() is None:  # the test image's packages can be downloaded only in the original namespace
        build(default_cache() / "testimage.qcow2", default_cache())
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        # Services that were started before are reached only in their own namespace.
        if os.geteuid() == 0 and not os.environ.get("MICRONOVA_TEST_SERVICES"):
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "no network namespace for the tests")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield Path(f"/proc/{os.getpid()}/fd/{before.fileno()}")


@pytest.fixture(scope="session")
def test_image() -> Path:
    """Return the test image."""
    obstacle = available()
    if obstacle:
        pytest.skip(obstacle)
    return default_cache() / "testimage.qcow2"


@pytest.fixture
async def host(machine: Host) -> AsyncIterator[Host]:
    """Return a host without guests; remove what a failed test left."""
    yield machine
    if machine.leftovers():
        async with machine.agent() as (driver, _):
            for guest in await driver.list_guests():
                await driver.destroy(guest.uuid)


@pytest.fixture(scope="session")
def machine(test_image: Path) -> Iterator[Host]:
    """Return a host whose private libvirtd all tests share."""
    missing = probe()
    if missing:
        pytest.skip(missing)
    if shutil.which("ip") is None:
        pytest.skip("ip is missing: apt-get install iproute2")
    # Closed to others, as a cloud's directory is; guests can use their disks nevertheless.
    directory = Path(tempfile.mkdtemp(prefix="mn-e2e-"))
    images = ImageServer(test_image)
    made = Host(directory, f"mn-e2e-{os.getpid()}", images)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        images.stop()
        shutil.rmtree(directory)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cloud(can_run_guests: None) -> AsyncIterator[RealCloud]:
    """Return the cloud that tests share."""
    async with real_cloud(RealCloud(SHARED)) as made:
        yield made


@pytest.fixture(scope="session")
def can_run_guests() -> None:
    """Skip if the machine cannot run real guests."""
    obstacle = cloud_obstacle(load(environ={})) or available()
    if obstacle is None and shutil.which("ssh") is None:
        obstacle = "ssh is missing: apt-get install openssh-client"
    if obstacle:
        pytest.skip(obstacle)


@pytest.fixture(scope="session")
def fault_machine(can_run_guests: None) -> Iterator[FaultMachine]:
    """Return the programs and the disk of `faulty_cloud`."""
    made = FaultMachine()
    yield made
    made.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def faulty_cloud(fault_machine: FaultMachine) -> AsyncIterator[RealCloud]:
    """Return a cloud that accepts any image and whose host can fail."""
    cloud = RealCloud(
        FAULTY, fault_machine.environment, fault_machine.inside, fault_machine.directory, fault_machine.disk
    )
    async with real_cloud(cloud) as made:
        yield made
