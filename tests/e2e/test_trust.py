"""What answers HTTP, and what may use libvirt, are different users: what each of them cannot do."""

import asyncio
import json
import os
import pickle
import pwd
import random
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from micronova.cli.agent import host_name
from micronova.compute.rpcapi import COMPUTE_INTERFACE, LIST_GUESTS, Nothing
from micronova.conductor.rpcapi import (
    AUTHORIZE_CONSOLE,
    CONSOLE,
    HEARTBEAT,
    HOST_KEYS,
    HOSTS,
    KEYS,
    TASKS,
    ConsoleAuthRequest,
    HostKeysRequest,
)
from micronova.conf.settings import load
from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.errors import MicronovaError
from micronova.objects.orders import Heartbeat, HostBeat
from micronova.privileged.client import helper_socket, sockets_directory
from micronova.rpc.bus import Bus
from micronova.rpc.unix.bus import UnixBus
from micronova.virt.libvirt.storage import acl
from tests.command import micronova, refused
from tests.e2e.cloud import RealCloud, processes, real_cloud, script
from tests.e2e.guest_view import process_of as guest_process
from tests.e2e.guests import until
from tests.e2e.test_cloud_restart import kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

T = TypeVar("T")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cloud(can_run_guests: None) -> AsyncIterator[RealCloud]:
    async with real_cloud() as made:
        yield made


def process_of(cloud: RealCloud, module: str) -> int:
    """Return the process of a module that is not root's, and no child of such a process."""
    found = {int(line.split()[0]) for line in processes(str(cloud.directory)) if module in line}
    owners = {pid: known for pid in found if (known := owner_and_parent(pid)) is not None}
    [pid] = [pid for pid, (uid, parent) in owners.items() if uid != 0 and (owner_and_parent(parent) or (1,))[0] == 0]
    return pid


def owner_and_parent(pid: int) -> tuple[int, int] | None:
    """Return the user and the parent of a process; None if it has ended."""
    try:
        known = status(pid)
    except FileNotFoundError:
        return None
    return int(known["Uid"][0]), int(known["PPid"][0])


def http_process(cloud: RealCloud) -> int:
    return process_of(cloud, "micronova.cli.main up")


def agent_process(cloud: RealCloud) -> int:
    return process_of(cloud, "micronova.cli.agent")


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


def as_process(pid: int, work: Callable[[], T]) -> T:
    """Return what a function returns to a process with the user and the groups of another process."""
    known = status(pid)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([int(group) for group in known["Groups"]])
            os.setresgid(*[int(known["Gid"][0])] * 3)
            os.setresuid(*[int(known["Uid"][0])] * 3)
            os.write(writer, pickle.dumps(work()))
        except BaseException:  # the child must not go on as the test
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    result: T = pickle.loads(answer)
    return result


