"""Making a driver from settings, and what a machine lacks."""

import dataclasses
import importlib
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from micronova.objects.errors import Invalid
from micronova.virt.driver import CAPABILITIES, Driver, implemented
from micronova.virt.libvirt import setup
from micronova.virt.libvirt.client import library
from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.private import PrivateLibvirtd
from micronova.virt.libvirt.daemon.qemu_user import QemuUser
from micronova.virt.loader import DriverSetup, load_compute_driver
from tests.clocks import ManualClock

USER = QemuUser(name="libvirt-qemu", group="libvirt-qemu", uid=64055, gid=64055)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    monkeypatch.setattr(setup, "find_qemu_user", lambda name="", group="": USER)
    monkeypatch.setattr(setup, "missing_directories", list)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def make(state_dir: Path | None, **options: Any) -> Any:
    given = DriverSetup(
        host="host-1", cloud_id="cloud-1", clock=ManualClock(), random=Random(1), state_dir=state_dir, options=options
    )
    return setup.create(given)


def test_the_loader_knows_it() -> None:
    assert load_compute_driver("libvirt") is setup.create


async def test_a_driver_with_its_capabilities(able: None, tmp_path: Path) -> None:
    (driver,) = make(tmp_path).values()
    assert isinstance(driver, Driver)
    missing = {"fault_injection", "migrate", "live_migrate", "rescue_lun"}
    assert implemented(driver) == frozenset(CAPABILITIES) - missing
    (blind,) = make(tmp_path, vnc_enabled=False).values()
    assert "vnc_console" not in blind.capabilities() and "pause" in blind.capabilities()
    assert "spice_console" not in driver.capabilities() | blind.capabilities()
    (spicy,) = make(tmp_path, vnc_enabled=False, spice_enabled=True).values()
    assert "spice_console" in spicy.capabilities() and "vnc_console" not in spicy.capabilities()


async def test_wrong_settings(able: None, tmp_path: Path) -> None:
    for wrong in (
        {"cpu_mode": "fast"},
        {"unknown": 1},
        {"cpu_shared_set": "a-b"},
        {"cpu_shared_set": "0-1", "cpu_dedicated_set": "1"},
        {"instances_path": "/x"},
    ):
        with pytest.raises(Invalid):
            make(tmp_path, **wrong)
    with pytest.raises(Invalid, match="needs a directory"):
        make(None)


async def test_cpus_and_pages_of_other_sections(able: None, tmp_path: Path) -> None:
    pages = ({"node": 0, "size": 2048, "count": 64},)
    given = DriverSetup(
        host="h", cloud_id="c", clock=ManualClock(), random=Random(1), state_dir=tmp_path, options={"cpu_mode": "none"},
        cpu_shared_set="0", cpu_dedicated_set="1-2", reserved_huge_pages=pages,
    )  # fmt: skip
    (driver,) = setup.create(given).values()
    read = driver._settings
    assert (read.cpu_shared_set, read.cpu_dedicated_set, read.reserved_huge_pages) == ("0", "1-2", pages)
    assert read.cpu_mode == "none"
    with pytest.raises(Invalid, match="CPU 0 is in cpu_shared_set and in cpu_dedicated_set"):
        setup.create(dataclasses.replace(given, cpu_dedicated_set="0-2"))


async def test_an_existing_libvirt_by_its_address(able: None, tmp_path: Path) -> None:
    (driver,) = make(tmp_path, connection_uri="qemu:///system", instances_path=str(tmp_path / "i")).values()
    assert driver._connection.uri == "qemu:///system" and driver._daemon is None
    (driver,) = make(tmp_path, virt_type="xen").values()
    assert driver._connection.uri == "xen:///system"


def test_a_machine_that_has_everything(able: None) -> None:
    assert setup.probe() is None


def test_what_to_install(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("qemu-img", "libvirtd") else f"/bin/{name}")
    said = setup.probe()
    assert said is not None and said.endswith(
        "apt-get install --no-install-recommends libvirt-daemon-system qemu-utils"
    )
    # With an existing libvirt, ours is not needed.
    said = setup.probe({"connection_uri": "qemu:///system"})
    assert said is not None and said.endswith("qemu-utils")


def test_the_binding(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    said = setup.probe()
    assert said is not None and "libvirt-dev" in said and "pip install 'micronova[libvirt]'" in said
    with pytest.raises(LibvirtMissing, match="Python binding"):
        library.load()


def test_without_root(able: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = setup.probe()
    assert said is not None and "run as root, or set libvirt.connection_uri" in said
    assert setup.probe({"connection_uri": "qemu:///system"}) is None
    with pytest.raises(LibvirtMissing, match="Root's process of this cloud starts it again"):
        PrivateLibvirtd(tmp_path, host_uuid="u", user=USER).ensure()
