"""Lockout after repeated wrong passwords of a user, or secrets of an application credential, from one address.

After `attempts` failures in a row, every further attempt for that user or application credential from that address is
refused until `seconds` have passed since the last failure, even if the password or secret is right. Refused attempts do
not count as failures, so a client that keeps trying does not prolong the lockout. Other addresses are not affected, so
nobody can lock another person out. An IPv6 client counts as its /64 network, in which it can choose any address. A
success resets the count. The counts are in memory only: a restart resets them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

ATTEMPTS = 5
SECONDS = 60.0


class Lockout:
    """Counts failures per address and user or application credential."""

    def __init__(
        self, now: Callable[[], float], *, attempts: int = ATTEMPTS, seconds: float = SECONDS, max_entries: int = 10_000
    ) -> None:
        self._now = now
        self._attempts = attempts
        self._seconds = seconds
        self._max_entries = max_entries
        self._failures: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()  # (failures, time of the last)

    def locked(self, key: Hashable) -> bool:
        """Return whether attempts are refused now."""
        failures, last = self._failures.get(key, (0, 0.0))
        if not failures:
            return False
        if self._now() - last >= self._seconds:
            del self._failures[key]
            return False
        return failures >= self._attempts

    def failed(self, key: Hashable) -> None:
        """Count a failure; forget the oldest counts if there are too many."""
        failures, _ = self._failures.pop(key, (0, 0.0))
        self._failures[key] = (failures + 1, self._now())
        while len(self._failures) > self._max_entries:
            self._failures.popitem(last=False)

    def succeeded(self, key: Hashable) -> None:
        """Reset the count."""
        self._failures.pop(key, None)