def connects(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.connect(str(path))
        except OSError as error:
            return type(error).__name__
    return "connected"


def reads(path: Path) -> str:
    try:
        if path.is_dir():
            os.listdir(path)
        else:
            path.open("rb").close()
    except OSError as error:
        return type(error).__name__
    return "read"


async def test_both_are_users_of_their_own_without_powers(cloud: RealCloud) -> None:
    http, agent = status(http_process(cloud)), status(agent_process(cloud))
    assert http["Uid"] == [str(pwd.getpwnam("micronova").pw_uid)] * 4
    assert agent["Uid"] == [str(pwd.getpwnam("micronova-agent").pw_uid)] * 4
    assert http["Groups"] == [str(pwd.getpwnam("micronova").pw_gid)], "no group of libvirt, of guests or of the agents"
    assert not {"0", *http["Groups"]} & {*agent["Groups"]}
    for each in (http, agent):
        assert all(int(each[name][0], 16) == 0 for name in ("CapPrm", "CapEff", "CapInh"))


async def test_what_answers_http_reaches_neither_libvirt_nor_root_nor_guests(cloud: RealCloud) -> None:
    tenant = await cloud.tenant("10.91.0.0/24", router=False)
    guest = await tenant.boot("hilde")
    await guest.wait("ACTIVE")
    sockets = [
        cloud.libvirt / "run" / "libvirt-sock",
        helper_socket(cloud.prefix),
        sockets_directory(cloud.prefix) / "bus",
        *(cloud.libvirt / "sockets").glob("*/*"),
    ]
    files = [
        cloud.libvirt / "instances",
        cloud.libvirt / "instances" / guest.id / "disk",
        *(cloud.libvirt / "base").iterdir(),
        cloud.libvirt / "base",
        cloud.libvirt / "console",
        cloud.libvirt / "etc",
    ]
    assert len(sockets) > 4 and len(files) > 5

    def tried() -> dict[str, str]:
        return {str(path): connects(path) for path in sockets} | {str(path): reads(path) for path in files}

    found = as_process(http_process(cloud), tried)
    assert set(found.values()) == {"PermissionError"}, found
    # The test can tell: the agents may.
    found = as_process(agent_process(cloud), lambda: {str(helper_socket(cloud.prefix)): connects(sockets[1])})
    assert set(found.values()) == {"connected"}
    await tenant.clear()


async def test_the_agents_read_neither_databases_nor_keys(cloud: RealCloud) -> None:
    names = ("keys.json", "clouds.yaml", "compute.sqlite", "identity.sqlite", "images", "control.sock", "micronova.log")
    pid = agent_process(cloud)
    found = as_process(pid, lambda: {name: reads(cloud.directory / name) for name in names})
    assert set(found.values()) == {"PermissionError"}, found
    # In their own view DIR contains nothing else: the owner of DIR cannot put anything in the place of guests' files.
    seen = Path(f"/proc/{pid}/root") / cloud.directory.relative_to("/")
    assert [entry.name for entry in seen.iterdir()] == ["libvirt"]
    assert seen.stat().st_uid == 0
    # Nor do they know a key from before they were this user.
    keys = json.loads((cloud.directory / "keys.json").read_text())
    told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not any(keys[name].encode() in told for name in ("admin_password", "ticket_key", "secret_key"))


async def test_the_agents_speak_for_this_host_only_and_give_no_orders(cloud: RealCloud) -> None:
    host = host_name(load(environ={}))
    path = sockets_directory(cloud.prefix) / "bus"

    async def ask() -> dict[str, str]:
        # Imported before: this user may not be able to read the code.
        bus = UnixBus(path, clock=SystemClock(), random=random.Random())
        await bus.start()
        try:
            return {name: await outcome(question(bus)) for name, question in questions(host).items()}
        finally:
            await bus.stop()

    found = as_process(agent_process(cloud), lambda: asyncio.run(ask()))
    assert found == {
        "its own heartbeat": "StaleHeartbeat",  # it may send it, but has sent newer ones
        "another's heartbeat": "Forbidden",
        "its own keys": "answered",
        "another's keys": "Forbidden",
        "what a console token is for": "Forbidden",
        "an order to itself": "Forbidden",
        "an order to another": "BusUnavailable",
        "to take the conductor's messages": "BusUnavailable",
        "to take the reports of hosts": "BusUnavailable",
        "to take the orders of another": "BusUnavailable",
    }
    assert as_process(http_process(cloud), lambda: connects(path)) == "PermissionError"


async def outcome(question: Any) -> str:
    try:
        await question
    except MicronovaError as error:
        return type(error).__name__
    return "answered"


def questions(host: str) -> dict[str, Callable[[Bus], Any]]:
    def beat(name: str) -> Callable[[Bus], Any]:
        message = Heartbeat(hosts=(HostBeat(host=name),))
        return lambda bus: bus.call(HOSTS.target(), HEARTBEAT, message, context=Context(), timeout=30)

    def keys(name: str) -> Callable[[Bus], Any]:
        request = HostKeysRequest(name)
        return lambda bus: bus.call(KEYS.target(), HOST_KEYS, request, context=Context(), timeout=30)

    def order(name: str) -> Callable[[Bus], Any]:
        target = COMPUTE_INTERFACE.target(name)
        return lambda bus: bus.call(target, LIST_GUESTS, Nothing(), context=Context(), timeout=30)

    return {
        "its own heartbeat": beat(host),
        "another's heartbeat": beat("elsewhere"),
        "its own keys": keys(host),
        "another's keys": keys("elsewhere"),
        "what a console token is for": lambda bus: bus.call(
            CONSOLE.target(), AUTHORIZE_CONSOLE, ConsoleAuthRequest("0" * 64), context=Context(), timeout=30
        ),
        "an order to itself": order(host),
        "an order to another": order("elsewhere"),
        "to take the conductor's messages": lambda bus: bus.serve(TASKS, Everything()),
        "to take the reports of hosts": lambda bus: bus.serve(HOSTS, Everything()),
        "to take the orders of another": lambda bus: bus.serve(
            COMPUTE_INTERFACE, Everything(), host="elsewhere", shared=False
        ),
    }


class Everything:
    """Takes every message."""

    def __getattr__(self, name: str) -> Any:
        async def take(context: Context, params: Any) -> None:
            raise AssertionError(f"the agents got {name}")

        return take


async def test_agents_that_are_killed_while_they_build_are_back_and_the_builds_end(cloud: RealCloud) -> None:
    tenant = await cloud.tenant("10.92.0.0/24", router=False)
    pid = agent_process(cloud)
    guests = [await tenant.boot(f"ida-{n}", user_data=script("true")) for n in range(3)]
    instances = cloud.libvirt / "instances"

    async def begun() -> bool:
        return any(instances.iterdir())

    await until(begun, "a build to begin")
    os.kill(pid, signal.SIGKILL)

    async def back() -> bool:
        return "is started again; guests continue to run" in cloud.log and cloud.log.count("network-agent: ready") > 1

    await until(back, lambda: f"the agents to be back: {cloud.log[-2000:]}")
    assert agent_process(cloud) != pid
    for guest in guests:
        await guest.wait("ACTIVE")
    await tenant.clear()


async def test_guests_of_a_cloud_with_one_user_are_taken_over(cloud: RealCloud) -> None:
    tenant = await cloud.tenant("10.93.0.0/24", router=False)
    guest = await tenant.boot("jutta")
    await guest.wait("ACTIVE")
    await cloud.down()
    before = pwd.getpwnam("micronova").pw_uid
    folders = [cloud.libvirt / name for name in ("instances", "base", "sockets", "console", "log/qemu")]
    for path in [*folders, *(path for folder in folders for path in folder.rglob("*"))]:
        os.chown(path, before, -1)
    victim = cloud.folder / "victim"
    victim.touch()
    (cloud.libvirt / "instances" / "link").symlink_to(victim)
    await cloud.up()
    await guest.wait("ACTIVE")  # it ran before, and its disk can be used
    agent = pwd.getpwnam("micronova-agent").pw_uid
    owners = {path.lstat().st_uid for folder in folders for path in (folder, *folder.rglob("*"))}
    assert before not in owners and agent in owners and victim.stat().st_uid == 0
    await tenant.clear()


async def test_guests_of_such_a_cloud_that_still_run_are_taken_over_with_their_consoles(cloud: RealCloud) -> None:
    tenant = await cloud.tenant("10.94.0.0/24", router=False)
    guest = await tenant.boot("karla")
    await guest.wait("ACTIVE")
    runs = guest_process(guest.id).pid
    await kill(cloud)

    async def gone() -> bool:
        return not [line for line in processes(str(cloud.directory)) if "micronova.cli.agent" in line]

    await until(gone, "the agents to be dead")
    former, agent = pwd.getpwnam("micronova"), pwd.getpwnam("micronova-agent").pw_uid
    for name in ("instances", "base", "sockets", "console", "log/qemu"):
        for path in (cloud.libvirt / name, *(cloud.libvirt / name).rglob("*")):
            acl.rename(path, agent, former.pw_uid)
            if path.lstat().st_uid == agent:
                os.chown(path, former.pw_uid, -1)
    for path in (cloud.libvirt / "run", cloud.libvirt / "run" / "libvirt-sock"):
        os.chown(path, -1, former.pw_gid)
    await cloud.up()
    await guest.wait("ACTIVE")
    assert guest_process(guest.id).pid == runs
    folder = os.open(cloud.libvirt / "sockets" / guest.id, os.O_PATH)  # the agents have a view of DIR of their own
    consoles = [Path(f"/proc/self/fd/{folder}", name) for name in ("vnc", "serial0")]
    try:
        for process, expected in ((agent_process(cloud), "connected"), (http_process(cloud), "PermissionError")):
            assert as_process(process, lambda: [connects(path) for path in consoles]) == [expected] * 2
    finally:
        os.close(folder)
    await tenant.clear()


async def test_a_cloud_whose_agents_cannot_start_says_why_and_does_not_stay(can_run_guests: None) -> None:
    place = Path(tempfile.mkdtemp(prefix="mn-e2e-"))
    try:
        settings = place / "micronova.toml"
        place.chmod(0o711)
        vendor_data = place / "vendor.json"
        vendor_data.write_text("{}")
        vendor_data.chmod(0o600)
        os.chown(vendor_data, pwd.getpwnam("micronova").pw_uid, -1)  # the metadata service may read it, agents may not
        settings.write_text(f'[api]\nvendordata_jsonfile_path = "{vendor_data}"\n')
        where = ("--dir", place / "c", "--config", settings, "--port", "0")
        said = refused("up", "--driver", "libvirt", *where, "--detach")
        assert f"Cannot read api.vendordata_jsonfile_path {vendor_data}: Permission denied." in said
        assert not processes(str(place)) and not (place / "c").exists()
    finally:
        micronova("down", "--dir", place / "c")
        shutil.rmtree(place)
