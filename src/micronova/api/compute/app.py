"""All routes of the compute API, and what they need."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

from micronova.api import plugins
from micronova.api.compute import (
    aggregates,
    availability_zones,
    baremetal_nodes,
    diagnostics,
    extensions,
    fault_rules,
    flavor_access,
    flavor_extra_specs,
    flavors,
    floating_ips,
    hosts,
    hypervisors,
    image_metadata,
    images,
    instance_actions,
    interfaces,
    keypairs,
    limits,
    networks,
    quota_class_sets,
    quota_sets,
    remote_consoles,
    removed,
    security_groups,
    server_actions,
    server_addresses,
    server_create,
    server_external_events,
    server_groups,
    server_ips,
    server_metadata,
    server_password,
    server_security_groups,
    server_tags,
    server_topology,
    servers,
    services,
    simple_tenant_usage,
    versions_doc,
    volume_attachments,
)
from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.db.engine import Database
from micronova.http.service import Route
from micronova.http.versions import Versions
from micronova.objects.clock import Clock
from micronova.servers.actions import ServerActions
from micronova.servers.addresses import ServerAddresses
from micronova.servers.consoles import ConsoleLinks
from micronova.servers.create import ServerCreator
from micronova.servers.external_events import ExternalEvents
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.interfaces import Interfaces
from micronova.servers.security_groups import ServerSecurityGroups
from micronova.servers.service_removal import ServiceRemoval

VERSIONS = Versions("compute", 2, versions_doc.LEAST, versions_doc.NEWEST, "X-OpenStack-Nova-API-Version")


@dataclass(frozen=True, kw_only=True)
class APIDependencies:
    """What the resources of the compute API need."""

    database: Database
    clock: Clock
    random: Random
    creator: ServerCreator
    actions: ServerActions
    interfaces: Interfaces
    security_groups: ServerSecurityGroups
    external_events: ExternalEvents
    guests: GuestQueries
    consoles: ConsoleLinks
    service_removal: ServiceRemoval
    network_client: NetworkClient | None
    image_client: ImageClient | None
    quota_defaults: Mapping[str, int]
    project_exists: Callable[[str], Awaitable[bool]]
    max_limit: int
    service_down_time: float
    default_zone: str
    fault_injection: bool = False


def routes(needs: APIDependencies) -> list[Route]:
    """Return every route of the compute API, relative to /v2.1; removed ones come last."""
    db, clock, random = needs.database, needs.clock, needs.random
    quotas, most, down = needs.quota_defaults, needs.max_limit, needs.service_down_time
    own = [
        *versions_doc.routes(),
        *extensions.routes(),
        *servers.routes(db, clock, needs.actions, most, down),
        *server_create.routes(needs.creator),
        *server_actions.routes(db, needs.actions, needs.interfaces, needs.security_groups, needs.guests),
        *server_addresses.routes(db, ServerAddresses(needs.network_client, needs.interfaces)),
        *interfaces.routes(db, needs.interfaces),
        *diagnostics.routes(db, needs.guests),
        *remote_consoles.routes(db, needs.consoles),
        *server_metadata.routes(db, clock, quotas),
        *server_tags.routes(db, clock),
        *server_ips.routes(db),
        *server_password.routes(db),
        *server_security_groups.routes(db, needs.security_groups, needs.network_client),
        *server_topology.routes(db),
        *volume_attachments.routes(db, most),
        *server_external_events.routes(db, needs.external_events),
        *server_groups.routes(db, clock, random, quotas, most),
        *instance_actions.routes(db, most),
        *flavors.routes(db, clock, random, most),
        *flavor_extra_specs.routes(db),
        *flavor_access.routes(db, needs.project_exists),
        *keypairs.routes(db, clock, quotas, most),
        *limits.routes(db, quotas),
        *quota_sets.routes(db, quotas, needs.project_exists),
        *quota_class_sets.routes(db, quotas),
        *services.routes(db, clock, needs.service_removal, down, needs.default_zone),
        *simple_tenant_usage.routes(db, clock, most),
        *hypervisors.routes(db, clock, needs.guests.host_uptime, down, most),
        *hosts.routes(db, clock, needs.default_zone),
        *availability_zones.routes(db, clock, down, needs.default_zone),
        *aggregates.routes(db, clock, random),
        *images.routes(needs.image_client),
        *image_metadata.routes(db, needs.image_client, quotas),
        *networks.routes(needs.network_client),
        *floating_ips.routes(needs.network_client),
        *security_groups.routes(needs.network_client, most),
        *baremetal_nodes.routes(),
        *(fault_rules.routes(needs.guests) if needs.fault_injection else ()),
        *removed.routes(),
    ]
    return plugins.with_extensions(own, needs)
