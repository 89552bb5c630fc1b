"""How each role is made from settings: one function each, called `make_ROLE`."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from micronova.compute.hooks import Hooks
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConductorAPI
from micronova.conductor.secrets import SecretBox
from micronova.conf.settings import SettingsError

if TYPE_CHECKING:
    from micronova.cli.wiring import Process, Role
    from micronova.metadata.vendordata import VendorDataSource


def _secret_box(process: "Process") -> SecretBox:
    return SecretBox(bytes.fromhex(process.settings.default.secret_key or process.keys.secret_key))


async def make_identity(process: "Process") -> "Role":
    """The embedded identity."""
    from micronova.cli.neighbours import ENDPOINTS
    from micronova.neighbours.identity.service import IdentityService

    settings = process.settings
    role = IdentityService(
        database=await process.open_database("identity"),
        clock=process.clock,
        signing_key=bytes.fromhex(process.keys.token_key),
        token_lifetime=settings.identity.token_lifetime,
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

    return _Then(role, bootstrap)


async def make_image(process: "Process") -> "Role":
    """The embedded image service."""
    from micronova.cli.image import ensure_test_image
    from micronova.neighbours.image.data import accept_all
    from micronova.neighbours.image.formats import check_format
    from micronova.neighbours.image.service import ImageService
    from micronova.policies.enforcer import Enforcer
    from micronova.policies.image import RULES

    role = ImageService(
        await process.open_database("image"),
        process.directory.path / "images",
        Enforcer(RULES),
        process.neighbours.authenticator(),
        process.clock,
        bytes.fromhex(process.settings.glance.ticket_key or process.keys.ticket_key),
        schema=process.schema_of("image"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        check=check_format if process.settings.image_format.require_image_format_match else accept_all,
    )
    process.embedded["image"] = role
    _mount(process, role.service)

    return _Then(role, lambda: ensure_test_image(role, process.settings.compute.compute_driver))


async def make_network(process: "Process") -> "Role":
    """The embedded network service."""
    from micronova.http.host_keys import HostTickets
    from micronova.neighbours.network.service import NetworkService
    from micronova.policies.enforcer import Enforcer
    from micronova.policies.network import RULES

    neighbours = process.neighbours
    role = NetworkService(
        await process.open_database("network"),
        Enforcer(RULES),
        HostTickets(neighbours.keyring(), neighbours.authenticator(), process.clock.now),
        process.clock,
        neighbours.compute(),
        schema=process.schema_of("network"),
        observer=process.telemetry.requests,
        public_url=process.settings.api.public_url,
        chance=process.random,
    )
    process.embedded["network"] = role
    _mount(process, role.service)
    return _Then(role, role.bootstrap)


async def make_network_agent(process: "Process") -> "Role":
    """The network agent of this host."""
    from micronova.cli.machine import helper_socket
    from micronova.neighbours.network.agent.agent import NetworkAgent
    from micronova.neighbours.network.agent.metadata import MetadataProxy
    from micronova.neighbours.network.agent.service import NetworkServiceClient
    from micronova.privileged.client import PrivilegedClient
    from micronova.privileged.names import prefix_of

    neighbours = process.neighbours
    keys = neighbours.host_keys()
    privileged = PrivilegedClient(helper_socket(process.directory))
    return NetworkAgent(
        NetworkServiceClient(neighbours.network_service(keys), process.host),
        privileged,
        process.clock,
        prefix=prefix_of(process.keys.cloud_id),
        domain="openstacklocal",
        metadata=MetadataProxy(privileged, neighbours.metadata(), keys),
    )


def _mount(process: "Process", service: Any) -> None:
    process.services[service.name] = service
    process.apps[service.mount] = service.app


class _Then:
    """A role that does something once it has started."""

    def __init__(self, role: Any, then: Callable[[], Awaitable[Any]]) -> None:
        self._role, self._then = role, then

    async def start(self) -> None:
        """Start, then do it."""
        await self._role.start()
        await self._then()

    async def stop(self) -> None:
        """Stop."""
        await self._role.stop()


async def make_scheduler(process: "Process") -> "Role":
    """The scheduler."""
    from micronova.scheduler.manager import SchedulerManager

    assert process.database is not None and process.bus is not None
    return SchedulerManager(
        process.settings,
        process.database,
        process.bus,
        process.clock,
        process.random,
        process.notifier.scheduler,
        process.telemetry.metrics.decision,
    )


async def make_conductor(process: "Process") -> "Role":
    """The conductor with its engine of operations."""
    from micronova.conductor.host_keys import HostKeyDesk
    from micronova.conductor.host_users import HostUsers
    from micronova.conductor.kinds import Tools
    from micronova.conductor.manager import ConductorManager
    from micronova.conductor.operations import Engine

    assert process.database is not None and process.bus is not None
    settings = process.settings
    engine = Engine(
        process.database,
        process.clock,
        owner=f"conductor:{process.host}:{process.random.getrandbits(48):012x}",
        lease=settings.conductor.lease,
        sweep_interval=settings.conductor.sweep_interval,
        concurrency=settings.conductor.concurrency,
        keep_finished=settings.conductor.keep_finished,
        after_step=process._after_step,
        observer=process.telemetry.operations,
    )
    tools = Tools(
        engine=engine,
        compute=ComputeAPI(process.bus),
        secrets=_secret_box(process),
        networks=process.neighbours.networks(),
        images=process.neighbours.images(),
        notifier=process.notifier,
        service_down_time=settings.default.service_down_time,
        hooks=Hooks.load(),
        access_network=settings.default.default_access_ip_network_name,
    )
    users = HostUsers(process.database, required=settings.conductor.require_host_users)
    return ConductorManager(
        bus=process.bus,
        tools=tools,
        host=process.host,
        report_interval=settings.default.report_interval,
        ratios=allocation_ratios(settings),
        max_attempts=settings.scheduler.max_attempts,
        host_users=users,
        host_keys=HostKeyDesk(users, process.neighbours.keyring(), process.clock),
    )


async def make_compute(process: "Process") -> "Role":
    """The agent of this host, or of many simulated ones."""
    import msgspec

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
            cloud_id=process.keys.cloud_id,
            clock=process.clock,
            random=process.random,
            state_dir=Path(process.directory.path),
            options=options,
            vendor_data=vendor_data_source(process.settings.api),
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
        shutdown_grace=compute.shutdown_grace,
        reserved_host_cpus=default.reserved_host_cpus,
        reserved_host_memory_mb=default.reserved_host_memory_mb,
        reserved_host_disk_mb=default.reserved_host_disk_mb,
        cpu_allocation_ratio=default.cpu_allocation_ratio,
        ram_allocation_ratio=default.ram_allocation_ratio,
        disk_allocation_ratio=default.disk_allocation_ratio,
        console_relay_listen=process.settings.console.relay_listen,
    )
    manager = ComputeManager(settings, drivers, process.bus, process.clock, process.random)
    process.telemetry.metrics.gauge(
        "micronova_builds_in_flight", "Builds that hosts of this process work on.", manager.builds_in_flight
    )
    return manager


async def make_api(process: "Process") -> "Role":
    """The compute API."""
    from micronova.api.compute.app import VERSIONS, Dependencies, roots, routes
    from micronova.api.compute.versions_doc import root_routes
    from micronova.compute.api import API
    from micronova.compute.consoles import ConsoleLinks, LinkSettings
    from micronova.compute.creation import Creation
    from micronova.http.faults import compute_fault
    from micronova.http.mount import compute_paths
    from micronova.http.service import Service
    from micronova.policies.compute import RULES
    from micronova.policies.enforcer import Enforcer

    assert process.database is not None and process.bus is not None
    settings = process.settings
    neighbours = process.neighbours
    conductor = ConductorAPI(process.bus)
    networks = neighbours.networks()
    default = settings.default
    creation = Creation(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=conductor,
        secrets=_secret_box(process),
        hooks=Hooks.load(),
        quota_defaults=quota_defaults(settings),
        images=neighbours.images(),
        networks=networks,
        build_timeout=default.instance_build_timeout,
        service_down_time=default.service_down_time,
        default_zone=default.default_availability_zone,
        default_schedule_zone=default.default_schedule_zone,
    )
    api = API(
        database=process.database,
        clock=process.clock,
        random=process.random,
        conductor=conductor,
        compute=ComputeAPI(process.bus),
        notifier=process.notifier,
        creation=creation,
        networks=networks,
        build_timeout=default.instance_build_timeout,
        service_down_time=default.service_down_time,
    )
    consoles = ConsoleLinks(
        api,
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
    found = routes(
        Dependencies(
            database=process.database,
            clock=process.clock,
            random=process.random,
            api=api,
            consoles=consoles,
            quota_defaults=quota_defaults(settings),
            project_exists=neighbours.project_exists,
            max_limit=settings.api.max_limit,
            service_down_time=settings.default.service_down_time,
            default_zone=settings.default.default_availability_zone,
            fault_injection=settings.api.fault_injection,
        )
    )
    policy_file = settings.api.policy_file
    service = Service(
        "compute",
        found,
        policy=Enforcer(RULES, Path(policy_file) if policy_file else None),
        authenticator=neighbours.authenticator(),
        fault_body=compute_fault,
        prefix="/v2.1",
        versions=VERSIONS,
        mount="/compute",
        public_url=settings.api.public_url,
        max_body=settings.api.max_request_body_size,
        request_id_headers=("x-openstack-request-id", "x-compute-request-id"),
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
    process.apps["/compute"] = compute_paths(service.app, above.app, roots(found))
    return _Bootstrap(process)


async def make_metadata(process: "Process") -> "Role":
    """The metadata service."""
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
    signatures = Signatures(process.neighbours.keyring(), shared_secret, process.clock.now)
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
    """Return what tells guests the operator's part; `settings` are those of the API."""
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
    """A role that lives by HTTP alone, and has something to let go of."""

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Let go."""
        await self._close()


async def make_console(process: "Process") -> "Role":
    """The console proxy."""
    from micronova.console.proxy import MOUNT, ConsoleProxy

    assert process.bus is not None
    settings = process.settings
    role = ConsoleProxy(
        process.bus,
        process.clock,
        settings.console,
        state_path=Path(process.directory.path),
        enforce_timeout=settings.consoleauth.enforce_session_timeout,
    )
    process.apps[MOUNT] = role.app
    process.telemetry.metrics.gauge(
        "micronova_console_sessions", "Consoles that somebody looks at.", role.sessions.__len__
    )
    return role


class _Bootstrap:
    """The API has no life of its own beyond HTTP; starting it makes the flavors that every cloud begins with."""

    def __init__(self, process: "Process") -> None:
        self._process = process

    async def start(self) -> None:
        """Make m1.tiny to m1.xlarge on an empty database."""
        database = self._process.database
        assert database is not None
        await database.write(_first_flavors, int(self._process.clock.now() * 1e6))

    async def stop(self) -> None:
        """Nothing to do."""


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
    """Return the overcommitment of hosts that do not say theirs."""
    default = settings.default
    return {
        "VCPU": default.cpu_allocation_ratio,
        "MEMORY_MB": default.ram_allocation_ratio,
        "DISK_GB": default.disk_allocation_ratio,
    }


def quota_defaults(settings: Any) -> dict[str, int]:
    """Return the limits of a project that has none of its own."""
    import msgspec

    from micronova.db.quotas import DEFAULTS

    given = msgspec.to_builtins(settings.quota)
    given["injected_file_path_bytes"] = given.pop("injected_file_path_length")
    return {**DEFAULTS, **given}
