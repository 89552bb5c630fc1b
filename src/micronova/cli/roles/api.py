"""The compute API: its routes, what they call, and the flavors that every cloud begins with."""

import functools
from pathlib import Path
from typing import Any

from micronova.api.compute import paths
from micronova.api.compute.app import VERSIONS, APIDependencies, routes
from micronova.api.compute.versions_doc import VENDOR_TYPE, root_routes
from micronova.cli.wiring import Process, Role
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import flavors, schema
from micronova.db.tables import flavors as table
from micronova.http.faults import compute_fault
from micronova.http.service import Service
from micronova.objects.clock import micros
from micronova.objects.flavor import Flavor
from micronova.plugins.hooks import Hooks
from micronova.policies.compute import RULES
from micronova.policies.enforcer import Enforcer
from micronova.servers.actions import ServerActions
from micronova.servers.consoles import ConsoleLinks, LinkSettings
from micronova.servers.create import ServerCreator
from micronova.servers.external_events import ExternalEvents
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.interfaces import Interfaces
from micronova.servers.security_groups import ServerSecurityGroups
from micronova.servers.service_removal import ServiceRemoval
from micronova.servers.unsupported import Honoured, Unsupported


async def make(process: Process) -> Role:
    """Make the compute API: its routes, below the documents that list its versions."""
    settings = process.settings
    found = routes(_api_dependencies(process))
    policy_file = settings.api.policy_file
    service = Service(
        "compute",
        found,
        policy=Enforcer(RULES, Path(policy_file) if policy_file else None),
        authenticator=process.clients.authenticator(),
        fault_body=compute_fault,
        prefix="/v2.1",
        versions=VERSIONS,
        mount="/compute",
        public_url=settings.api.public_url,
        max_body=settings.api.max_request_body_size,
        request_id_headers=("x-openstack-request-id", "x-compute-request-id"),
        vendor_type=VENDOR_TYPE,
        observer=process.telemetry.requests,
    )
    above = Service(
        "compute-versions",
        root_routes(),
        policy=service.policy,
        authenticator=service.authenticator,
        fault_body=compute_fault,
        mount="/compute",
        public_url=settings.api.public_url,
        observer=process.telemetry.requests,
    )
    for each in (service, above):
        process.register(each)
    process.apps[service.mount] = paths.dispatch(service.app, above.app, found)
    return _Bootstrap(process)


def _api_dependencies(process: Process) -> APIDependencies:
    """Return what the routes of the compute API call."""
    assert process.database is not None and process.bus is not None
    settings = process.settings
    clients = process.clients
    conductor = ConductorAPI(process.bus)
    network_client = clients.network_client()
    default = settings.default
    compute = ComputeAPI(process.bus)
    guests = GuestQueries(
        database=process.database,
        clock=process.clock,
        compute=compute,
        service_down_time=default.service_down_time,
    )
    actions = ServerActions(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=conductor,
        notifier=process.notifier,
        timeout=default.instance_build_timeout,
    )
    interfaces = Interfaces(
        database=process.database,
        clock=process.clock,
        actions=actions,
        network_client=network_client,
        check_host=guests.check_host,
    )
    return APIDependencies(
        database=process.database,
        clock=process.clock,
        random=process.random,
        creator=_server_creator(process),
        actions=actions,
        interfaces=interfaces,
        security_groups=ServerSecurityGroups(
            database=process.database, clock=process.clock, network_client=network_client
        ),
        external_events=ExternalEvents(
            database=process.database, clock=process.clock, compute=compute, interfaces=interfaces
        ),
        guests=guests,
        consoles=_console_links(process, guests),
        service_removal=ServiceRemoval(database=process.database, compute=compute, network_client=network_client),
        network_client=network_client,
        image_client=clients.image_client(),
        quota_defaults=settings.quota.limits(),
        project_exists=clients.project_exists,
        max_limit=settings.api.max_limit,
        service_down_time=settings.default.service_down_time,
        default_zone=settings.default.default_availability_zone,
        fault_injection=settings.api.fault_injection,
    )


def _server_creator(process: Process) -> ServerCreator:

    assert process.database is not None and process.bus is not None
    clients, default = process.clients, process.settings.default
    filters = process.settings.filter_scheduler.enabled_filters
    return ServerCreator(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=ConductorAPI(process.bus),
        secrets=process.secret_box(),
        hooks=Hooks.load(),
        quota_defaults=process.settings.quota.limits(),
        image_client=clients.image_client(),
        network_client=clients.network_client(),
        unsupported=Unsupported(lambda: _honoured(filters, default.service_down_time)),
        build_timeout=default.instance_build_timeout,
        default_zone=default.default_availability_zone,
        default_schedule_zone=default.default_schedule_zone,
    )


@functools.cache
def _honoured(enabled_filters: tuple[str, ...], service_down_time: float) -> Honoured:
    """Return the scheduler hints and extra specs that the enabled filters honour."""
    # Imported for the first request that needs them: filters need numpy, which is large.
    from micronova.scheduler.filters.base import FilterOptions
    from micronova.scheduler.filters.registry import load_filters

    filters = load_filters(FilterOptions(service_down_time=service_down_time), enabled_filters)
    return Honoured(
        hints=frozenset().union(*(each.hints for each in filters)),
        extra_specs=frozenset().union(*(each.extra_specs for each in filters)),
    )


def _console_links(process: Process, guests: GuestQueries) -> ConsoleLinks:

    assert process.database is not None
    settings = process.settings
    return ConsoleLinks(
        guests,
        process.database,
        process.clock,
        process.random,
        LinkSettings(
            token_ttl=settings.consoleauth.token_ttl,
            vnc_base_url=settings.vnc.novncproxy_base_url,
            spice_base_url=settings.spice.html5proxy_base_url,
            serial_base_url=settings.serial_console.base_url,
        ),
    )


class _Bootstrap:
    """The API only answers HTTP. Its start makes the flavors that every cloud begins with."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def start(self) -> None:
        """Make m1.tiny to m1.xlarge on an empty database."""
        database = self._process.database
        assert database is not None
        await database.migrate(_first_flavors, micros(self._process.clock.now()))

    async def stop(self) -> None:
        """Do nothing."""


def _first_flavors(conn: Any, now: int) -> None:

    schema.exclusively(conn)  # the workers of an API start together
    if conn.execute(table.select().limit(1)).first() is not None:
        return
    sizes = [
        ("tiny", 512, 1, 1),
        ("small", 2048, 1, 20),
        ("medium", 4096, 2, 40),
        ("large", 8192, 4, 80),
        ("xlarge", 16384, 8, 160),
    ]
    for number, (name, ram, vcpus, disk) in enumerate(sizes, 1):
        flavors.insert(conn, Flavor(id=str(number), name=f"m1.{name}", ram=ram, vcpus=vcpus, disk=disk), now)
