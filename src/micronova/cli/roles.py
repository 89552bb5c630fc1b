"""How each role is made from the settings: `make_ROLE` for each role."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI, ConsoleAuthAPI, HostConductorAPI
from micronova.conf.settings import Settings, SettingsError
from micronova.db.secrets import SecretBox
from micronova.plugins.hooks import Hooks

if TYPE_CHECKING:
    from micronova.api.compute.app import Dependencies
    from micronova.cli.wiring import Process, Role
    from micronova.metadata.vendordata import VendorDataSource
    from micronova.servers.consoles import ConsoleLinks
    from micronova.servers.create import ServerCreator
    from micronova.servers.guest_queries import GuestQueries
    from micronova.servers.unsupported import Honoured


def _secret_box(process: "Process") -> SecretBox:
    return SecretBox(bytes.fromhex(process.settings.default.secret_key or process.keys.secret_key))


async def make_identity(process: "Process") -> "Role":
    """Make the embedded identity service."""
    from micronova.cli.clients import ENDPOINTS
    from micronova.embedded.identity.passwords import Passwords
    from micronova.embedded.identity.service import IdentityService

    settings = process.settings
    role = IdentityService(
        database=await process.open_database("identity"),
        clock=process.clock,
        token_keys=process.directory.token_keys,
        token_lifetime=settings.identity.token_lifetime,
        passwords=Passwords(waiting=settings.identity.max_password_checks),
        region=settings.identity.region_name,
        public_url=settings.api.public_url,
        db_schema=process.schema_of("identity"),
        observer=process.telemetry.requests,
    )
    process.embedded["identity"] = role
    _mount(process, role.service)

    async def bootstrap() -> None:
        keys = process.keys
        service = settings.identity.password or keys.service_password
        await role.bootstrap(keys.admin_password, keys.demo_password, service, ENDPOINTS)

    return _AfterStart(role, bootstrap)


async def make_image(process: "Process") -> "Role":
    """Make the embedded image service."""
    from micronova.cli.image import ensure_test_image
    from micronova.embedded.image.data import accept_all
    from micronova.embedded.image.formats import check_format
    from micronova.embedded.image.service import ImageService
    from micronova.policies.enforcer import Enforcer
    from micronova.policies.image import RULES

    role = ImageService(
        await process.open_database("image"),
        process.directory.path / "images",
        Enforcer(RULES),
        process.clients.authenticator(),
        process.clock,
        bytes.fromhex(process.settings.glance.ticket_key or process.keys.ticket_key),
        schema=process.schema_of("image"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        check=check_format if process.settings.image_format.require_image_format_match else accept_all,
        max_size=process.settings.image.image_size_cap,
        project_limit=process.settings.image.user_storage_quota or None,
        project_uploads=process.settings.image.uploads_per_project or None,
        idle_timeout=process.settings.api.client_timeout,
    )
    process.embedded["image"] = role
    _mount(process, role.service)

    return _AfterStart(role, lambda: ensure_test_image(role, process.settings.compute.compute_driver))


async def make_network(process: "Process") -> "Role":
    """Make the embedded network service."""
    from micronova.embedded.network.core import Settings
    from micronova.embedded.network.service import NetworkService
    from micronova.http.host_keys import HostTickets
    from micronova.policies.enforcer import Enforcer
    from micronova.policies.network import RULES

    clients = process.clients
    role = NetworkService(
        await process.open_database("network"),
        Enforcer(RULES),
        HostTickets(clients.keyring(), clients.authenticator(), process.clock.now),
        process.clock,
        clients.compute(),
        schema=process.schema_of("network"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        random_source=process.random,
        settings=Settings(max_limit=process.settings.api.max_limit),
    )
    process.embedded["network"] = role
    _mount(process, role.service)
    return _AfterStart(role, role.bootstrap)


async def make_network_agent(process: "Process") -> "Role":
    """Make the network agent of this host."""
    from micronova.embedded.network.agent.agent import NetworkAgent
    from micronova.embedded.network.agent.desired_state import DNS_DOMAIN
    from micronova.embedded.network.agent.metadata import Limits, MetadataProxy
    from micronova.embedded.network.agent.service import NetworkServiceClient
    from micronova.privileged.client import PrivilegedClient, helper_socket
    from micronova.privileged.names import prefix_of

    clients = process.clients
    keys = clients.host_keys()
    prefix = prefix_of(process.cloud_id)
    privileged = PrivilegedClient(helper_socket(prefix))
    settings = process.settings.network_agent
    limits = Limits(
        per_guest=settings.metadata_connections_per_guest,
        per_network=settings.metadata_connections_per_network,
        total=settings.metadata_connections,
        timeout=settings.metadata_timeout,
    )
    return NetworkAgent(
        NetworkServiceClient(clients.network_agent_client(keys), process.host),
        privileged,
        process.clock,
        prefix=prefix,
        domain=DNS_DOMAIN,
        connections=settings.connections_per_port,
        metadata=MetadataProxy(privileged, clients.metadata(), keys, limits),
    )


def _mount(process: "Process", service: Any) -> None:
    service.body_timeout = process.settings.api.client_timeout
    process.services[service.name] = service
    process.apps[service.mount] = service.app


class _AfterStart:
    """A role with a function that is called once it has started."""

    def __init__(self, role: Any, then: Callable[[], Awaitable[Any]]) -> None:
        self._role, self._then = role, then

    async def start(self) -> None:
        """Start the role, then call the function."""
        await self._role.start()
        await self._then()

    async def stop(self) -> None:
        """Stop the role."""
        await self._role.stop()


async def make_scheduler(process: "Process") -> "Role":
    """Make the scheduler."""
    from micronova.scheduler.manager import SchedulerManager

    assert process.database is not None and process.bus is not None
    settings = process.settings
    return SchedulerManager(
        settings.filter_scheduler,
        process.database,
        process.bus,
        process.clock,
        process.random,
        process.notifier.scheduler,
        process.telemetry.metrics.decision,
        host=process.host,
        report_interval=settings.default.report_interval,
        service_down_time=settings.default.service_down_time,
        refresh_interval=settings.scheduler.refresh_interval,
        max_attempts=settings.scheduler.max_attempts,
        default_zone=settings.default.default_availability_zone,
    )


async def make_conductor(process: "Process") -> "Role":
    """Make the conductor with its engine of operations."""
    from micronova.conductor.host_keys import HostKeyIssuer
    from micronova.conductor.host_users import HostUsers
    from micronova.conductor.jobs import Jobs
    from micronova.conductor.manager import ConductorManager
    from micronova.conductor.operations.dependencies import Dependencies
    from micronova.conductor.operations.engine import Engine

    assert process.database is not None and process.bus is not None
    settings = process.settings
    owner = f"conductor:{process.host}:{process.random.getrandbits(48):012x}"
    await process.take_over_leases(owner)
    engine = Engine(
        process.database,
        process.clock,
        owner=owner,
        lease=settings.conductor.lease,
        sweep_interval=settings.conductor.sweep_interval,
        concurrency=settings.conductor.concurrency,
        proof_valid=_proof_valid(settings),
        after_commit=process._after_commit,
        observer=process.telemetry.operations,
    )
    dependencies = Dependencies(
        engine=engine,
        compute=ComputeAPI(process.bus),
        secrets=_secret_box(process),
        network_client=process.clients.network_client(),
        image_client=process.clients.image_client(),
        notifier=process.notifier,
        service_down_time=settings.default.service_down_time,
        action_timeout=settings.default.instance_build_timeout,
        hooks=Hooks.load(),
        access_network=settings.default.default_access_ip_network_name,
    )
    process.telemetry.metrics.gauge(
        "micronova_conductor_unhealthy_seconds",
        "Seconds since this conductor could last tell dead hosts from an outage of its own; 0 while it can.",
        engine.health.unhealthy_for,
    )
    users = HostUsers(
        process.database,
        required=settings.conductor.require_host_users,
        own={process.host: str(process.agent.console)} if process.agent is not None else None,
    )
    return ConductorManager(
        bus=process.bus,
        dependencies=dependencies,
        host=process.host,
        report_interval=settings.default.report_interval,
        ratios=allocation_ratios(settings),
        max_attempts=settings.scheduler.max_attempts,
        host_users=users,
        host_keys=HostKeyIssuer(users, process.clients.keyring(), process.clock),
        jobs=Jobs(
            process.database,
            process.clock,
            owner=engine.owner,
            keep_finished=settings.conductor.keep_finished,
            keep_deleted=settings.conductor.keep_deleted,
        ),
    )


def _proof_valid(settings: Settings) -> float:
    """Return how long a conductor's proof of health holds: two heartbeats, but less than hosts need to look dead."""
    from micronova.conductor.manager import PING_TIMEOUT

    down = settings.default.service_down_time
    wanted = max(2 * settings.default.report_interval + PING_TIMEOUT, min(settings.conductor.lease, down) / 2)
    return min(wanted, 0.75 * down)


