"""The message of NoValidHost, which users read if there is no host for their servers.

It says what no host is or has, how many hosts were refused for which reason, and for how many servers of a request
there is room. It names no host and no other server, and no filter, except those that failed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import Explanation, FilterStep, counted
from micronova.objects.scheduling import RequestSpec
from micronova.placement import extra_specs
from micronova.placement.model import RequestGroup

NOT_ENOUGH: Final = "No valid host was found. There are not enough hosts available"
LONGEST: Final = 255  # characters of a fault's message
_LONGEST_NAME: Final = 40  # characters of a zone in it
_LONGEST_LIST: Final = 80  # characters of traits or amounts in it
_ANY: Final = "meets all requirements of the request"
_ANY_KNOWN: Final = "is known to meet all requirements of the request"
_SINGULAR: Final = {"are": "is", "have": "has", "do": "does", "lack": "lacks", "were": "was", "refuse": "refuses"}
_REFUSED_CLAIMS: Final = {
    "capacity": "has room for the server",
    "disabled": "is enabled",
    "down": "is up",
    "group": "is one that the server group allows",
    "search": "was searched to the end for the further resources that flavor and ports ask for",
    "topology": "has NUMA nodes and PCI devices for the server",
}
CLAIM_LACK: Final = "refuse the claim"  # of hosts that refuse one; users read "3 hosts …"


class Removal(NamedTuple):
    """One step of a decision that removed hosts."""

    hosts: int
    describe: Callable[[], str]  # returns what a host that passes is or has
    lack: str  # what the removed hosts are or have, in the plural
    narrows: bool = False  # they are not those that the request is about
    certain: bool = True  # False: they were not examined to the end, and may be right


class Room(NamedTuple):
    """How many servers of a request have a host, and how many need one."""

    placed: int
    servers: int


def message(spec: RequestSpec, removals: Sequence[Removal], room: Room, *, only: bool) -> str:
    """Return why there is no host; `only`: the request is about one host."""
    if not removals:
        return f"{NOT_ENOUGH}."
    remark = f" There is room for {room.placed} of {room.servers} servers." if room.servers > 1 else ""
    if only and len(removals) == 1:
        [refused] = removals
        needed = f"the server needs one that {refused.describe()}"
        return f"{NOT_ENOUGH}: the only possible host {_singular(refused.lack)}: {needed}.{remark}"
    other = "other " if spec.ignore_hosts else ""
    zone = f"in the availability zone {_shortened(spec.availability_zone)}" if spec.availability_zone else ""
    refusals = sorted((each for each in removals if not each.narrows), key=lambda each: (each.certain, -each.hosts))
    if not refusals:
        none = f"no {other}host is {zone}" if zone else f"there is no {other}host"
        return f"{NOT_ENOUGH}: {none}.{remark}"
    subject = " ".join(filter(None, ("no", f"{other}host", zone)))
    shortest = _ANY if all(each.certain for each in refusals) else _ANY_KNOWN
    text = ""
    for who, predicate, counts in [
        *([(subject, _listed([each.describe() for each in refusals]), len(refusals))] if shortest == _ANY else []),
        *((who, shortest, counts) for who in (subject, "no host") for counts in range(len(refusals), 0, -1)),
    ]:
        text = f"{NOT_ENOUGH}: {who} {predicate}; {_counts(refusals, counts)}.{remark}"
        if len(text) <= LONGEST:
            break
    return text


def claims_refused(explanation: Explanation, reasons: Collection[str]) -> NoValidHost:
    """Return the error of a request that a decision found hosts for, if these refuse the claim for these reasons."""
    left = explanation.filters[-1].remaining if explanation.filters else explanation.hosts
    refused = FilterStep(name=claim_step(reasons), removed=left, remaining=0)
    with_claim = msgspec.structs.replace(explanation, filters=(*explanation.filters, refused))
    text = f"{NOT_ENOUGH}: no host {accepts_claim(reasons)}."
    return NoValidHost(text, hosts=explanation.hosts, placed=0, reasons=with_claim.reasons())


def claim_step(reasons: Collection[str]) -> str:
    """Return the name of the step that removes hosts that refuse claims for these reasons."""
    return f"Claim({', '.join(sorted(reasons))})"


def accepts_claim(reasons: Collection[str]) -> str:
    """Return what a host is or has that does not refuse claims for these reasons."""
    return _listed([_REFUSED_CLAIMS[reason] for reason in sorted(reasons)])


def serves_request_groups(spec: RequestSpec) -> str:
    """Return the predicate that hosts fail whose providers cannot serve what flavor and ports ask for besides.

    It does not say what ports ask for: only services and admins see that.
    """
    of_flavor = extra_specs.resource_request(spec.flavor, spec.image)
    if not spec.ports:
        listed = _short([_asked(each) for each in of_flavor.groups]) if of_flavor is not None else ""
        return f"has the further resources that the flavor asks for{listed and f' ({listed})'}"
    if of_flavor is not None:
        return "has the further resources that flavor and ports ask for"
    ports = "the port asks" if len(spec.ports) == 1 else "the ports ask"
    return f"has the resources, such as bandwidth, that {ports} for"


def has_traits(required: Collection[str], forbidden: Collection[str]) -> str:
    """Return the predicate that hosts fail that lack a trait, or have one that is forbidden."""
    listed = _short([*sorted(required), *(f"not {name}" for name in sorted(forbidden))])
    return f"has the required traits and none that is forbidden{listed and f' ({listed})'}"


def _asked(group: RequestGroup) -> str:
    amounts = ", ".join(f"{name}={amount}" for name, amount in group.resources.items())
    traits = sorted(name for names in group.required for name in names)
    traits += [f"not {name}" for name in sorted(group.forbidden)]
    return f"{amounts} with {' and '.join(traits)}" if traits else amounts


def _short(parts: Sequence[str]) -> str:
    """Return parts as a list, if that leaves room in the fault for all else."""
    listed = ", ".join(parts)
    return listed if len(listed) <= _LONGEST_LIST else ""


def search_ended() -> str:
    """Return the predicate that hosts fail whose providers were not searched to the end."""
    return _REFUSED_CLAIMS["search"]


def compared() -> str:
    """Return the predicate that hosts fail that were not compared, because that takes long."""
    return "was compared with the request, which takes long"


def _listed(predicates: Sequence[str]) -> str:
    *others, last = dict.fromkeys(predicates)  # two filters may ask for the same
    return f"{', '.join(others)} and {last}" if others else last


def _counts(refused: Sequence[Removal], most: int) -> str:
    """Return how many hosts were refused for which reason, up to `most`: 12 hosts have too little room, 1 is disabled.

    Hosts that are refused for further reasons are one number.
    """
    hosts: Counter[str] = Counter()
    for each in refused:
        hosts[each.lack] += each.hosts
    # What is not known comes first: it says that others may have room.
    unknown = {each.lack for each in refused if not each.certain}
    ordered = sorted(hosts.items(), key=lambda lack: (lack[0] not in unknown, -lack[1]))
    first, *others = ordered[:most]
    parts = [f"{counted(first[1], 'host')} {_agreeing(*first)}"]
    parts += [f"{count} {_agreeing(lack, count)}" for lack, count in others]
    if further := sum(count for _, count in ordered[most:]):
        parts.append(f"{further} {_agreeing('are refused for other reasons', further)}")
    return ", ".join(parts)


def _shortened(name: str) -> str:
    """Return a name, of a long one its beginning: a fault has more to say."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _agreeing(lack: str, hosts: int) -> str:
    """Return a predicate in the singular for one host, else in the plural."""
    return _singular(lack) if hosts == 1 else lack


def _singular(lack: str) -> str:
    """Return a predicate in the singular."""
    verb, _, rest = lack.partition(" ")
    return f"{_SINGULAR.get(verb, verb)} {rest}"
