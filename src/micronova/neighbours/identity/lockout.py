"""Guessing is slow: repeated wrong passwords for one user from one address are refused for a while.

After `attempts` failures in a row every further attempt for that user from that address is refused, whether the
password is right or not, until `seconds` have passed since the last failure that counted. Refused attempts do not
count, so that the wait is not prolonged by a client that keeps trying. Other addresses are not affected: nobody can
lock somebody else out. A success clears the count. It lives in memory: a restart forgets it.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Lockout:
    """Counts failures per user and address."""

    def __init__(
        self, now: Callable[[], float], *, attempts: int = 5, seconds: float = 60.0, remember: int = 10_000
    ) -> None:
        self._now = now
        self._attempts = attempts
        self._seconds = seconds
        self._remember = remember
        self._failures: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()  # (failures, when the last was)

    def locked(self, key: Hashable) -> bool:
        """Say whether attempts are refused at the moment."""
        failures, last = self._failures.get(key, (0, 0.0))
        if not failures:
            return False
        if self._now() - last >= self._seconds:
            del self._failures[key]
            return False
        return failures >= self._attempts

    def failed(self, key: Hashable) -> None:
        """Count a failure; the longest forgotten ones make room."""
        failures, _ = self._failures.pop(key, (0, 0.0))
        self._failures[key] = (failures + 1, self._now())
        while len(self._failures) > self._remember:
            self._failures.popitem(last=False)

    def succeeded(self, key: Hashable) -> None:
        """Forget the failures."""
        self._failures.pop(key, None)