async def make_compute(process: "Process") -> "Role":
    """Make the compute agent of this host, or of many simulated ones."""
    from micronova.compute.manager import ComputeManager
    from micronova.compute.settings import ComputeSettings
    from micronova.virt.loader import DriverSetup, create_drivers

    assert process.bus is not None
    default, compute = process.settings.default, process.settings.compute
    section = {"fake": process.settings.fake, "libvirt": process.settings.libvirt}.get(compute.compute_driver)
    options: dict[str, Any] = {} if section is None else msgspec.to_builtins(section)
    drivers = create_drivers(
        compute.compute_driver,
        DriverSetup(
            host=default.host,
            cloud_id=process.cloud_id,
            clock=process.clock,
            random=process.random,
            state_dir=Path(process.directory.path),
            options=options,
            vendor_data=vendor_data_source(process.settings.api),
            image_service=process.settings.glance.endpoint_override,
        ),
    )
    settings = ComputeSettings(
        max_concurrent_builds=default.max_concurrent_builds,
        report_interval=default.report_interval,
        resource_interval=compute.resource_interval,
        boot_timeout=compute.boot_timeout,
        vif_plugging_timeout=default.vif_plugging_timeout,
        vif_plugging_is_fatal=default.vif_plugging_is_fatal,
        shutdown_timeout=default.shutdown_timeout,
        resume_guests_state_on_host_boot=bool(default.resume_guests_state_on_host_boot),
        force_config_drive=process.settings.libvirt.force_config_drive,
        shutdown_grace=compute.shutdown_grace,
        reserved_host_cpus=default.reserved_host_cpus,
        reserved_host_memory_mb=default.reserved_host_memory_mb,
        reserved_host_disk_mb=default.reserved_host_disk_mb,
        cpu_allocation_ratio=default.cpu_allocation_ratio,
        ram_allocation_ratio=default.ram_allocation_ratio,
        disk_allocation_ratio=default.disk_allocation_ratio,
        console_relay_listen=process.settings.console.relay_listen,
    )
    manager = ComputeManager(
        settings,
        drivers,
        process.bus,
        HostConductorAPI(process.bus, process.clock, process.random),
        process.clock,
        process.random,
        process.relay_socket,
    )
    process.telemetry.metrics.gauge(
        "micronova_builds_in_flight", "Builds that run on the hosts of this process.", manager.builds_in_flight
    )
    return manager


