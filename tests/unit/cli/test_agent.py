"""The process of a host's agents: what it is told, and how it gets the files of guests."""

import errno
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from uuid import UUID

import msgspec
import pytest

from micronova.cli import agent, supervised
from micronova.cli.agent import AgentProcess, agent_settings, control_name
from micronova.cli.roles import compute as compute_role
from micronova.cli.roles import network_agent as network_agent_role
from micronova.cli.service_user import ServiceUser, take_over
from micronova.cli.state import StateDirectory
from micronova.cli.supervisor import guests_outside, run_as_service
from micronova.conductor.host_users import HostUsers
from micronova.conf.api import APISettings
from micronova.conf.settings import Settings, SettingsError, load
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden, MicronovaError
from micronova.virt.libvirt.storage import acl
from tests.unit.db.databases import compute_database

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
SECRET = "f00dcafe" * 8


def test_the_agents_are_told_no_secret_of_other_roles() -> None:
    settings = load(
        environ={},
        default={"secret_key": SECRET, "host": "h"},
        database={"connection": f"postgresql://u:{SECRET}@db/x"},
        identity={"password": SECRET},
        glance={"ticket_key": SECRET},
        neutron={"ticket_key": SECRET},
        notifications={"transport_url": f"amqp://u:{SECRET}@broker/"},
        compute={"compute_driver": "libvirt", "boot_timeout": 7.0},
        api={"vendordata_jsonfile_path": "/etc/vendor.json"},
    )
    told = agent_settings(settings, Path("/run/x"))
    assert SECRET.encode() not in msgspec.json.encode(told)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Settings) == told
    assert told.default.transport_url == "unix:///run/x/bus" and told.default.control_users == (control_name("h"),)
    assert (told.compute.boot_timeout, told.api.vendordata_jsonfile_path) == (7.0, "/etc/vendor.json")


async def _given(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the roles of a host pass on of their settings."""
    given: dict[str, Any] = {}

    def keep(module: Any, name: str, *positions: int) -> None:
        def made(*args: Any, **named: Any) -> MagicMock:
            given[name] = [args[position] for position in positions], named
            return MagicMock()

        monkeypatch.setattr(module, name, made)

    monkeypatch.setattr(compute_role, "vendor_data_source", lambda api: api)
    keep(compute_role, "create_drivers", 0, 1)
    keep(compute_role, "ComputeManager", 0)
    keep(network_agent_role, "MetadataProxy", 3)
    keep(network_agent_role, "NetworkAgent")
    process = MagicMock(settings=settings, cloud_id=str(UUID(int=1)), clock=None, random=None)
    process.directory.path = "/x"
    await compute_role.make(process)
    await network_agent_role.make(process)
    del given["NetworkAgent"][1]["metadata"]
    return given


async def test_the_agents_are_told_each_setting_that_their_roles_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `up` they get it through `agent_settings`, under `run` they have the whole file."""

    def changed(section: Any, name: str) -> Any:
        return msgspec.structs.replace(section, **{option: f"{name}.{option}" for option in section.__struct_fields__})

    whole = Settings(**{name: changed(section, name) for name, section in msgspec.structs.asdict(Settings()).items()})
    whole = msgspec.structs.replace(whole, compute=msgspec.structs.replace(whole.compute, compute_driver="libvirt"))
    by_file = await _given(whole, monkeypatch)
    told = await _given(agent_settings(whole, Path("/run/x")), monkeypatch)
    setups = by_file["create_drivers"][0][1], told["create_drivers"][0][1]
    for option in APISettings.__struct_fields__:
        if option.startswith("vendordata"):  # the source of vendor data reads no others
            assert getattr(setups[1].vendor_data, option) == f"api.{option}"
    # The agents reach the image service and the exporter of volumes by Unix sockets.
    same = {"image_service": "", "images": None, "vendor_data": None, "volume_access": None}
    assert replace(setups[0], **same) == replace(setups[1], **same)
    relays = {"console_relay_listen": ""}  # they get the socket of their console relay
    settings = by_file["ComputeManager"][0][0], told["ComputeManager"][0][0]
    assert msgspec.structs.replace(settings[0], **relays) == msgspec.structs.replace(settings[1], **relays)
    for role in ("MetadataProxy", "NetworkAgent"):
        assert by_file[role] == told[role]


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentProcess]:
    """The process of a cloud's agents, which listens and is not started."""
    monkeypatch.setattr(agent, "sockets_directory", lambda _: tmp_path)
    user = ServiceUser("nobody", 65534, 65534)
    made = AgentProcess(
        load(environ={}), StateDirectory(tmp_path), "mn-1", cloud=user, user=user, cloud_id="1", guests=tmp_path,
        roles=("compute",),
    )  # fmt: skip
    link = made.listen()
    yield made
    made.stop(kill=True)
    for listener in (link.bus, link.http):
        listener.close()
    made.detach()


