"""What ports ask of resource providers besides an address, such as a guaranteed bandwidth.

The network service shows it as the port's `resource_request`, in one of two forms. The older one is a group of
resources without an id. The newer one (extension `port-resource-request-groups`) has several groups with ids, and says
which of them have to be served in one subtree of providers. Compute answers with the providers that serve the groups,
in the port's `binding:profile`, as `allocation`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.wrong_values import wrong_value

Allocation: TypeAlias = str | dict[str, str]
"""The value of `allocation` in a port's binding:profile: a provider, or the providers by group."""
_MOST = 2_147_483_647
_Amounts = dict[Annotated[str, msgspec.Meta(max_length=255)], Annotated[int, msgspec.Meta(ge=0, le=_MOST)]]
_MOST_GROUPS = msgspec.Meta(max_length=16)


class PortGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that one provider serves."""

    id: str = ""  # empty: the request is of the older form
    resources: _Amounts = {}
    required: tuple[str, ...] = ()  # traits of the provider


class PortResources(msgspec.Struct, frozen=True, kw_only=True):
    """What one port asks for; a port that asks for nothing has none."""

    port_id: str
    groups: tuple[PortGroup, ...]
    same_subtree: tuple[str, ...] = ()  # ids of groups


class ServedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group with the provider that serves it."""

    id: str = ""
    provider: str
    resources: dict[str, int]


class ServedPort(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds for one of its ports."""

    port_id: str
    groups: tuple[ServedGroup, ...]

    @property
    def allocation(self) -> Allocation:
        """What the network service is told of the port when it is bound."""
        by_group = {each.id: each.provider for each in self.groups}
        return by_group.get("", by_group)

    def answers(self, wanted: PortResources | None) -> bool:
        """Return whether a port asks for just what the server holds for it."""
        asked = {} if wanted is None else {each.id: each.resources for each in wanted.groups}
        return asked == {each.id: each.resources for each in self.groups}


class BoundPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port that is bound to the host of its server, as the network service has it."""

    server: str
    port_id: str
    allocation: Allocation | None  # None: it is bound without a provider
    asks: PortResources | None

    @property
    def providers(self) -> frozenset[str]:
        """The providers that it is bound with."""
        if self.allocation is None or isinstance(self.allocation, str):
            return frozenset({self.allocation} if self.allocation else ())
        return frozenset(self.allocation.values())


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """A `resource_request` of either form."""

    resources: _Amounts = {}
    required: tuple[str, ...] = ()
    request_groups: Annotated[tuple[PortGroup, ...], _MOST_GROUPS] = ()
    same_subtree: Annotated[tuple[str, ...], _MOST_GROUPS] = ()


def resources_of(port: Mapping[str, Any]) -> PortResources | None:
    """Return what a port, as the network service shows it, asks for; raise Invalid if that cannot be read."""
    shown = port.get("resource_request")
    if not shown:
        return None
    try:
        request = msgspec.convert(shown, _Request)
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, _Request).named("the request")
        raise Invalid(f"The resource request of port {port['id']} cannot be read: {wrong}.") from None
    old = PortGroup(resources=request.resources, required=request.required)
    groups = tuple(
        msgspec.structs.replace(each, resources={name: amount for name, amount in each.resources.items() if amount})
        for each in request.request_groups or (old,)
        if any(each.resources.values())
    )
    ids = [each.id for each in groups]
    if request.request_groups and ("" in ids or len(set(ids)) < len(ids)):
        raise Invalid(f"The resource request of port {port['id']} has groups without ids of their own.")
    related = tuple(id for id in dict.fromkeys(request.same_subtree) if id in ids)
    return PortResources(port_id=port["id"], groups=groups, same_subtree=related) if groups else None


def all_answered(served: Iterable[ServedPort], wanted: Iterable[PortResources]) -> bool:
    """Return whether a server holds for its ports just what these ask for, and nothing for others."""
    asking = {each.port_id: each for each in wanted}
    held = {each.port_id: each for each in served}
    return held.keys() == asking.keys() and all(each.answers(asking[id]) for id, each in held.items())


def allocations_of(ports: Iterable[ServedPort]) -> dict[str, Allocation]:
    """Return what the network service is told of ports when they are bound, by port."""
    return {each.port_id: each.allocation for each in ports if each.groups}