async def make_api(process: "Process") -> "Role":
    """Make the compute API: its routes, below the documents that list its versions."""
    from micronova.api.compute import paths
    from micronova.api.compute.app import VERSIONS, routes
    from micronova.api.compute.versions_doc import VENDOR_TYPE, root_routes
    from micronova.http.faults import compute_fault
    from micronova.http.service import Service
    from micronova.policies.compute import RULES
    from micronova.policies.enforcer import Enforcer

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
    process.services["compute"] = service
    process.services["compute-versions"] = above
    process.apps["/compute"] = paths.dispatch(service.app, above.app, found)
    return _Bootstrap(process)


def _api_dependencies(process: "Process") -> "Dependencies":
    """Return what the routes of the compute API call."""
    from micronova.api.compute.app import Dependencies
    from micronova.servers.actions import ServerActions
    from micronova.servers.external_events import ExternalEvents
    from micronova.servers.guest_queries import GuestQueries
    from micronova.servers.interfaces import Interfaces
    from micronova.servers.security_groups import ServerSecurityGroups
    from micronova.servers.service_removal import ServiceRemoval

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
        is_up=guests.is_up,
    )
    return Dependencies(
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
        quota_defaults=settings.quota.limits(),
        project_exists=clients.project_exists,
        max_limit=settings.api.max_limit,
        service_down_time=settings.default.service_down_time,
        default_zone=settings.default.default_availability_zone,
        fault_injection=settings.api.fault_injection,
    )


