"""Who sees to real guests and their runs_network_agent, by settings; and who may pass through a cloud's directory."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from micronova.cli import root_records, service_user, supervisor
from micronova.cli.service_user import ServiceUser, hand_over, let_through
from micronova.cli.state import StateDirectory
from micronova.cli.supervisor import HostProcesses, runs_network_agent, runs_qemu, without_links
from micronova.conf.settings import Settings, load
from micronova.objects.errors import Unavailable


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
    assert (runs_qemu(given), runs_network_agent(given)) == (machine, wired)


def test_guests_without_a_network_agent_have_no_link_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    changed, notice = without_links(settings("qemu:///system"))
    assert not changed.libvirt.interfaces_linked and notice.endswith("Root connects them: sudo micronova up.")
    changed, notice = without_links(settings("xen:///system"))
    assert not changed.libvirt.interfaces_linked and "QEMU's guests only" in notice
    for other in (
        settings(driver="fake"),
        settings("qemu:///system", neutron={"endpoint_override": "http://neutron"}),
    ):
        changed, notice = without_links(other)
        assert changed.libvirt.interfaces_linked and notice == ""


class Lacking:
    """A libvirtd that has died, on a machine that lacks something for the moment."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.started = False

    def running(self) -> bool:
        return self.started

    def ensure(self) -> None:
        if self.error is not None:
            raise self.error
        self.started = True


class StandIn:
    """The helper, as far as root's process can tell."""

    prefix = "mn-12345678"

    def __init__(self) -> None:
        self.starts = 0
        self.verbs: list[Exception | None] = [Unavailable("The helper does not answer."), None]  # what becomes of them
        self.alive = self.hung = False

    def running(self) -> bool:
        return self.alive

    def hangs(self) -> bool:
        return self.hung

    def kill(self) -> None:
        self.alive = self.hung = False

    def start(self) -> None:
        assert not self.alive
        self.alive = True
        self.starts += 1

    def do(self, verb: object) -> None:
        if (error := self.verbs.pop(0)) is not None:
            raise error


@pytest.mark.parametrize(
    "error", [*(OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EAGAIN)), MemoryError()]
)
def test_what_fails_while_processes_are_started_again_does_not_end_roots_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(supervisor, "make_sockets_directory", lambda _: None)
    monkeypatch.setattr(root_records, "cloud_id", lambda _: "12345678-0000-4000-8000-000000000000")
    processes: Any = HostProcesses(settings(driver="fake"), StateDirectory(tmp_path), ServiceUser("nobody", 1, 1))
    processes.helper, processes.libvirtd = StandIn(), Lacking(error)
    processes.restart_dead()  # the helper starts, and does not answer
    processes.restart_dead()
    assert processes.helper.starts == 1 and not processes.helper.verbs, "it has to make the namespace still"
    assert "cannot be checked now" in caplog.text and "Traceback" not in caplog.text
    processes.libvirtd.error = None
    processes.restart_dead()
    assert processes.libvirtd.started
    processes.helper.hung, processes.helper.verbs = True, [None]
    processes.restart_dead()
    assert processes.helper.starts == 2 and not processes.helper.verbs, "a helper that hangs is replaced"


TOLD_TO_STOP = """
import os, select, signal, threading
from types import SimpleNamespace
from micronova.cli import supervisor

class Processes:
    groups = ()
    def __getattr__(self, name):
        return lambda *_, **__: None

class Agents(Processes):
    attention = 0.0  # they were to be started again at this moment
    def tend(self, groups):
        os.write(tended[1], b"x")

looks, told, tended = [], os.pipe(), os.pipe()
for name in ("hand_over", "become", "end_with"):
    setattr(supervisor, name, lambda *_: None)
real = select.select
supervisor.select = SimpleNamespace(select=lambda *args: (looks.append(args[3]), real(*args))[1])

def main(link):
    signal.signal(signal.SIGTERM, lambda *_: os.write(told[1], b"x"))
    os.read(tended[0], 1)
    os.kill(os.getppid(), signal.SIGTERM)
    os.read(told[0], 1)  # root has passed it on, and is asked from now on
    os.kill(os.getppid(), signal.SIGUSR1)
    threading.Event().wait(0.5)  # stopping takes a while
    os._exit(0)

signal.signal(signal.SIGUSR1, lambda *_: looks.clear())
supervisor.supervise(Processes(), None, SimpleNamespace(path="/"), main, Agents())
print(len(looks))
"""


