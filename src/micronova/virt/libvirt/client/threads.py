"""Threads for calls that block. Their number is bounded, even when calls never return.

A call to a hung hypervisor blocks its thread for ever. The caller gets Unavailable after its timeout, and the pool
starts another thread, up to a limit. Beyond the limit calls fail at once instead of waiting behind calls that hang.
Threads are daemon threads, so a hung one does not keep the process from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from micronova.objects.errors import Unavailable, resource_exhausted

T = TypeVar("T")

STUCK_LIMIT = 3
"""A pool may have this many times its size in calls that do not return."""
CANCEL_WAIT = 30.0
"""Seconds that a cancelled caller waits for its running call, so that the caller can undo the call's effect."""


class CallOverdue(Unavailable):
    """A call did not return in time. It may still return, and have its effect, later."""

    def __init__(self, message: str, call: asyncio.Future[Any]) -> None:
        super().__init__(message)
        self.call = call


class ThreadPool:
    """A bounded number of named threads."""

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
        """The number of calls that exceeded their timeout and still run."""
        return self._stuck

    async def run(
        self,
        function: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        on_overdue: Callable[[asyncio.Future[Any]], None] | None = None,
    ) -> T:
        """Call a function that blocks and return its result.

        A call that has not begun when its caller gives up never begins. When the caller is cancelled, a running call is
        waited for, for CANCEL_WAIT seconds. After the timeout it is not: the caller gets CallOverdue. `on_overdue` gets
        a call that may still have its effect after this.
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

        def leave() -> None:
            nonlocal overdue
            with self._lock:
                if not future.done():
                    overdue = True
                    self._stuck += 1
                    self._grow()
            if on_overdue is not None:
                on_overdue(answer)

        self._submit(future, job)
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(_retrieve_error)
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout)
        except asyncio.CancelledError:
            if not future.cancel():
                try:
                    await asyncio.wait({answer}, timeout=CANCEL_WAIT)
                finally:
                    if not answer.done():
                        leave()
            raise
        if done:
            return answer.result()
        if future.cancel():
            raise Unavailable(f"{self._name} is too busy: a call waited {timeout:g} s for its turn.")
        leave()
        raise CallOverdue(f"{self._name} did not answer within {timeout:g} s.", answer)

    def close(self) -> None:
        """End the threads once they are idle."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _submit(self, future: Future[T], job: Callable[[], T]) -> None:
        with self._lock:
            self._jobs.put((future, job))
            try:
                self._grow()
            except BaseException:
                future.cancel()
                raise

    def _grow(self) -> None:
        if self._idle < self._jobs.qsize() and self._threads < self._size + self._stuck:
            self._threads += 1
            self._started += 1
            name = f"{self._name}-{self._started}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError as error:  # the system has no more threads; those that there are take the call
                self._threads -= 1
                if not self._threads:
                    raise resource_exhausted(error) or error from None

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._threads > self._size + self._stuck:
                    # A stuck call has returned: the extra thread that was started for it ends.
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


def _retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error of a call that nobody awaits any more, or asyncio logs it."""
    if not answer.cancelled():
        answer.exception()