def _server_creator(process: "Process") -> "ServerCreator":
    from micronova.servers.create import ServerCreator
    from micronova.servers.unsupported import Unsupported

    assert process.database is not None and process.bus is not None
    clients, default = process.clients, process.settings.default
    filters = process.settings.filter_scheduler.enabled_filters
    return ServerCreator(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=ConductorAPI(process.bus),
        secrets=_secret_box(process),
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
def _honoured(enabled_filters: tuple[str, ...], service_down_time: float) -> "Honoured":
    """Return the scheduler hints and extra specs that the enabled filters honour."""
    from micronova.scheduler.filters.base import FilterOptions
    from micronova.scheduler.filters.registry import load_filters
    from micronova.servers.unsupported import Honoured

    filters = load_filters(FilterOptions(service_down_time=service_down_time), enabled_filters)
    return Honoured(
        hints=frozenset().union(*(each.hints for each in filters)),
        extra_specs=frozenset().union(*(each.extra_specs for each in filters)),
    )


def _console_links(process: "Process", guests: "GuestQueries") -> "ConsoleLinks":
    from micronova.servers.consoles import ConsoleLinks, LinkSettings

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


async def make_metadata(process: "Process") -> "Role":
    """Make the metadata service."""
    from micronova.api.metadata.app import routes
    from micronova.api.metadata.guests import Guests
    from micronova.api.metadata.signed import Signatures
    from micronova.http.auth import NoTokens
    from micronova.http.faults import compute_fault
    from micronova.http.service import Service
    from micronova.policies.enforcer import Enforcer

    assert process.database is not None
    settings = process.settings.api
    guests = Guests(process.database, vendor_data_source(settings), settings.metadata_cache_expiration)
    shared_secret = process.settings.neutron.metadata_proxy_shared_secret
    signatures = Signatures(process.clients.keyring(), shared_secret, process.clock.now)
    service = Service(
        "metadata",
        routes(process.database, guests, signatures, process.clock, process.random),
        policy=Enforcer([]),
        authenticator=NoTokens(),
        fault_body=compute_fault,
        mount="/metadata",
        observer=process.telemetry.requests,
    )
    _mount(process, service)
    return _Closing(guests.close)


def vendor_data_source(settings: Any) -> "VendorDataSource":
    """Return the source of vendor data for guests; `settings` are those of the API."""
    from micronova.metadata import vendordata

    providers = set(settings.vendordata_providers)
    unknown = providers - {vendordata.STATIC, vendordata.DYNAMIC}
    if unknown:
        raise SettingsError(
            f"There is no provider {min(unknown)} in api.vendordata_providers: choose from StaticJSON, DynamicJSON."
        )
    targets = settings.vendordata_dynamic_targets if vendordata.DYNAMIC in providers else ()
    return vendordata.VendorDataSource(
        static=vendordata.read_static(settings.vendordata_jsonfile_path) if vendordata.STATIC in providers else None,
        targets=vendordata.parse_targets(targets),
        connect_timeout=settings.vendordata_dynamic_connect_timeout,
        read_timeout=settings.vendordata_dynamic_read_timeout,
        fatal=settings.vendordata_dynamic_failure_fatal,
        certificate=settings.vendordata_dynamic_ssl_certfile,
    )


class _Closing:
    """A role that only answers HTTP, and closes something when it stops."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Close it."""
        await self._close()


async def make_console(process: "Process") -> "Role":
    """Make the console proxy."""
    from micronova.console.proxy import MOUNT, ConsoleProxy

    assert process.bus is not None
    settings = process.settings
    console = settings.console
    if process.agent is not None:  # the only consoles are those behind the relay of this host
        console = msgspec.structs.replace(console, socket_path="")
    role = ConsoleProxy(
        ConsoleAuthAPI(process.bus),
        process.clock,
        console,
        state_path=process.directory.path if process.agent is None else process.agent.console.parent,
        enforce_timeout=settings.consoleauth.enforce_session_timeout,
    )
    process.apps[MOUNT] = role.app
    process.telemetry.metrics.gauge("micronova_console_sessions", "Open consoles.", role.sessions.__len__)
    return role


class _Bootstrap:
    """The API only answers HTTP. Its start makes the flavors that every cloud begins with."""

    def __init__(self, process: "Process") -> None:
        self._process = process

    async def start(self) -> None:
        """Make m1.tiny to m1.xlarge on an empty database."""
        database = self._process.database
        assert database is not None
        await database.write(_first_flavors, int(self._process.clock.now() * 1e6))

    async def stop(self) -> None:
        """Do nothing."""


def _first_flavors(conn: Any, now: int) -> None:
    from micronova.db import flavors, schema
    from micronova.db.tables import flavors as table
    from micronova.objects.flavor import Flavor

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


def allocation_ratios(settings: Any) -> dict[str, float]:
    """Return the allocation ratios of hosts that report none."""
    default = settings.default
    return {
        "VCPU": default.cpu_allocation_ratio,
        "MEMORY_MB": default.ram_allocation_ratio,
        "DISK_GB": default.disk_allocation_ratio,
    }
