"""Passwords and secrets, hashed with argon2 in separate threads so that the event loop never waits.

The clients are served in turn, one request of each, however many of each wait. When too many requests wait, the latest
one of the client with the most is refused. So a client that guesses many passwords delays itself and nobody else.
"""

import asyncio
import base64
import contextlib
import ctypes
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

import argon2
from argon2.exceptions import InvalidHashError, VerificationError

from micronova.http.addresses import client_network
from micronova.objects.errors import Unavailable
from micronova.telemetry.threads import CountedThreads, ThreadUse

# argon2id with 19 MiB, two passes and one lane, as OWASP recommends. It takes about 30 ms of one core.
MEMORY_KIB = 19_456
PASSES = 2
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE = 1 << 20

OURSELVES = ""  # the client of work that this process has for itself

T = TypeVar("T")


def _never() -> bool:
    return False


def _return_large_blocks() -> None:
    """Make glibc return blocks as large as argon2 uses to the system; otherwise each thread may keep its last one."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


class _Turns:
    """Limits how many requests work at once, and serves the clients that wait in turn."""

    def __init__(self, at_once: int, limit: int) -> None:
        self._free = at_once
        self._room = limit - at_once  # how many may wait
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client is the first

    async def acquire(self, client: str) -> None:
        """Wait for a turn; raise Unavailable if too many wait."""
        if self._free:
            self._free -= 1
            return
        if self.waiting >= self._room:
            self._make_room(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.release()  # the turn came at the same moment
            else:
                self._remove(client, turn)
            raise

    def release(self) -> None:
        """Give the turn to the next client that waits."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            if queue:
                self._queues.move_to_end(client)
            else:
                del self._queues[client]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a turn."""
        return sum(map(len, self._queues.values()))

    def _make_room(self, client: str) -> None:
        """Refuse the latest request of the client with the most; raise Unavailable if it is this client."""
        error = Unavailable("Too many log-ins at the same moment: try again shortly.")
        most = max(self._queues, key=lambda each: len(self._queues[each]), default=client)
        if len(self._queues.get(most, ())) <= len(self._queues.get(client, ())) + 1:
            raise error
        turn = self._queues[most].pop()
        if not turn.done():
            turn.set_exception(error)

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[client]


class Passwords:
    """Hashes and checks passwords, a few at a time."""

    def __init__(
        self, *, threads: int = 2, waiting: int = 256, memory_kib: int = MEMORY_KIB, passes: int = PASSES
    ) -> None:
        self._hasher = argon2.PasswordHasher(time_cost=passes, memory_cost=memory_kib, parallelism=1)
        self._pool = CountedThreads(threads, "argon2")
        self._turns = _Turns(threads, waiting)
        _return_large_blocks()
        # A hash for users that do not exist: it takes as long to check as any other, and no known password matches it.
        salt, digest = (base64.b64encode(secrets.token_bytes(size)).decode().rstrip("=") for size in (16, 32))
        self._dummy = f"$argon2id$v=19$m={memory_kib},t={passes},p=1${salt}${digest}"

    async def hash(self, password: str, client: str = OURSELVES) -> str:
        """Return the hash to store for a password, which a client has sent."""
        hashed = await self._run(lambda: self._hasher.hash(password), _never, client)
        assert hashed is not None
        return hashed

    async def check(
        self, stored: str | None, password: str, refuse: Callable[[], bool] = _never, client: str = OURSELVES
    ) -> bool:
        """Return whether the password that a client has sent is right.

        Without a stored hash it is wrong, after the same time.

        `refuse` is called when a thread is free; if it returns True, the answer is False without a check. So only the
        first few of many guesses that arrive together are checked.
        """
        right = await self._run(lambda: self._verify(stored or self._dummy, password), refuse, client)
        return bool(right) and stored is not None

    def _verify(self, stored: str, password: str) -> bool:
        try:
            return self._hasher.verify(stored, password)
        except (VerificationError, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], T], refuse: Callable[[], bool], client: str) -> T | None:
        await self._turns.acquire(client_network(client))
        try:
            if refuse():
                return None
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._turns.release()

    def use(self) -> ThreadUse:
        """Return how the threads are used; those who wait for a turn count as calls."""
        calls, threads = self._pool.use()
        return ThreadUse(calls + self._turns.waiting, threads)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
