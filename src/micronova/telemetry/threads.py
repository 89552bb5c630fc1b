"""Pools of threads whose use metrics show."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ThreadUse(NamedTuple):
    """How many calls run in threads or wait for one, and how many threads there may be."""

    calls: int
    threads: int


class CountedThreads(ThreadPoolExecutor):
    """A pool that knows how many of its calls have not ended."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._size = threads
        self._calls = 0
        self._lock = threading.Lock()  # calls end in threads

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a function in a thread."""
        future = super().submit(fn, *args, **kwargs)
        with self._lock:
            self._calls += 1
        future.add_done_callback(self._ended)
        return future

    def use(self) -> ThreadUse:
        """Return how the pool is used."""
        return ThreadUse(self._calls, self._size)

    def _ended(self, _: "Future[R]") -> None:
        with self._lock:
            self._calls -= 1