@AS_ROOT
def test_the_agents_inherit_no_secret_by_their_environment(
    agents: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICRONOVA__DATABASE__CONNECTION", f"postgresql://u:{SECRET}@db/x")
    monkeypatch.setenv("OS_PASSWORD", SECRET)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    told, program = tmp_path / "told", tmp_path / "program"
    os.mkfifo(told)
    program.write_text(f"#!/bin/sh\nread -r line\nexec env >{told}\n")  # in the place of Python
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    agents.start(())
    names = dict(line.partition("=")[::2] for line in told.read_text().splitlines())
    assert names["PATH"] == os.environ["PATH"] and names["LC_ALL"] == "C.UTF-8"
    assert SECRET not in str(names)


@AS_ROOT
def test_root_reads_little_of_what_the_agents_say(
    agents: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that were taken over write without end; root's process neither stops nor grows."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nread -r line\nexec yes\n")  # in the place of Python
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    agents.start(())
    assert agents._process is not None and agents._process.stdout is not None
    select.select([agents._process.stdout], [], [], 20.0)
    for _ in range(3):
        agents.tend(())
    agents._process.kill()
    agents._process.wait()
    with pytest.raises(MicronovaError) as raised:
        agents.tend(())
    assert len(raised.value.message) <= supervised.MOST_SAID


FOLLOWS = """
import asyncio, json, logging, subprocess, sys
from micronova.cli.supervised import READY, FromRoot, tell_root
from micronova.conf.settings import load
from micronova.telemetry.logs import set_levels

async def main():
    from_root = FromRoot()
    start = json.loads(from_root.start_message())
    settings = load(environ={}, default=start)
    set_levels(settings)
    from_root.follow(settings)
    assert subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=10).stdout == b"", "its input is not for others"
    tell_root(READY)
    while True:
        levels = [logging.getLogger(name).getEffectiveLevel() for name in ("", "micronova.rpc")]
        print(*levels, file=sys.stderr, flush=True)
        before = list(levels)
        while [logging.getLogger(name).getEffectiveLevel() for name in ("", "micronova.rpc")] == before:
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


class Followed(supervised.SupervisedProcess):
    """A process that says which levels it has."""

    what, consequence = "the process", "nothing"

    def __init__(self, directory: Path) -> None:
        self._settings = load(environ={})
        super().__init__("follows", directory)

    def start_message(self, groups: object) -> bytes:
        default = self._settings.default
        levels = {"log_level": default.log_level, "default_log_levels": list(default.default_log_levels)}
        return msgspec.json.encode(levels)

    def descriptors(self) -> list[int]:
        return []


def test_levels_of_the_log_reach_a_process_that_runs_and_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "follows.py").write_text(FOLLOWS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made, said = Followed(tmp_path), ""

    def until(text: str) -> None:
        nonlocal said
        deadline = time.monotonic() + 30.0
        while text not in said:
            assert time.monotonic() < deadline, said
            said += capfd.readouterr().err
            time.sleep(0.01)  # another process: nobody tells us
        said = said.partition(text)[2]

    made.tend(())
    try:
        until("20 20")
        for level, module, expected in (("WARNING", "rpc=DEBUG", "30 10"), ("DEBUG", "", "10 10")):
            new = load(environ={}, default={"log_level": level, "default_log_levels": [module] if module else []})
            made.use_levels(new.default)
            until(f"SIGHUP: the levels of the log are {level}" if level == "WARNING" else expected)
        assert made._process is not None
        made._process.kill()
        made._process.wait()
        made.tend(())
        monkeypatch.setattr(made, "_again_at", 0.0)
        made.tend(())
        until("10 10")
    finally:
        made.stop(kill=True)


def test_what_a_root_process_that_has_ended_is_told_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents end with it, without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        supervised.tell_root(supervised.READY)


@AS_ROOT
def test_agents_that_cannot_be_started_for_lack_of_processes_are_started_later(
    agents: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's process, with which the cloud ends, survives it."""
    fails_by = [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOENT]
    now = 0.0

    def popen(*args: object, **more: object) -> None:
        number = fails_by.pop(0)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("micronova.cli.supervised.time.monotonic", lambda: now)
    for left in (3, 2, 1):
        agents.tend(())
        assert len(fails_by) == left and 0 < agents.attention <= supervised.LONGEST_PAUSE
        now += agents.attention
    with pytest.raises(MicronovaError, match=r"cannot be started: .*No such file"):  # nothing will change that
        agents.tend(())


@AS_ROOT
def test_agents_that_were_told_to_stop_need_no_attention(agents: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's process looked at them without a pause, until the rest of the cloud had stopped."""
    monkeypatch.setattr(sys, "executable", "true")  # in the place of Python: it ends as if the cloud had stopped it
    agents.tend(())
    assert agents._process is not None
    agents._process.wait(10)
    agents.tend(())
    assert agents.attention >= 1.0
    agents.tend(())
    assert agents._process is None, "it is not started again"


def test_files_of_guests_of_an_existing_libvirt_are_not_in_a_directory_of_the_service_user(tmp_path: Path) -> None:
    place = StateDirectory(tmp_path / "c")
    private = load(environ={})
    assert guests_outside(private, place) == private
    existing = guests_outside(load(environ={}, libvirt={"connection_uri": "qemu:///system"}), place)
    assert existing.libvirt.instances_path == str(tmp_path / "c-guests")
    named = load(environ={}, libvirt={"connection_uri": "qemu:///system", "instances_path": "/srv/guests"})
    assert guests_outside(named, place) == named


@AS_ROOT
def test_the_files_of_one_user_become_another_users_and_nobody_elses_do(tmp_path: Path) -> None:
    before, user = 65533, ServiceUser("nobody", 65534, 65534)
    victim = tmp_path / "victim"
    victim.touch()
    tree = tmp_path / "instances"
    deep = tree / "guest"
    deep.mkdir(parents=True)
    disk, foreign, link, hard = deep / "disk", deep / "foreign", deep / "link", deep / "hard"
    disk.touch()
    disk.chmod(0o660)
    foreign.touch()
    link.symlink_to(victim)
    hard.hardlink_to(victim)
    for path in (tree, deep, disk):
        os.chown(path, before, 12345)
    os.chown(foreign, 12346, 12346)
    os.lchown(link, before, before)
    opened = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        take_over(opened, before, user)
    finally:
        os.close(opened)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in (tree, deep, disk)} == {(user.uid, 12345)}
    assert stat.S_IMODE(disk.stat().st_mode) == 0o660
    assert victim.stat().st_uid == hard.stat().st_uid == 0 and foreign.stat().st_uid == 12346
    assert not link.is_symlink()


@AS_ROOT
def test_consoles_of_guests_that_run_are_open_to_the_new_user_instead(tmp_path: Path) -> None:
    before, user, guest = 65533, ServiceUser("nobody", 65534, 65534), 12347
    folder = tmp_path / "guest"
    folder.mkdir()
    acl.share_contents(folder, 0o700, {before: acl.READ | acl.WRITE | acl.SEARCH})
    os.chown(folder, before, before)
    console = folder / "vnc"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(console))
    os.chown(console, guest, guest)
    image = folder / "image"  # of somebody who shares it
    image.touch()
    os.chown(image, guest, guest)
    assert acl.users(console) == acl.users(image) == {before}
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        take_over(opened, before, user)
    finally:
        os.close(opened)
    assert acl.users(console) == {user.uid} and console.stat().st_uid == guest
    assert acl.users(image) == {before}
    (folder / "new").touch()
    assert acl.users(folder / "new") == {user.uid}


@AS_ROOT
@pytest.mark.parametrize(
    ("default", "said"),
    [
        ({"transport_url": "amqp://u:p@broker/"}, "run compute and network-agent apart"),
        ({"user": "nobody", "agent_user": "nobody"}, "need a user of their own"),
    ],
)
def test_agents_that_cannot_be_separated_are_not_started(tmp_path: Path, default: dict[str, str], said: str) -> None:
    settings = load(environ={}, default=default, compute={"compute_driver": "libvirt"})

    def main(*_: object) -> None:
        raise AssertionError("it was started")

    with pytest.raises(SettingsError, match=said):
        run_as_service(settings, StateDirectory(tmp_path / "c"), ("api", "compute"), main, needs_root=True)
    assert not (tmp_path / "c").exists()


async def test_who_is_behind_the_gate_speaks_for_its_host_only(request: pytest.FixtureRequest) -> None:
    async with compute_database("sqlite", request) as database:
        users = HostUsers(database, required=False, own={"here": "/run/x/console"})
        for _ in range(2):  # also once the others are read
            users.check(Context(sender="here"), "here")
            for sender, host in (("here", "there"), ("there", "here"), (control_name("here"), "here")):
                with pytest.raises(Forbidden):
                    users.check(Context(sender=sender), host)
            await users.refresh()
        assert await users.console_address("here") == "/run/x/console"
