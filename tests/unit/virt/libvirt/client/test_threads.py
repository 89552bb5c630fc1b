"""Threads for calls that block: bounded, with timeouts, also when calls hang."""

import asyncio
import threading
import time

import pytest

from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client import threads
from micronova.virt.libvirt.client.threads import CallOverdue, ThreadPool


async def test_results_and_errors_come_back() -> None:
    pool = ThreadPool("work", 2)
    assert await pool.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    pool.close()


async def test_no_more_threads_than_it_may_have() -> None:
    pool = ThreadPool("work", 3)
    now = most = 0
    lock = threading.Lock()

    def count() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    await asyncio.gather(*(pool.run(count) for _ in range(30)))
    assert most == 3


async def test_a_hung_call_times_out_and_others_go_on() -> None:
    pool = ThreadPool("libvirt", 1)
    release = threading.Event()
    with pytest.raises(CallOverdue, match="did not answer") as caught:
        await pool.run(release.wait, timeout=0.05)
    assert pool.stuck == 1
    assert await pool.run(lambda: "still here", timeout=5) == "still here"
    release.set()
    assert await asyncio.wait_for(caught.value.call, 5)
    await _none_stuck(pool)
    assert await pool.run(lambda: "and again", timeout=5) == "and again"


async def test_when_too_many_calls_hang_the_next_fails_at_once() -> None:
    pool = ThreadPool("libvirt", 1)
    release = threading.Event()
    for _ in range(threads.STUCK_LIMIT):
        with pytest.raises(CallOverdue):
            await pool.run(release.wait, timeout=0.02)
    with pytest.raises(Unavailable, match="Too many calls hang"):
        await pool.run(lambda: None)
    release.set()
    await _none_stuck(pool)
    await pool.run(lambda: None, timeout=5)


async def test_a_call_that_waited_in_vain_never_runs() -> None:
    pool = ThreadPool("libvirt", 1)
    release, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(pool.run(release.wait))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too busy"):
        await pool.run(ran.set, timeout=0.05)
    release.set()
    await first
    await pool.run(lambda: None)
    assert not ran.is_set()


async def test_a_cancelled_caller_waits_for_the_effect() -> None:
    pool = ThreadPool("libvirt", 1)
    begun, release, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait()
        done.set()

    task = asyncio.create_task(pool.run(work))
    assert await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def _none_stuck(pool: ThreadPool) -> None:
    async with asyncio.timeout(5):
        while pool.stuck:
            await asyncio.sleep(0.005)  # a thread that comes back tells nobody


async def test_a_thread_that_cannot_be_started_costs_one_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool("work", 1)
    ran: list[str] = []

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        for _ in range(3):
            with pytest.raises(Unavailable, match="run out of threads"):
                await pool.run(ran.append, "refused")
    await pool.run(ran.append, "later", timeout=5)
    assert ran == ["later"]
