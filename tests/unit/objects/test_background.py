"""A background task that fails begins again, and every long-lived task of the program is one."""

import ast
import asyncio
from pathlib import Path

import pytest

import micronova
from micronova.objects.background import LONGEST_PAUSE, keep_running

ROOT = Path(micronova.__file__).parent


class SteppedClock:
    """A clock whose sleeps last no time and are recorded."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


async def test_a_task_that_fails_is_logged_and_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    errors = [RuntimeError("can't start new thread"), MemoryError(), OSError(24, "Too many open files")]
    recovered = asyncio.Event()

    async def work() -> None:
        if errors:
            raise errors.pop(0)
        recovered.set()
        await asyncio.Event().wait()

    task = keep_running(work, name="example", clock=clock)
    async with asyncio.timeout(5):
        await recovered.wait()
    assert not task.done()
    assert clock.pauses == [1.0, 2.0, 4.0]
    assert [record.message for record in caplog.records] == [
        f"the background task example failed and begins again in {pause} s" for pause in (1, 2, 4)
    ]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_pause_is_limited_and_short_again_after_a_while() -> None:
    clock = SteppedClock()
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 8:
            clock.time += LONGEST_PAUSE + 1
        if runs < 10:
            raise RuntimeError

    async with asyncio.timeout(5):
        await keep_running(work, name="example", clock=clock)  # it ends with its work
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0, 2.0]


ENDS_WITH_ITS_WORK = {
    "cli/check.py": 1,  # the checks, which are awaited
    "cli/checks/shape.py": 1,  # the opening of a database, which its checks await
    "cli/up.py": 1,  # a wait, which is awaited
    "cli/run.py": 2,  # the start of the process and the wait for a signal; both are awaited
    "compute/agent.py": 2,  # an order, and the removal of a guest: the heartbeat lists what is missing
    "compute/handlers/guests.py": 1,  # the copy of a disk, which is awaited
    "compute/image_caching.py": 1,  # a download ahead of time: a build does it again
    "compute/manager.py": 2,  # a wait, which is awaited
    "compute/quiesced_guests.py": 1,  # a guest that is frozen: what fails is repeated, and the next agent thaws it
    "compute/vif_plugging.py": 1,  # a question, which is awaited
    "compute/waiting.py": 2,  # a wait, which is awaited
    "conductor/image_caching.py": 1,  # a request, which is a hint
    "conductor/heartbeats.py": 1,  # the next heartbeat starts it again
    "conductor/operations/engine.py": 1,  # an operation: its lease expires
    "console/bridge.py": 1,  # a connection
    "console/relay.py": 3,  # a connection
    "clients/expiring_cache.py": 1,  # a request, whose callers wait
    "db/postgres.py": 1,  # a transaction, which is awaited
    "embedded/image/data.py": 1,  # the end of an upload, which is awaited
    "embedded/network/agent/metadata.py": 1,  # a connection
    "embedded/network/agent_heartbeats.py": 1,  # the next heartbeat starts it again
    "embedded/common/compute_events.py": 3,  # a request and waits, which are awaited
    "embedded/network/state_watch.py": 1,  # a read, which its requests await
    "embedded/volume/export_manager.py": 1,  # a wait, which is awaited
    "embedded/volume/operations/engine.py": 1,  # an operation: the sweep takes it up again
    "exporter/daemon.py": 3,  # waits, which are awaited
    "exporter/qmp.py": 1,  # a connection: its end ends all questions, and the daemon is started again
    "exporter/server.py": 3,  # a connection or a daemon that is watched, and waits, which are awaited
    "http/server.py": 2,  # the server, which start and stop await; a connection
    "objects/background.py": 1,
    "rpc/amqp/connection.py": 1,  # a connection: an error disconnects, and the bus connects again
    "rpc/server.py": 1,  # a message
    "rpc/unix/bus.py": 2,  # a connection: an error disconnects, and the bus connects again
    "virt/fake/consoles.py": 1,  # a connection
    "virt/fake/driver.py": 2,  # the copy of a guest's memory, which is awaited
    "virt/libvirt/guests/graceful.py": 1,  # a request to a guest's agent; a guest that ignores it is switched off
    "virt/libvirt/guests/lifecycle.py": 1,  # a read of states, which the next event repeats
    "virt/libvirt/storage/image_cache.py": 2,  # a download, which its builds await
    "virt/libvirt/storage/tools.py": 1,  # the end of a program, which is awaited
}
"""The number of tasks that a module makes itself, because an error that ends one is seen by who needs its work."""


def test_every_long_lived_task_is_kept_running() -> None:
    found: dict[str, int] = {}
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future"):
                found[path] = found.get(path, 0) + 1
    assert found == ENDS_WITH_ITS_WORK, "start long-lived work with keep_running"
