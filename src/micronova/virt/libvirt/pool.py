"""Threads for what blocks: bounded, and with a way out when a call never returns.

A call of a hung hypervisor holds its thread for ever. The caller gets Unavailable after its time-out, and the pool
takes another thread, up to a limit; beyond that calls fail at once instead of queueing behind the dead. Threads
are daemons: a hung one does not keep the process from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from micronova.objects.errors import Unavailable

T = TypeVar("T")

STUCK_LIMIT = 3
"""How many times its size a pool may lose to calls that never return."""
CANCEL_WAIT = 30.0
"""How long a cancelled caller waits for a call under way: its effect should be there before it is undone."""


class Overdue(Unavailable):
    """A call did not return in time. It may still do so, and have its effect then."""

    def __init__(self, message: str, call: asyncio.Future[Any]) -> None:
        super().__init__(message)
        self.call = call


class Pool:
    """A few named threads."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._stuck = 0
        self._started = 0

    @property
    def stuck(self) -> int:
        """How many calls did not return in time and still have not."""
        return self._stuck

    async def run(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Call a function that blocks.

        A call that has not begun when its caller gives up never begins. One that is under way is waited for when
        the caller is cancelled, and left to itself after the time-out.
        """
        if self._stuck >= self._size * STUCK_LIMIT:
            raise Unavailable(f"Too many calls hang: {self._name} does not answer.")
        future: Future[T] = Future()
        overdue = False

        def job() -> T:
            nonlocal overdue
            try:
                return function(*args)
            finally:
                with self._lock:
                    if overdue:
                        overdue = False
                        self._stuck -= 1

        self._submit(future, job)
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(_look_at)
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout)
        except asyncio.CancelledError:
            if not future.cancel():
                await asyncio.wait({answer}, timeout=CANCEL_WAIT)
            raise
        if done:
            return answer.result()
        if future.cancel():
            raise Unavailable(f"{self._name} is too busy: a call waited {timeout:g} s for its turn.")
        with self._lock:
            if not future.done():
                overdue = True
                self._stuck += 1
                self._grow()
        raise Overdue(f"{self._name} did not answer within {timeout:g} s.", answer)

    def close(self) -> None:
        """Let the threads end once they are idle."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _submit(self, future: Future[T], job: Callable[[], T]) -> None:
        with self._lock:
            self._jobs.put((future, job))
            self._grow()

    def _grow(self) -> None:
        if self._idle < self._jobs.qsize() and self._threads < self._size + self._stuck:
            self._threads += 1
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._threads > self._size + self._stuck:
                    # A stuck call has come back: the thread that stood in for it is not needed any more.
                    self._threads -= 1
                    return
                self._idle += 1
            item = self._jobs.get()
            with self._lock:
                self._idle -= 1
                if item is None:
                    self._threads -= 1
                    return
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, job


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not answer.cancelled():
        answer.exception()
