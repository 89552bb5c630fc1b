"""The compute API as a whole: all its routes, and the application made of them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

from micronova.api import plugins
from micronova.api.compute import (
    aggregates,
    availability_zones,
    diagnostics,
    extensions,
    fault_rules,
    flavor_access,
    flavor_extra_specs,
    flavors,
    gone,
    hosts,
    hypervisors,
    instance_actions,
    interfaces,
    keypairs,
    limits,
    quota_class_sets,
    quota_sets,
    remote_consoles,
    server_actions,
    server_create,
    server_external_events,
    server_groups,
    server_parts,
    server_password,
    server_security_groups,
    servers,
    services,
    simple_tenant_usage,
    versions_doc,
)
from micronova.compute.api import API
from micronova.compute.consoles import ConsoleLinks
from micronova.db.engine import Database
from micronova.http.service import Route
from micronova.http.versions import Versions
from micronova.objects.clock import Clock

VERSIONS = Versions("compute", 2, versions_doc.LEAST, versions_doc.NEWEST, "X-OpenStack-Nova-API-Version")


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What the resources of the compute API need."""

    database: Database
    clock: Clock
    random: Random
    api: API
    consoles: ConsoleLinks
    quota_defaults: Mapping[str, int]
    project_exists: Callable[[str], Awaitable[bool]]
    max_limit: int
    service_down_time: float
    default_zone: str
    fault_injection: bool = False


def routes(needs: Dependencies) -> list[Route]:
    """Return every route of the compute API, relative to /v2.1; removed ones come last."""
    db, clock, random, api = needs.database, needs.clock, needs.random, needs.api
    quotas, most, down = needs.quota_defaults, needs.max_limit, needs.service_down_time
    own = [
        *versions_doc.routes(),
        *extensions.routes(),
        *servers.routes(db, clock, api, most, down),
        *server_create.routes(api),
        *server_actions.routes(db, api),
        *interfaces.routes(db, api),
        *diagnostics.routes(db, api),
        *remote_consoles.routes(db, needs.consoles),
        *server_parts.routes(db, clock, quotas),
        *server_password.routes(db),
        *server_security_groups.routes(db, api),
        *server_external_events.routes(db, api),
        *server_groups.routes(db, clock, random, quotas, most),
        *instance_actions.routes(db, most),
        *flavors.routes(db, clock, random, most),
        *flavor_extra_specs.routes(db),
        *flavor_access.routes(db, needs.project_exists),
        *keypairs.routes(db, clock, quotas, most),
        *limits.routes(db, quotas),
        *quota_sets.routes(db, quotas, needs.project_exists),
        *quota_class_sets.routes(db, quotas),
        *services.routes(db, clock, down, needs.default_zone),
        *simple_tenant_usage.routes(db, clock, most),
        *hypervisors.routes(db, clock, api.host_uptime, down, most),
        *hosts.routes(db, clock, needs.default_zone),
        *availability_zones.routes(db, clock, down, needs.default_zone),
        *aggregates.routes(db, clock, random),
        *(fault_rules.routes(api) if needs.fault_injection else ()),
        *gone.routes(),
    ]
    return plugins.add_routes(own, plugins.load(), needs)


def roots(found: list[Route]) -> frozenset[str]:
    """Return the first path segments of the routes: what stands after the version and is none of them is a project."""
    return frozenset(route.path.split("/")[1] for route in found)
