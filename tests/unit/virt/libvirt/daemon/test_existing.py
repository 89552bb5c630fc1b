"""An existing libvirt: whether its guests reach their files, and the error if they do not."""

import socket
import tempfile
from pathlib import Path

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.existing import check_reachable, explain_failure, obstacle, socket_of


def test_guests_must_reach_their_files() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:  # open to all, but for the last part
        closed = Path(made)
        way = closed / "guests"
        way.mkdir(mode=0o711)
        with pytest.raises(LibvirtMissing, match=f"who cannot pass {closed}: .* libvirt.instances_path"):
            check_reachable(way)
        closed.chmod(0o750)
        with pytest.raises(LibvirtMissing, match=f"who cannot pass {closed}: "):
            check_reachable(way)
        closed.chmod(0o711)
        check_reachable(way)
        with pytest.raises(LibvirtMissing, match=f"who cannot pass {way}/none"):
            check_reachable(way / "none")


def test_where_it_listens(tmp_path: Path) -> None:
    assert socket_of(f"qemu+unix:///system?socket={tmp_path}/none") is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert socket_of(f"qemu+unix:///system?socket={tmp_path}/s") == tmp_path / "s"


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    said = obstacle("qemu+ssh://root@elsewhere/system", tmp_path)
    assert said is not None and "names the machine elsewhere" in said and "qemu:///system" in said
    said = obstacle("qemu:///session", tmp_path)
    assert said is not None and "use qemu:///system" in said
    assert obstacle("xen:///system", tmp_path) is None


def test_why_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    denied = explain_failure(
        "qemu:///system?socket=/none", Exception("Failed to connect socket to 'x': Permission denied")
    )
    assert denied.startswith("The user ada may not talk") and denied.endswith("usermod --append --groups libvirt ada")
    absent = explain_failure("qemu:///system", Exception("Failed to connect socket to 'x': No such file or directory"))
    assert absent.startswith("No libvirt answers at qemu:///system") and "systemctl start libvirtd" in absent
