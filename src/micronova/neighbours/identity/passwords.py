"""Passwords and secrets: argon2 in threads of their own, so that the event loop never waits for a hash."""

import asyncio
import base64
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import argon2
from argon2.exceptions import InvalidHashError, VerificationError

from micronova.objects.errors import Unavailable

# argon2id with 19 MiB, two passes, one lane: what OWASP recommends; about 30 ms of one core.
MEMORY_KIB = 19_456
PASSES = 2

T = TypeVar("T")


def _never() -> bool:
    return False


class Passwords:
    """Hashes and checks, a few at a time."""

    def __init__(
        self, *, threads: int = 2, waiting: int = 256, memory_kib: int = MEMORY_KIB, passes: int = PASSES
    ) -> None:
        self._hasher = argon2.PasswordHasher(time_cost=passes, memory_cost=memory_kib, parallelism=1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="argon2")
        self._turn = asyncio.Semaphore(threads)
        self._waiting = 0
        self._limit = waiting
        # Well-formed, as costly to check as any other, and the hash of nothing that anybody knows.
        salt, digest = (base64.b64encode(secrets.token_bytes(size)).decode().rstrip("=") for size in (16, 32))
        self._dummy = f"$argon2id$v=19$m={memory_kib},t={passes},p=1${salt}${digest}"

    async def hash(self, password: str) -> str:
        """Return what to store for a password."""
        hashed = await self._run(lambda: self._hasher.hash(password), _never)
        assert hashed is not None
        return hashed

    async def check(self, stored: str | None, password: str, refuse: Callable[[], bool] = _never) -> bool:
        """Say whether the password is right; without a stored hash it is not, and takes as long to find out.

        `refuse` is asked when the turn has come: of many guesses that arrive together only the first few count.
        """
        right = await self._run(lambda: self._verify(stored or self._dummy, password), refuse)
        return bool(right) and stored is not None

    def _verify(self, stored: str, password: str) -> bool:
        try:
            return self._hasher.verify(stored, password)
        except (VerificationError, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], T], refuse: Callable[[], bool]) -> T | None:
        if self._waiting >= self._limit:
            raise Unavailable("Too many log-ins at the same moment: try again shortly.")
        self._waiting += 1
        try:
            async with self._turn:
                if refuse():
                    return None
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
