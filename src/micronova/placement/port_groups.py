"""The request groups of ports: each group of a port's resource request is served by one provider of the node's tree."""

from collections.abc import Mapping, Sequence

from micronova.objects.port_resources import PortGroup, PortResources, ServedGroup, ServedPort
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
