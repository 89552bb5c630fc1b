"""All routes of the compute API, and what they need."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

from micronova.api.compute import (
    aggregates,
    api_document,
    assisted_volume_snapshots,
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
    instance_usage_audit_log,
    interfaces,
    keypairs,
    limits,
    migrations,
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
    server_images,
    server_ips,
    server_metadata,
    server_migrations,
    server_moves,
    server_password,
    server_rebuild,
    server_security_groups,
    server_shares,
    server_shelving,
    server_tags,
    server_topology,
    servers,
    services,
    simple_tenant_usage,
    versions_doc,
    volume_attachments,
    volumes,
)
from micronova.api.installed_extensions import Extensions
from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.clients.volume.client import VolumeClient
from micronova.db.engine import Database
from micronova.http.service import Route
from micronova.notifications.notifier import Announcer
from micronova.objects.clock import Clock
from micronova.servers.actions import ServerActions
from micronova.servers.addresses import ServerAddresses
from micronova.servers.admin_password import AdminPasswords
from micronova.servers.consoles import ConsoleLinks
from micronova.servers.create import ServerCreator
from micronova.servers.external_events import ExternalEvents
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.image_caching import CacheImagesRequests
from micronova.servers.images import ServerImages
from micronova.servers.interfaces import Interfaces
from micronova.servers.live_migrations import LiveMigrations
from micronova.servers.moves import ServerMoves
from micronova.servers.rebuild import ServerRebuilder
from micronova.servers.rescue import ServerRescue
from micronova.servers.security_groups import ServerSecurityGroups
from micronova.servers.service_removal import ServiceRemoval
from micronova.servers.shelving import ServerShelving
from micronova.servers.unsupported import Unsupported
from micronova.servers.volumes import ServerVolumes


@dataclass(frozen=True, kw_only=True)
class APIDependencies:
    """What the resources of the compute API need."""

    database: Database
    clock: Clock
    random: Random
    creator: ServerCreator
    rebuilder: ServerRebuilder
    actions: ServerActions
    images: ServerImages
    image_caching: CacheImagesRequests
    interfaces: Interfaces
    security_groups: ServerSecurityGroups
    volumes: ServerVolumes
    external_events: ExternalEvents
    guests: GuestQueries
    consoles: ConsoleLinks
    rescue: ServerRescue
    admin_passwords: AdminPasswords
    moves: ServerMoves
    shelving: ServerShelving
    live_migrations: LiveMigrations
    service_removal: ServiceRemoval
    network_client: NetworkClient | None
    image_client: ImageClient | None
    volume_client: VolumeClient | None
    unsupported: Unsupported
    quota_defaults: Mapping[str, int]
    project_exists: Callable[[str], Awaitable[bool]]
    max_limit: int
    service_down_time: float
    default_zone: str
    shows_passwords: bool = True  # in the answers to create, rebuild, rescue and evacuate
    notifier: Announcer
    usage_audit_period: str
    fault_injection: bool = False


def routes(needs: APIDependencies, added: Extensions) -> list[Route]:
    """Return every route of the compute API, relative to /v2.1, removed ones last, and those of extensions."""
    db, clock, random, notifier = needs.database, needs.clock, needs.random, needs.notifier
    quotas, max_limit, down_time = needs.quota_defaults, needs.max_limit, needs.service_down_time
    own = [
        *versions_doc.routes(),
        *extensions.routes(lambda: [each.extension for each in added.used]),
        *servers.routes(db, clock, needs.actions, max_limit, down_time),
        *server_create.routes(needs.creator, shows_passwords=needs.shows_passwords),
        *server_actions.routes(
            db,
            needs.actions,
            needs.interfaces,
            needs.security_groups,
            needs.guests,
            needs.rescue,
            needs.admin_passwords,
            shows_passwords=needs.shows_passwords,
        ),
        *server_images.routes(db, needs.images),
        *server_shelving.routes(db, needs.shelving),
        *server_rebuild.routes(
            db,
            servers.Servers(db, clock, needs.actions, max_limit, down_time),
            needs.rebuilder,
            shows_passwords=needs.shows_passwords,
        ),
        *server_moves.routes(db, needs.moves, shows_passwords=needs.shows_passwords),
        *server_migrations.routes(db, needs.live_migrations),
        *migrations.routes(db, max_limit),
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
        *volume_attachments.routes(db, needs.volumes, max_limit),
        *server_shares.routes(db),
        *volumes.routes(needs.volume_client, max_limit),
        *assisted_volume_snapshots.routes(db, needs.volume_client),
        *server_external_events.routes(db, needs.external_events),
        *server_groups.routes(db, clock, random, quotas, max_limit, notifier),
        *instance_actions.routes(db, max_limit),
        *instance_usage_audit_log.routes(db, clock, needs.usage_audit_period),
        *flavors.routes(db, clock, random, max_limit, notifier),
        *flavor_extra_specs.routes(db, notifier),
        *flavor_access.routes(db, needs.project_exists, notifier),
        *keypairs.routes(db, clock, quotas, max_limit, notifier),
        *limits.routes(db, quotas),
        *quota_sets.routes(db, quotas, needs.project_exists),
        *quota_class_sets.routes(db, quotas),
        *services.routes(db, clock, needs.service_removal, down_time, needs.default_zone, notifier),
        *simple_tenant_usage.routes(db, clock, max_limit),
        *hypervisors.routes(db, clock, needs.guests.host_uptime, down_time, max_limit),
        *hosts.routes(db, clock, needs.default_zone, notifier),
        *availability_zones.routes(db, clock, down_time, needs.default_zone),
        *aggregates.routes(db, clock, random, notifier, needs.image_caching, needs.unsupported),
        *images.routes(needs.image_client),
        *image_metadata.routes(db, needs.image_client, quotas),
        *networks.routes(needs.network_client),
        *floating_ips.routes(needs.network_client),
        *security_groups.routes(needs.network_client, max_limit),
        *baremetal_nodes.routes(),
        *(fault_rules.routes(needs.guests) if needs.fault_injection else ()),
        *api_document.routes(lambda: found),
        *removed.routes(),
    ]
    found = added.extend(own, needs)
    return found