def test_roots_process_waits_while_the_cloud_stops() -> None:
    """It looked at agents that it does not start again any more, without a pause."""
    ran = subprocess.run([sys.executable, "-c", TOLD_TO_STOP], capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) < 10


STARTED_BY_A_USER = """
import os, sys
from pathlib import Path
from micronova.cli.state import StateDirectory
from micronova.cli.supervisor import run_as_service
from micronova.conf.settings import load
from micronova.virt.libvirt import setup as _  # while it can still be read
from micronova.virt.libvirt.daemon import existing as _
directory, uri = Path(sys.argv[1]), sys.argv[2]
driver = "libvirt" if uri else "fake"
settings = load(environ={}, compute={"compute_driver": driver}, libvirt={"connection_uri": uri})
if os.geteuid() == 0:
    os.setgid(12345)
    os.setuid(12345)
os.umask(0o022)
place = StateDirectory(directory)
run_as_service(settings, place, (), lambda *_: (place.path / "new").write_text("x"), needs_root=bool(uri))
"""


@pytest.mark.parametrize(("uri", "mode"), [("", 0o700), ("qemu:///no-such?socket=/no/such", 0o711)])
def test_a_cloud_that_a_user_starts_is_closed_to_others(uri: str, mode: int) -> None:
    parent = Path(tempfile.mkdtemp(prefix="mn-user-"))
    try:
        parent.chmod(0o755)
        directory = parent / "cloud"
        directory.mkdir()
        (directory / "old").write_text("x")
        (directory / "old").chmod(0o644)
        StateDirectory(directory).keys()
        directory.chmod(0o755)
        for path in (directory, directory / "old", directory / "keys.json"):
            os.chown(path, 12345 if os.geteuid() == 0 else -1, -1)
        command = [sys.executable, "-c", STARTED_BY_A_USER, str(directory), uri]
        subprocess.run(command, check=True, capture_output=True, text=True)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
        # Guests of an existing libvirt may pass through the directory; its files are closed to them, too.
        assert modes == {"cloud": mode, "old": 0o600, "new": 0o600, "keys.json": 0o600}
    finally:
        shutil.rmtree(parent)


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
        let_through(place)
        (place.path / "new").touch()
    finally:
        os.umask(before)

    def mode(file: Path) -> int:
        return stat.S_IMODE(file.stat().st_mode)

    assert mode(place.path) == 0o711
    assert [mode(each) for each in (database, place.path / "images", place.path / "new")] == [0o600, 0o700, 0o600]
    assert mode(guests) == 0o711, "it has an owner of its own"
    assert mode(elsewhere) == 0o644, "nothing outside is touched"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_away_nothing_in_directories_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_user, "CACHE", tmp_path / "cache")
    victim = tmp_path / "victim"
    victim.touch()
    place = StateDirectory(tmp_path / "c")
    place.create()
    place.path.chmod(0o711)
    own, foreign, guests = (place.path / name for name in ("images", "foreign", "libvirt"))
    for folder in (foreign, guests):
        folder.mkdir()
    (own / "deep").mkdir()
    (own / "deep" / "image").touch()
    (own / "link").symlink_to(victim)
    (foreign / "link").hardlink_to(victim)
    (guests / "disk").touch()
    os.chown(foreign, 12345, 12345)
    user = ServiceUser("nobody", 65534, 65534)
    for _ in range(2):
        hand_over(place, user)
        assert stat.S_IMODE(place.path.stat().st_mode) == 0o700
        place.path.chmod(0o711)

    def owner(path: Path) -> int:
        return path.lstat().st_uid

    given = (place.path, place.path / "keys.json", own, own / "deep", own / "deep" / "image", own / "link")
    assert {owner(path) for path in given} == {user.uid}
    assert owner(victim) == owner(foreign / "link") == 0 and owner(foreign) == 12345
    assert owner(guests) == owner(guests / "disk") == 0
