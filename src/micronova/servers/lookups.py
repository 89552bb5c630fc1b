"""What requests about servers name, looked up in the database.

These are flavors, key pairs, hosts, availability zones, server groups and other servers.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import sqlalchemy as sa

from micronova.db import aggregates, flavors, instances, keypairs, nodes, server_groups, services
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.scheduling import GROUP_HINT, SERVER_HINTS, GroupSpec
from micronova.objects.service_names import COMPUTE


class DestinationRequest(Protocol):
    """The parts of a request that say on which hosts its servers may be."""

    availability_zone: str | None
    force_host: str | None
    force_node: str | None
    requested_host: str | None
    requested_node: str | None


def flavor_for(conn: sa.Connection, context: RequestContext, flavor_id: str, *, present: str | None = None) -> Flavor:
    """Return a flavor; raise Invalid if the caller has none of that id.

    One that is disabled counts as none, as in Nova, unless it is the `present` one of the server.
    """
    missing = Invalid(f"Flavor {flavor_id} could not be found.")
    try:
        flavor = flavors.get(conn, flavor_id, None if context.is_admin else context.project_id)
    except NotFound:
        raise missing from None
    if flavor.disabled and flavor.id != present:
        raise missing
    return flavor


def public_key(conn: sa.Connection, context: RequestContext, name: str) -> str:
    """Return the public key of one of the caller's key pairs; raise Invalid if there is none of that name."""
    try:
        return keypairs.get(conn, context.user_id, name).public_key
    except NotFound:
        raise Invalid(f"Invalid key_name provided: there is no key pair {name!r} of yours.") from None


def host_exists(conn: sa.Connection, host: str) -> bool:
    """Return whether there is a compute host of that name, up or not."""
    return bool(services.list_(conn, binary=COMPUTE, host=host))


def check_host(conn: sa.Connection, host: str) -> None:
    """Raise Invalid if there is no compute host of that name."""
    if not host_exists(conn, host):
        raise Invalid(f"Compute host {host} could not be found.")


def check_node(conn: sa.Connection, node: str, hosts: Set[str]) -> None:
    """Raise Invalid if there is no node of that name, or not on these hosts."""
    found = nodes.hosts_of_name(conn, node)
    if not found or not hosts <= found:
        raise Invalid(f"Compute host {node} could not be found.")


def check_zone(conn: sa.Connection, zone: str, default_zone: str) -> None:
    """Raise Invalid if an availability zone has no host in service."""
    if not aggregates.zone_is_in_service(conn, zone, default_zone):
        raise Invalid(f"The requested availability zone {zone!r} is not available.")


def check_destination(conn: sa.Connection, request: DestinationRequest, default_zone: str) -> None:
    """Refuse hosts, nodes and availability zones that do not exist."""
    hosts = {host for host in (request.force_host, request.requested_host) if host is not None}
    for host in hosts:
        check_host(conn, host)
    for node in {node for node in (request.force_node, request.requested_node) if node is not None}:
        check_node(conn, node, hosts)
    wanted = request.availability_zone
    if wanted is not None and request.force_host is None:  # the scheduler compares the zone of a forced host
        check_zone(conn, wanted, default_zone)


def zone_to_keep(conn: sa.Connection, request: DestinationRequest, default: str | None) -> str | None:
    """Return the availability zone that a new server stays in; `default` is that of requests that name none.

    What is named before a forced host is not a zone if no aggregate has it, as in Nova: moves may leave it.
    """
    zone = request.availability_zone or default
    if zone is not None and request.force_host is not None and not aggregates.has_zone(conn, zone):
        return None
    return zone


def no_group(id: str) -> Invalid:
    """Return the error for a server group that the project does not have."""
    return Invalid(f"Instance group {id} could not be found.")


def hinted_group(conn: sa.Connection, project_id: str, hints: Mapping[str, Sequence[str]]) -> GroupSpec | None:
    """Return the server group that the hint `group` names; raise Invalid if the project has none of that id."""
    named = hints.get(GROUP_HINT)
    if not named:
        return None
    try:
        group = server_groups.get(conn, named[0])
    except NotFound:
        group = None
    if group is None or group.project_id != project_id:
        raise no_group(named[0])
    return GroupSpec(
        id=group.uuid,
        policy=group.policy,
        max_server_per_host=int((group.rules or {}).get("max_server_per_host", 1)),
    )


def check_hinted_servers(conn: sa.Connection, project_id: str, hints: Mapping[str, Sequence[str]]) -> None:
    """Refuse hints that name servers which the project does not have."""
    named = {uuid: hint for hint in SERVER_HINTS for uuid in hints.get(hint, ())}
    if not named:
        return
    found = instances.get_many(conn, list(named))
    for uuid, hint in named.items():
        if uuid not in found or found[uuid]["project_id"] != project_id:
            raise Invalid(f"The scheduler hint {hint} names the server {uuid}, which could not be found.")
