"""Who sees to real guests and their wires, by settings; and who may pass through a cloud's directory."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from micronova.cli.machine import unwired, uses_machine, wires
from micronova.cli.privilege import let_through
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings, load


def settings(uri: str = "", driver: str = "libvirt", **sections: Any) -> Settings:
    return load(environ={}, compute={"compute_driver": driver}, libvirt={"connection_uri": uri}, **sections)


@pytest.mark.parametrize(
    ("given", "uid", "machine", "wired"),
    [
        (settings(), 0, True, True),
        (settings("qemu:///system"), 0, True, True),
        (settings("qemu:///system"), 1000, True, False),
        (settings("qemu:///system", neutron={"endpoint_override": "http://neutron"}), 0, True, False),
        (settings("xen:///system"), 0, False, False),
        (settings(driver="fake"), 0, False, False),
    ],
)
def test_who_needs_root_and_a_network_agent(
    monkeypatch: pytest.MonkeyPatch, given: Settings, uid: int, machine: bool, wired: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert (uses_machine(given), wires(given)) == (machine, wired)


def test_guests_whom_nobody_wires_have_no_link_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    changed, notice = unwired(settings("qemu:///system"))
    assert not changed.libvirt.wire and notice.endswith("Wires are made by root: sudo micronova up.")
    changed, notice = unwired(settings("xen:///system"))
    assert not changed.libvirt.wire and "QEMU's guests only" in notice
    for other in (
        settings(driver="fake"),
        settings("qemu:///system", neutron={"endpoint_override": "http://neutron"}),
    ):
        changed, notice = unwired(other)
        assert changed.libvirt.wire and notice == ""


def test_those_who_pass_through_a_clouds_directory_see_nothing_in_it(tmp_path: Path) -> None:
    place = StateDirectory(tmp_path / "c")
    place.create()
    database, guests, link = (place.path / name for name in ("compute.sqlite", "libvirt", "link"))
    elsewhere = tmp_path / "elsewhere"
    for file in (database, elsewhere):
        file.touch(0o644)
        file.chmod(0o644)
    guests.mkdir(mode=0o711)
    link.symlink_to(elsewhere)
    before = os.umask(0o022)
    try:
        let_through(place, os.getegid())
        (place.path / "new").touch()
    finally:
        os.umask(before)

    def mode(file: Path) -> int:
        return stat.S_IMODE(file.stat().st_mode)

    assert mode(place.path) == 0o710 and place.path.stat().st_gid == os.getegid()
    assert [mode(each) for each in (database, place.path / "images", place.path / "new")] == [0o600, 0o700, 0o600]
    assert mode(guests) == 0o711, "it has an owner of its own"
    assert mode(elsewhere) == 0o644, "nothing outside is touched"
