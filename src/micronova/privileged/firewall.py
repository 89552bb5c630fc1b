"""The firewall of a cloud: its rule set is loaded in one transaction, without the rules of ports that nft refuses."""

from collections.abc import Collection, Sequence

import msgspec

from micronova.privileged import rulesets
from micronova.privileged import verbs as v
from micronova.privileged.devices import load
from micronova.privileged.kernel import Failed, inside, run


def load_firewall(verb: v.LoadFirewall, namespace: str) -> dict[str, str]:
    """Load the firewall; return the taps that stay closed because their rules cannot be loaded, with the reason.

    Raise Failed if no port is the cause: the former rule set stays.
    """
    try:
        load(namespace, rulesets.firewall(verb))
        return {}
    except Failed as error:
        with inside(namespace):
            closed = dict(_faulty(verb, verb.guarded))
        if not closed:
            raise error
    load(namespace, rulesets.firewall(_without(verb, closed)))
    return closed


def _faulty(verb: v.LoadFirewall, ports: Sequence[v.Guarded]) -> list[tuple[str, str]]:
    """Return the ports whose rules nft refuses; few of many are found with few attempts."""
    others = {port.tap for port in verb.guarded} - {port.tap for port in ports}
    try:
        run(["nft", "--check", "-f", "-"], rulesets.firewall(_without(verb, others)))
        return []
    except Failed as error:
        if not ports:
            raise  # it is not a port's fault
        if len(ports) == 1:
            _faulty(verb, ())
            return [(ports[0].tap, str(error))]
    middle = len(ports) // 2
    return [*_faulty(verb, ports[:middle]), *_faulty(verb, ports[middle:])]


def _without(verb: v.LoadFirewall, closed: Collection[str]) -> v.LoadFirewall:
    """Return a firewall in which some ports are closed."""
    guarded = tuple(v.Guarded(tap=port.tap, zone=port.zone) if port.tap in closed else port for port in verb.guarded)
    named = {rule.remote_group for port in guarded for rule in port.rules}
    groups = tuple(group for group in verb.groups if group.id in named)
    return msgspec.structs.replace(verb, guarded=guarded, groups=groups)
