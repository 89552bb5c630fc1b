"""The connection to libvirt: what the agent is told of one that is lost."""

import asyncio
import threading
from typing import cast

import pytest

from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client import connection, threads
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from tests.clocks import ManualClock


async def test_one_failure_to_connect_again_is_told() -> None:
    clock = ManualClock()
    told: list[str] = []
    attempts: list[int] = []

    async def prepare() -> None:
        attempts.append(len(attempts) + 1)
        raise Unavailable(f"libvirtd is away ({len(attempts)})")

    made = Connection(
        "test:///default",
        clock,
        on_event=lambda _: None,
        on_restored=lambda: None,
        on_failed=told.append,
        prepare=prepare,
    )
    made._connection = cast(Connect, object())
    made._lost(0, "closed")
    for number in (1, 2, 3):
        while len(attempts) < number:
            await clock.advance(connection.RETRY_PAUSE_MAX)
    await made.close()
    assert told == ["libvirtd is away (1)"]


async def test_a_call_that_outlives_its_cancelled_caller_keeps_others_from_the_guest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build is withdrawn while libvirt hangs. Its guest is removed after it was made, and not before."""
    monkeypatch.setattr(threads, "CANCEL_WAIT", 0.05)
    made = Connection(
        "test:///default", ManualClock(), on_event=lambda _: None, on_restored=lambda: None, on_failed=lambda _: None
    )
    made._connection = cast(Connect, object())
    begun, release = threading.Event(), threading.Event()
    done: list[str] = []

    def make(_: Connect) -> None:
        begun.set()
        release.wait()
        done.append("made")

    building = asyncio.create_task(made.change("guest", make, "make it"))
    assert await asyncio.to_thread(begun.wait, 5)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    with pytest.raises(Unavailable, match="An earlier call for the guest hangs"):
        await made.change("guest", lambda _: done.append("removed"), "remove it", timeout=0.05)
    await made.change("another", lambda _: done.append("another"), "change it")
    release.set()
    await made.change("guest", lambda _: done.append("removed"), "remove it")
    assert done == ["another", "made", "removed"]
