"""The compute API: its routes, what they call, and the flavors that every cloud begins with."""

from pathlib import Path

import sqlalchemy as sa

from micronova.api.compute.app import APIDependencies, routes
from micronova.api.compute.extensions import load_extensions
from micronova.api.compute.versions_doc import VENDOR_TYPE, VERSIONS, root_routes
from micronova.api.installed_extensions import Extensions
from micronova.api.placement import app as placement
from micronova.cli.unsupported import unsupported
from micronova.cli.wiring import Process, Role
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI
from micronova.db import flavors, schema
from micronova.db.tables import flavors as table
from micronova.http.faults import compute_fault
from micronova.http.mount import below_versions
from micronova.http.service import Route, Service
from micronova.objects.clock import micros
from micronova.objects.flavor import Flavor
from micronova.plugins.hooks import Hooks
from micronova.policies.enforcer import Enforcer
from micronova.policies.placement import RULES as PLACEMENT_RULES
from micronova.servers.actions import ServerActions
from micronova.servers.admin_password import AdminPasswords
from micronova.servers.consoles import ConsoleLinks, LinkSettings
from micronova.servers.create import ServerCreator
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.external_events import ExternalEvents
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.image_caching import CacheImagesRequests
from micronova.servers.image_refs import BootImages
from micronova.servers.image_signatures import ImageSignatures, SignatureRules
from micronova.servers.images import ServerImages
from micronova.servers.interfaces import Interfaces
from micronova.servers.live_migrations import LiveMigrations
from micronova.servers.moves import ServerMoves
from micronova.servers.quiescing import Quiescing
from micronova.servers.rebuild import ServerRebuilder
from micronova.servers.rescue import ServerRescue
from micronova.servers.security_groups import ServerSecurityGroups
from micronova.servers.service_removal import ServiceRemoval
from micronova.servers.shelving import ServerShelving
from micronova.servers.volumes import ServerVolumes


async def make(process: Process) -> Role:
    """Make the compute API: its routes, below the documents that list its versions."""
    settings = process.settings
    extensions = load_extensions()
    found = declared_routes(process, extensions)
    extensions.check_required(process.settings.api.required_extensions)
    policy_file = settings.api.policy_file
    service = Service(
        "compute",
        found,
        policy=Enforcer(extensions.rules, Path(policy_file) if policy_file else None),
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
    process.apps[service.mount] = below_versions(service.app, above.app, found, version="v2.1", relaxed="v2")
    process.mount(_placement(process))
    return _Bootstrap(process)


def _placement(process: Process) -> Service:
    """Make the Placement API, over the same database."""
    settings = process.settings
    assert process.database is not None
    policy_file = settings.placement.policy_file
    return placement.make(
        placement.routes(process.database, process.clock, process.random),
        policy=Enforcer(PLACEMENT_RULES, Path(policy_file) if policy_file else None),
        authenticator=process.clients.authenticator(),
        public_url=settings.api.public_url,
        observer=process.telemetry.requests,
    )


def declared_routes(process: Process, extensions: Extensions) -> list[Route]:
    """Return the routes of the API, with those of extensions; nothing need run for that."""
    return routes(_api_dependencies(process), extensions)


def _api_dependencies(process: Process) -> APIDependencies:
    """Return what the routes of the compute API call."""
    assert process.bus is not None
    settings, clients = process.settings, process.clients
    default = settings.default
    shared = _shared_dependencies(process)
    database, clock = shared.database, shared.clock
    image_client, network_client = shared.image_client, shared.network_client
    compute = ComputeAPI(process.bus)
    guests = GuestQueries(database=database, clock=clock, compute=compute, service_down_time=default.service_down_time)
    actions = ServerActions(shared, compute, reclaim_interval=default.reclaim_instance_interval)
    interfaces = Interfaces(
        database=database,
        clock=clock,
        actions=actions,
        network_client=network_client,
        check_host=guests.check_host,
    )
    volumes = ServerVolumes(shared, actions, guests.check_host)
    non_inheritable = default.non_inheritable_image_properties
    images = ServerImages(shared, actions, Quiescing(compute, clock), non_inheritable=non_inheritable)
    return APIDependencies(
        database=database,
        clock=clock,
        random=process.random,
        creator=ServerCreator(shared, hooks=Hooks.load(), default_schedule_zone=default.default_schedule_zone),
        rebuilder=ServerRebuilder(shared),
        actions=actions,
        images=images,
        image_caching=CacheImagesRequests(
            database=database,
            conductor=shared.conductor,
            image_client=image_client,
            signatures=shared.signatures,
        ),
        interfaces=interfaces,
        volumes=volumes,
        security_groups=ServerSecurityGroups(database=database, clock=clock, network_client=network_client),
        external_events=ExternalEvents(
            database=database, clock=clock, compute=compute, interfaces=interfaces, volumes=volumes
        ),
        guests=guests,
        consoles=_console_links(process, guests),
        rescue=ServerRescue(shared, actions, rescue_image_id=settings.libvirt.rescue_image_id),
        admin_passwords=AdminPasswords(database=database, clock=clock, actions=actions, check_host=guests.check_host),
        moves=ServerMoves(shared, allow_resize_to_same_host=bool(default.allow_resize_to_same_host)),
        shelving=ServerShelving(shared, actions, images),
        live_migrations=LiveMigrations(
            database=database, clock=clock, compute=compute, conductor=shared.conductor, notifier=process.notifier
        ),
        service_removal=ServiceRemoval(
            database=database, compute=compute, network_client=network_client, notifier=process.notifier
        ),
        network_client=network_client,
        image_client=image_client,
        volume_client=shared.volume_client,
        unsupported=shared.unsupported,
        quota_defaults=shared.quota_defaults,
        project_exists=clients.project_exists,
        max_limit=settings.api.max_limit,
        service_down_time=default.service_down_time,
        default_zone=default.default_availability_zone,
        shows_passwords=settings.api.enable_instance_password,
        notifier=process.notifier,
        usage_audit_period=default.instance_usage_audit_period,
        fault_injection=settings.api.fault_injection,
    )


def _shared_dependencies(process: Process) -> RequestDependencies:
    """Return what the classes that accept requests about servers need."""
    assert process.database is not None and process.bus is not None
    settings, default = process.settings, process.settings.default
    image_client, signatures = process.clients.image_client(), _image_signatures(process)
    return RequestDependencies(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=ConductorAPI(process.bus),
        notifier=process.notifier,
        secrets=process.secret_box(),
        image_client=image_client,
        network_client=process.clients.network_client(),
        volume_client=process.clients.volume_client(),
        unsupported=unsupported(settings),
        signatures=signatures,
        boot_images=BootImages(image_client, signatures, settings.glance.max_kernel_images_mb),
        quota_defaults=settings.quota.limits(),
        operation_timeout=default.instance_build_timeout,
        service_down_time=default.service_down_time,
        default_zone=default.default_availability_zone,
    )


def _image_signatures(process: Process) -> ImageSignatures:
    glance = process.settings.glance
    return ImageSignatures(
        image_client=process.clients.image_client(),
        certificates=process.clients.certificates(),
        clock=process.clock,
        rules=SignatureRules(
            verify=glance.verify_glance_signatures,
            validate=glance.enable_certificate_validation,
            default_trusted=glance.default_trusted_certificate_ids,
        ),
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
            spice_direct_base_url=settings.spice.spice_direct_proxy_base_url,
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


def _first_flavors(conn: sa.Connection, now: int) -> None:
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
