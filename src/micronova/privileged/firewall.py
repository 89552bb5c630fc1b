"""The firewall of a cloud: its rule set is loaded in one transaction, without the rules of ports that nft refuses."""

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from micronova.privileged import rulesets
from micronova.privileged import verbs as v
from micronova.privileged.devices import load_ruleset
from micronova.privileged.kernel import Failed, TimedOut, fresh_namespace, run

SEARCH_SECONDS = 40.0
"""Seconds after which the search for ports with faulty rules ends with what it has found.

The search and the rule set before and after it have to end before the client stops waiting (`client.ANSWER_SECONDS`).
"""


class _Refused(NamedTuple):
    port: v.FilteredPort
    groups: tuple[v.Group, ...]  # that its rules name
    reason: str


class FirewallLoader:
    """Loads the rule set of a cloud, and remembers the ports whose rules nft refuses.

    Otherwise each change of another port would cause the same search, which takes several times as long as to load
    the rule set.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._refused: dict[str, _Refused] = {}  # by tap

    def load(self, verb: v.LoadFirewall) -> dict[str, str]:
        """Load the firewall; return the taps that stay closed because their rules cannot be loaded, with the reason.

        Raise Failed if no port is the cause, or if the search for them takes too long: the former rule set stays. The
        next attempt continues with what was found.
        """
        self._forget_changed(verb)
        try:
            load_ruleset(self._namespace, rulesets.firewall(_without(verb, self._refused)))
        except TimedOut:
            raise
        except Failed:
            if not self._search(verb):
                raise
            load_ruleset(self._namespace, rulesets.firewall(_without(verb, self._refused)))
        return {tap: refused.reason for tap, refused in self._refused.items()}

    def _forget_changed(self, verb: v.LoadFirewall) -> None:
        """Forget the ports whose rules are other ones now."""
        self._refused = {
            port.tap: known
            for port in verb.filtered
            if (known := self._refused.get(port.tap)) is not None
            and (known.port, known.groups) == (port, _groups_of(verb, [port]))
        }

    def _search(self, verb: v.LoadFirewall) -> bool:
        """Note the ports whose rules nft refuses; return whether there are any that were not known."""
        known = len(self._refused)
        deadline = time.monotonic() + SEARCH_SECONDS

        def search(ports: Sequence[v.FilteredPort], *, refused: bool) -> bool:
            """Search a part of the ports, of which the rules are `refused` together or may be."""
            found = len(self._refused) - known
            if found and time.monotonic() > deadline:
                raise Failed(
                    f"The rules of {found} ports were found to be faulty within {SEARCH_SECONDS:g} s; the search goes "
                    "on with the next attempt. Until it ends, the former rules stay."
                )
            if not refused or len(ports) == 1:
                reason = _reason(verb, ports)
                if reason is None:
                    return False
                if len(ports) == 1:
                    self._refused[ports[0].tap] = _Refused(ports[0], _groups_of(verb, ports), reason)
                    return True
            middle = len(ports) // 2
            first = search(ports[:middle], refused=False)
            return search(ports[middle:], refused=not first) or first

        # In a namespace without rules, which nft would have to replace in the check, too.
        with fresh_namespace():
            if (reason := _reason(verb, ())) is not None:
                raise Failed(reason)  # it is not a port's fault
            suspects = [port for port in verb.filtered if port.tap not in self._refused]
            return bool(suspects) and search(suspects, refused=True)


def _reason(verb: v.LoadFirewall, ports: Sequence[v.FilteredPort]) -> str | None:
    """Return why nft refuses a firewall with only these ports; None if it accepts it."""
    try:
        alone = msgspec.structs.replace(verb, filtered=tuple(ports), groups=_groups_of(verb, ports))
        run(["nft", "--check", "-f", "-"], rulesets.firewall(alone))
        return None
    except TimedOut:
        raise
    except Failed as error:
        return str(error)


def _groups_of(verb: v.LoadFirewall, ports: Collection[v.FilteredPort]) -> tuple[v.Group, ...]:
    named = {rule.remote_group for port in ports for rule in port.rules}
    return tuple(group for group in verb.groups if group.id in named)


def _without(verb: v.LoadFirewall, closed: Collection[str]) -> v.LoadFirewall:
    """Return a firewall in which some ports are closed."""
    if not closed:
        return verb
    filtered = tuple(
        v.FilteredPort(tap=port.tap, zone=port.zone) if port.tap in closed else port for port in verb.filtered
    )
    return msgspec.structs.replace(verb, filtered=filtered, groups=_groups_of(verb, filtered))
