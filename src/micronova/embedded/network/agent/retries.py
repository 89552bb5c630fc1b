"""When verbs that failed are tried again: after pauses that grow, so that what always fails costs little.

A network of one tenant may fail for ever, and a verb may take half a minute to fail. Other networks must not wait for
it again and again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from micronova.objects.clock import Clock
from micronova.privileged import verbs as v

FIRST_PAUSE = 1.0  # seconds; twice as long after each further failure of the same verb
LONGEST_PAUSE = 30.0  # seconds

Key = tuple[str, ...]


@dataclass(slots=True)
class _Failure:
    verb: v.Verb | None
    reason: str
    pause: float
    again_at: float  # by the monotonic clock


class Retries:
    """The verbs that failed, by their keys. Other work of the agent has a key, too, and no verb."""

    def __init__(self, clock: Clock, shared: Collection[Key]) -> None:
        """`shared` are the keys of verbs that all networks depend on."""
        self._clock = clock
        self._shared = frozenset(shared)
        self._failures: dict[Key, _Failure] = {}

    def failed(self, key: Key, reason: str, verb: v.Verb | None = None) -> None:
        """Note a failure; the pause begins anew if the verb is another one than the last time."""
        before = self._failures.get(key)
        same = before is not None and before.verb == verb
        pause = min(before.pause * 2, LONGEST_PAUSE) if before is not None and same else FIRST_PAUSE
        self._failures[key] = _Failure(verb, reason, pause, self._clock.monotonic() + pause)

    def succeeded(self, key: Key) -> None:
        """Note a success. What failed may have depended on it, and is tried again at once."""
        if self._failures.pop(key, None) is not None:
            self.hurry()

    def waiting(self, verb: v.Verb) -> str | None:
        """Return why this verb failed if it is not yet to be tried again, else None."""
        known = self._failures.get(verb.key)
        if known is None or known.verb != verb or self._clock.monotonic() >= known.again_at:
            return None
        return known.reason

    def last(self, verbs: Iterable[v.Verb]) -> list[v.Verb]:
        """Return verbs in their order, those that failed after all others, unless all networks depend on them."""
        failed = self._failures.keys() - self._shared
        return sorted(verbs, key=lambda verb: verb.key in failed)

    def hurry(self) -> None:
        """Let everything be tried again at once; the pauses still grow if it fails."""
        for each in self._failures.values():
            each.again_at = 0.0

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget the failures of verbs whose devices have changed."""
        for key in keys:
            self._failures.pop(key, None)

    def keep(self, keys: Collection[Key]) -> None:
        """Forget the failures of verbs that are not wanted any more."""
        self._failures = {key: each for key, each in self._failures.items() if each.verb is None or key in keys}

    def delay(self) -> float:
        """Return the seconds until something is to be tried again."""
        soonest = min((each.again_at for each in self._failures.values()), default=0.0)
        return max(0.0, soonest - self._clock.monotonic()) if self._failures else FIRST_PAUSE
