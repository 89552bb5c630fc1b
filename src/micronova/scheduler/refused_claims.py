"""Distinguishes claims that lost a race against another request from claims that would be refused again and again.

A node that refused a claim is read again before the next decision. If it refuses another claim for the same reason, and
is still as it was read after the first one, nobody took anything there: the decision does not see what the claim sees,
and would choose the node again. Such a node gets at most half as many instances of the request, and finally none.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from micronova.db.claims import ClaimFailure

log = logging.getLogger(__name__)


class RefusedClaims:
    """The claims of one request that were refused."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}  # the most instances that nodes may get
        self.reasons: set[str] = set()  # for which they refused more
        self._last: dict[tuple[str, str], int] = {}  # of the last claim: instances by node and reason
        self._seen: dict[tuple[str, str], object] = {}

    def note(self, failures: Iterable[ClaimFailure], asked: Mapping[str, int]) -> None:
        """Note that the last claim was refused; `asked` is how many instances it had by node."""
        self._last = {(each.node_uuid, each.reason): asked.get(each.node_uuid, 1) for each in failures}

    def are_final(self) -> bool:
        """Return whether the last claim was refused by such nodes alone: no other request was faster."""
        return bool(self._last) and all(node in self.limits for node, _ in self._last)

    def compare(self, known: Callable[[str], object]) -> None:
        """Limit nodes that refused the last claim and are as before; `known` returns what was read of one since."""
        for (node, reason), asked in self._last.items():
            state = known(node)
            if (node, reason) in self._seen and self._seen[node, reason] == state:
                self.limits[node] = asked // 2
                self.reasons.add(reason)
                log.warning(
                    "node %s passes the filters and has refused %d instances of a request twice (%s), although no "
                    "other request changed it; it gets %d at most; see `micronova audit`",
                    node,
                    asked,
                    reason,
                    self.limits[node],
                )
            self._seen[node, reason] = state
        self._last = {}
