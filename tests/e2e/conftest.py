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
from micronova.cli.machine import probe as cloud_obstacle
from micronova.conf.settings import load
from micronova.testimage.builder import available, build
from micronova.virt.libvirt.setup import probe
from tests.e2e.cloud import RealCloud, real_cloud
from tests.e2e.host import Host, ImageServer
from tests.e2e.workshop import Workshop

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
    """Give these tests a machine's network of their own, and return the one they came from.

    So each sees what it leaves there, and not what others do meanwhile. What they start is in it, too.
    """
    if available() is None:  # what the test image is made of can only be fetched from out here
        build(default_cache() / "testimage.qcow2", default_cache())
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        # Services that somebody else started are reached only from where they listen.
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
    """Return a host without guests; what a test that failed left there is removed."""
    yield machine
    if machine.leftovers():
        async with machine.agent() as (driver, _):
            for guest in await driver.list_guests():
                await driver.destroy(guest.uuid)


@pytest.fixture(scope="session")
def machine(test_image: Path) -> Iterator[Host]:
    """Return a host whose private libvirtd all tests share; at the end nothing is left of it."""
    missing = probe()
    if missing:
        pytest.skip(missing)
    if shutil.which("ip") is None:
        pytest.skip("ip is missing: apt-get install iproute2")
    # Closed to others, as a cloud's directory is: guests get at their disks nevertheless.
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
    """Return the cloud that tests share; at the end nothing is left of it."""
    async with real_cloud(RealCloud(SHARED)) as made:
        yield made


@pytest.fixture(scope="session")
def can_run_guests() -> None:
    """Skip where the machine cannot have real guests."""
    obstacle = cloud_obstacle(load(environ={})) or available()
    if obstacle is None and shutil.which("ssh") is None:
        obstacle = "ssh is missing: apt-get install openssh-client"
    if obstacle:
        pytest.skip(obstacle)


@pytest.fixture(scope="session")
def workshop(can_run_guests: None) -> Iterator[Workshop]:
    """Return the tools and the disk of the cloud in which things go wrong."""
    made = Workshop()
    yield made
    made.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def faulty_cloud(workshop: Workshop) -> AsyncIterator[RealCloud]:
    """Return a cloud that takes any image and whose host can be damaged; at the end nothing is left of it."""
    cloud = RealCloud(FAULTY, workshop.environment, workshop.inside, workshop.directory, workshop.disk)
    async with real_cloud(cloud) as made:
        yield made
