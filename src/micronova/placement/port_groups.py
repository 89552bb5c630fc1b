"""The request groups of ports: each group of a port's resource request is served by one provider of the node's tree."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from micronova.objects.port_resources import PortGroup, PortResources, ServedGroup, ServedPort
from micronova.placement.candidates import Amounts
from micronova.placement.model import RequestGroup, ResourceRequest


def _suffix(port: PortResources, id: str) -> str:
    """Return the suffix of a group. No suffix of a flavor has a colon."""
    return f"{port.port_id}:{id}"


def _group(port: PortResources, group: PortGroup) -> RequestGroup:
    required = tuple(frozenset({trait}) for trait in sorted(set(group.required)))
    return RequestGroup(suffix=_suffix(port, group.id), resources=group.resources, required=required)


def request_of(ports: Sequence[PortResources], isolate: bool = False) -> ResourceRequest:
    """Return the request for what ports ask for; with `isolate`, each group has another provider."""
    return ResourceRequest(
        groups=tuple(_group(port, group) for port in ports for group in port.groups),
        isolate=isolate,
        same_subtrees=tuple(
            frozenset(_suffix(port, id) for id in port.same_subtree) for port in ports if port.same_subtree
        ),
    )


def served(ports: Sequence[PortResources], mappings: Mapping[str, Sequence[str]]) -> tuple[ServedPort, ...]:
    """Return ports with the providers that serve their groups; `mappings` has the providers by suffix."""
    return tuple(
        ServedPort(
            port_id=port.port_id,
            groups=tuple(
                ServedGroup(id=group.id, provider=mappings[_suffix(port, group.id)][0], resources=dict(group.resources))
                for group in port.groups
            ),
        )
        for port in ports
    )


def amounts_of(groups: Iterable[ServedGroup]) -> Counter[tuple[str, str]]:
    """Return what serves groups, by provider and resource class."""
    total: Counter[tuple[str, str]] = Counter()
    for each in groups:
        total.update({(each.provider, name): amount for name, amount in each.resources.items()})
    return total


def followed(ports: Sequence[ServedPort], before: Amounts, after: Amounts) -> tuple[ServedPort, ...]:
    """Return what serves ports after the allocations of their server were replaced through the Placement API.

    A group goes with its amounts to another provider, if its own does not have them any more. Else its amounts grow and
    shrink with what the server has of its provider, if no other group of a port has the same there. What cannot be told
    from the amounts stays as it is recorded.
    """
    groups = [group for port in ports for group in port.groups]
    now = _with_providers(groups, before, after)
    if now == groups:
        now = _with_amounts(groups, before, after)
    rest = iter(now)
    return tuple(msgspec.structs.replace(port, groups=tuple(next(rest) for _ in port.groups)) for port in ports)


def _with_providers(groups: Sequence[ServedGroup], before: Amounts, after: Amounts) -> list[ServedGroup]:
    left, risen = Counter(after), Counter(after) - Counter(before)
    kept = [False] * len(groups)
    for number, group in enumerate(groups):
        own = amounts_of([group])
        if own <= left:
            kept[number] = True
            left -= own
    found = []
    for stays, group in zip(kept, groups, strict=True):
        others = () if stays else sorted({provider for provider, _ in risen})
        for each in (msgspec.structs.replace(group, provider=provider) for provider in others):
            own = amounts_of([each])
            if own <= left and own <= risen:
                left -= own
                risen -= own
                found.append(each)
                break
        else:
            found.append(group)
    return found


def _with_amounts(groups: Sequence[ServedGroup], before: Amounts, after: Amounts) -> list[ServedGroup]:
    recorded = amounts_of(groups)

    def amount(group: ServedGroup, name: str) -> int:
        key = group.provider, name
        besides = before.get(key, 0) - recorded[key]
        alone = recorded[key] == group.resources[name]
        return after[key] - besides if alone and 0 <= besides < after.get(key, 0) else group.resources[name]

    return [
        msgspec.structs.replace(each, resources={name: amount(each, name) for name in each.resources})
        for each in groups
    ]
