"""Every setting, typed, in one frozen object that is passed in; there is no global.

Sections and options have the names that Nova's operators know where the meaning is the same. Every option has a
default that works. The order of precedence: `MICRONOVA__SECTION__OPTION` in the environment, the TOML file, the
default.
"""

import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from micronova.conf.console import VNC, Console, ConsoleAuth, SerialConsole, Spice
from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import MicronovaError


class SettingsError(MicronovaError):
    """A setting is wrong; the message is one line for a person."""

    code = "settings"


def _doc(text: str) -> Meta:
    return Meta(description=text)


class Default(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not in a section of its own in Nova."""

    host: Annotated[str, _doc("This machine's name in the cloud; empty: its host name.")] = ""
    state_path: Annotated[str, _doc("Directory of everything that survives a restart.")] = ""
    user: Annotated[
        str, _doc("Whom root's `micronova up` works as: a system user, made when it is missing; root: stay root.")
    ] = "micronova"
    secret_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that api and conductor share to seal secrets; empty: from state_path.",
        ),
    ] = ""
    transport_url: Annotated[str, _doc("The bus: local:// (one process) or amqp://USER:PASSWORD@HOST/VHOST.")] = (
        "local://"
    )
    control_users: Annotated[
        tuple[str, ...],
        _doc("Broker users whose messages count; a compute host's own may only report. Empty: everybody's do."),
    ] = ()
    control_exchange: Annotated[str, _doc("The broker's exchange at which listeners wait for notifications.")] = "nova"
    report_interval: Annotated[float, Meta(gt=0, description="Seconds between heartbeats of a service.")] = 5.0
    service_down_time: Annotated[float, Meta(gt=0, description="A service not heard of for so long is down.")] = 20.0
    reserved_host_memory_mb: Annotated[int, Meta(ge=0, description="Memory of a host that guests never get.")] = 512
    reserved_host_cpus: Annotated[int, Meta(ge=0, description="CPUs of a host that guests never get.")] = 0
    reserved_host_disk_mb: Annotated[int, Meta(ge=0, description="Disk of a host that guests never get.")] = 0
    cpu_allocation_ratio: Annotated[float, Meta(gt=0, description="Virtual CPUs per CPU.")] = 4.0
    ram_allocation_ratio: Annotated[float, Meta(gt=0, description="Guest memory per memory.")] = 1.0
    disk_allocation_ratio: Annotated[float, Meta(gt=0, description="Guest disk per disk.")] = 1.0
    max_concurrent_builds: Annotated[int, Meta(ge=0, description="Builds at a time on one host; 0: no limit.")] = 10
    default_availability_zone: Annotated[str, _doc("Zone of hosts that are in no zone's aggregate.")] = "nova"
    default_schedule_zone: Annotated[str | None, _doc("Zone for servers that ask for none; empty: any.")] = None
    default_access_ip_network_name: Annotated[
        str | None, _doc("Network whose addresses become a server's access IPs.")
    ] = None
    vif_plugging_timeout: Annotated[float, Meta(ge=0, description="Seconds to wait for the network's events.")] = 300.0
    vif_plugging_is_fatal: Annotated[bool, _doc("Whether a build fails when they do not come.")] = True
    shutdown_timeout: Annotated[float, Meta(ge=0, description="Seconds a guest has to shut itself down.")] = 60.0
    instance_build_timeout: Annotated[float, Meta(gt=0, description="A build that takes longer ends in ERROR.")] = (
        3600.0
    )
    log_level: Annotated[str, Meta(pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least level to log.")] = "INFO"
    log_format: Annotated[str, Meta(pattern="^(text|json)$", description="Logs for people, or one JSON a line.")] = (
        "text"
    )


class API(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute API."""

    auth_strategy: Annotated[
        str, Meta(pattern="^(keystone|noauth2)$", description="keystone, or noauth2 (development).")
    ] = "keystone"
    listen: Annotated[str, _doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of every API.")] = 8774
    workers: Annotated[int, Meta(ge=1, description="Processes of `micronova run api`.")] = 1
    public_url: Annotated[str | None, _doc("scheme://host:port as clients see it; default: what they asked for.")] = (
        None
    )
    max_limit: Annotated[int, Meta(ge=1, description="Most items in one page of a list.")] = 1000
    max_request_body_size: Annotated[int, Meta(ge=1024, description="Largest body in bytes, uploads aside.")] = 114688
    policy_file: Annotated[str | None, _doc("policy.yaml with rules that differ from the defaults.")] = None
    fault_injection: Annotated[bool, _doc("Whether admins may set the fake driver's fault rules at run time.")] = False
    metrics_listen: Annotated[str, _doc("ADDRESS:PORT of /metrics for `run`; empty: none.")] = ""
    tls_certificate: Annotated[str | None, _doc("PEM file; with tls_key the API speaks HTTPS.")] = None
    tls_key: Annotated[str | None, _doc("PEM file of the private key.")] = None
    cors_allowed_origins: Annotated[tuple[str, ...], _doc("Web origins that browsers may call from.")] = ()
    metadata_cache_expiration: Annotated[
        float, Meta(ge=0, description="Seconds that the metadata service remembers a server; 0: it does not.")
    ] = 15.0
    vendordata_providers: Annotated[tuple[str, ...], _doc("What guests are told: StaticJSON, DynamicJSON.")] = (
        "StaticJSON",
    )
    vendordata_jsonfile_path: Annotated[str, _doc("JSON file that every guest can read (StaticJSON).")] = ""
    vendordata_dynamic_targets: Annotated[
        tuple[str, ...], _doc("NAME@URL of services that are asked about each guest (DynamicJSON).")
    ] = ()
    vendordata_dynamic_ssl_certfile: Annotated[str, _doc("PEM file to verify their certificates with.")] = ""
    vendordata_dynamic_connect_timeout: Annotated[float, Meta(gt=0, description="Seconds to connect to one.")] = 5.0
    vendordata_dynamic_read_timeout: Annotated[float, Meta(gt=0, description="Seconds that its answer may take.")] = 5.0
    vendordata_dynamic_failure_fatal: Annotated[
        bool, _doc("Whether a guest gets an error when one fails; else it gets nothing from that one.")
    ] = False


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the truth is."""

    connection: Annotated[
        str, _doc("sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; empty: SQLite in state_path.")
    ] = ""
    pool_size: Annotated[int, Meta(ge=1, description="Connections of one process to PostgreSQL.")] = 10


class Conductor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable operations."""

    lease: Annotated[float, Meta(gt=0, description="Seconds until another takes over work that is not renewed.")] = 20.0
    sweep_interval: Annotated[float, Meta(gt=0, description="Seconds between looks for work without an owner.")] = 2.0
    require_host_users: Annotated[
        bool, _doc("Whether every compute host must have a broker user of its own (micronova host add).")
    ] = False
    keep_finished: Annotated[float, Meta(ge=0, description="Seconds that finished operations are kept for admins.")] = (
        86400.0
    )
    concurrency: Annotated[int, Meta(ge=1, description="Operations that one conductor works on at a time.")] = 64


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placing."""

    max_attempts: Annotated[int, Meta(ge=1, description="Hosts that a build may try.")] = 3
    refresh_interval: Annotated[float, Meta(gt=0, description="Seconds that the host table may be behind.")] = 0.5


class FilterScheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and weighers."""

    enabled_filters: Annotated[tuple[str, ...], _doc("Filters that every request passes, in this order.")] = (
        "RetryFilter",
        "AvailabilityZoneFilter",
        "RamFilter",
        "DiskFilter",
        "ComputeFilter",
        "ComputeCapabilitiesFilter",
        "ImagePropertiesFilter",
        "ServerGroupAntiAffinityFilter",
        "ServerGroupAffinityFilter",
    )
    host_subset_size: Annotated[int, Meta(ge=1, description="Choose at random among so many of the best.")] = 1
    shuffle_best_same_weighed_hosts: Annotated[bool, _doc("Choose at random among equally good ones.")] = False
    ram_weight_multiplier: Annotated[float, _doc("Positive: spread by memory; negative: stack.")] = 1.0
    cpu_weight_multiplier: Annotated[float, _doc("Positive: spread by CPUs; negative: stack.")] = 1.0
    disk_weight_multiplier: Annotated[float, _doc("Positive: spread by disk; negative: stack.")] = 1.0
    soft_affinity_weight_multiplier: Annotated[float, Meta(ge=0, description="Weight of soft affinity.")] = 1.0
    soft_anti_affinity_weight_multiplier: Annotated[float, Meta(ge=0, description="Weight of soft anti-affinity.")] = (
        1.0
    )
    build_failure_weight_multiplier: Annotated[float, _doc("Weight against hosts whose builds failed.")] = 1000000.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default limits of a project; -1 is no limit."""

    instances: Annotated[int, _doc("Servers.")] = 10
    cores: Annotated[int, _doc("Virtual CPUs.")] = 20
    ram: Annotated[int, _doc("MiB of memory.")] = 51200
    metadata_items: Annotated[int, _doc("Metadata items of one server.")] = 128
    injected_files: Annotated[int, _doc("Files injected into one server.")] = 5
    injected_file_content_bytes: Annotated[int, _doc("Bytes of one injected file.")] = 10240
    injected_file_path_length: Annotated[int, _doc("Length of an injected file's path.")] = 255
    key_pairs: Annotated[int, _doc("Key pairs of one user.")] = 100
    server_groups: Annotated[int, _doc("Server groups.")] = 10
    server_group_members: Annotated[int, _doc("Servers in one group.")] = 10


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tokens come from."""

    auth_url: Annotated[str, _doc("URL of a Keystone (…/v3); empty: the embedded one.")] = ""
    username: Annotated[str, _doc("The service user that calls the neighbours.")] = "micronova"
    password: Annotated[str, _doc("Its password; empty: from state_path.")] = ""
    project_name: Annotated[str, _doc("Its project.")] = "service"
    user_domain_name: Annotated[str, _doc("Domain of the user.")] = "Default"
    project_domain_name: Annotated[str, _doc("Domain of the project.")] = "Default"
    region_name: Annotated[str, _doc("Region in the catalog.")] = "RegionOne"
    token_cache_time: Annotated[float, Meta(ge=0, description="Seconds that a validated token is remembered.")] = 300.0
    token_lifetime: Annotated[float, Meta(gt=0, description="Seconds that an embedded identity's token is good.")] = (
        14400.0
    )
    public_key: Annotated[str, _doc("Hex key that verifies the embedded identity's tokens without asking it.")] = ""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A neighbouring service."""

    endpoint_override: Annotated[str, _doc("Its URL; empty: the embedded one, or the catalog's.")] = ""


class Glance(Neighbour, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image service."""

    ticket_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that an embedded image service shares with conductors in other processes.",
        ),
    ] = ""


class Neutron(Neighbour, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network service."""

    ticket_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that conductors, an embedded network service and the metadata service share to "
            "give each compute host its own keys; empty: from state_path.",
        ),
    ] = ""
    metadata_proxy_shared_secret: Annotated[
        str, _doc("What the metadata service shares with a real Neutron's proxies; empty: it believes only our hosts.")
    ] = ""
    metadata_url: Annotated[
        str, _doc("The metadata service, for a network agent in another process; empty: the one in this process.")
    ] = ""


class Nova(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute service, as an embedded network service reaches it."""

    endpoint_override: Annotated[
        str, _doc("Its URL, for a network service in another process, which tells it of ports; empty: in this process.")
    ] = ""


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the embedded image service takes."""

    require_image_format_match: Annotated[
        bool, _doc("Whether an upload is refused if it is unsafe or not of its declared disk_format.")
    ] = True


class Fake(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated hypervisor."""

    hosts: Annotated[int, Meta(ge=1, description="Hosts in one process.")] = 1
    host_pattern: Annotated[str, _doc("Names of the hosts; {} is the number.")] = "fake-{}"
    vcpus: Annotated[int, Meta(ge=1, description="CPUs of each host.")] = 64
    memory_mb: Annotated[int, Meta(ge=1, description="Memory of each host.")] = 262144
    local_gb: Annotated[int, Meta(ge=1, description="Disk of each host.")] = 4096
    rules: Annotated[tuple[dict[str, Any], ...], _doc("Fault and latency rules; see docs/fake-driver.md.")] = ()


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent on a host."""

    compute_driver: Annotated[str, _doc("fake, libvirt, or a driver's entry point.")] = "fake"
    shutdown_grace: Annotated[float, Meta(ge=0, description="Seconds that work in hand may go on at SIGTERM.")] = 10.0
    resource_interval: Annotated[float, Meta(gt=0, description="Seconds between audits of a host's resources.")] = 60.0
    boot_timeout: Annotated[
        float, Meta(ge=0, description="Seconds until a guest that shows no sign of booting is in ERROR; 0: never.")
    ] = 300.0


class Notifications(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notifications to other services."""

    notification_format: Annotated[
        str, Meta(pattern="^(unversioned|versioned|both|none)$", description="Which kinds are sent.")
    ] = "both"
    versioned_notifications_topics: Annotated[tuple[str, ...], _doc("Topics of versioned ones.")] = (
        "versioned_notifications",
    )
    topics: Annotated[tuple[str, ...], _doc("Topics of unversioned ones.")] = ("notifications",)
    transport_url: Annotated[str, _doc("Where they go; empty: the bus's broker.")] = ""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces."""

    otlp_endpoint: Annotated[str, _doc("OTLP/HTTP collector for traces; empty: none is sent.")] = ""


class UpgradeLevels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contract versions to pin messages to during a rolling upgrade; empty: the newest."""

    compute: Annotated[str, _doc("Of messages to compute hosts.")] = ""
    conductor: Annotated[str, _doc("Of messages to conductors.")] = ""
    scheduler: Annotated[str, _doc("Of messages to schedulers.")] = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, by section."""

    default: Default = Default()
    api: API = API()
    database: DatabaseSettings = DatabaseSettings()
    conductor: Conductor = Conductor()
    scheduler: Scheduler = Scheduler()
    filter_scheduler: FilterScheduler = FilterScheduler()
    quota: Quota = Quota()
    identity: Identity = Identity()
    glance: Glance = Glance()
    image_format: ImageFormat = ImageFormat()
    neutron: Neutron = Neutron()
    nova: Nova = Nova()
    compute: Compute = Compute()
    fake: Fake = Fake()
    libvirt: LibvirtSettings = LibvirtSettings()
    consoleauth: ConsoleAuth = ConsoleAuth()
    vnc: VNC = VNC()
    spice: Spice = Spice()
    serial_console: SerialConsole = SerialConsole()
    console: Console = Console()
    notifications: Notifications = Notifications()
    telemetry: Telemetry = Telemetry()
    upgrade_levels: UpgradeLevels = UpgradeLevels()


def load(
    path: Path | None = None, environ: Mapping[str, str] | None = None, **overrides: Mapping[str, Any]
) -> Settings:
    """Read the file, then the environment, then `overrides` (by section); raise SettingsError in one line."""
    tree: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingsError(f"Cannot read {path}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not valid TOML: {error}.") from None
        for name, value in document.items():
            section = name if isinstance(value, dict) else "default"
            content = value if isinstance(value, dict) else {name: value}
            tree.setdefault(section.lower(), {}).update(content)
    for name, text in (os.environ if environ is None else environ).items():
        if not name.startswith("MICRONOVA__"):
            continue
        section, _, option = name.removeprefix("MICRONOVA__").lower().partition("__")
        tree.setdefault(section, {})[option] = _from_text(section, option, text)
    for section, values in overrides.items():
        tree.setdefault(section, {}).update({k: v for k, v in values.items() if v is not None})
    try:
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        option = where.rstrip("`") or "a section"
        raise SettingsError(
            f"Bad setting {option}: {text}. `micronova config` lists every option with its meaning."
        ) from None


def _from_text(section: str, option: str, text: str) -> Any:
    """Read an environment value: a list option takes words separated by commas."""
    for name, _, _, kind in options():
        if name == f"{section}.{option}" and typing.get_origin(kind) is tuple:
            return [part.strip() for part in text.split(",") if part.strip()]
    return text


def options() -> list[tuple[str, Any, str, Any]]:
    """List every option: its name, default, meaning and type."""
    found = []
    for section in msgspec.structs.fields(Settings):
        hints = typing.get_type_hints(section.type, include_extras=True)
        for option in msgspec.structs.fields(section.type):
            annotated = typing.get_args(hints[option.name])
            description = next((m.description for m in annotated[1:] if isinstance(m, Meta)), "") or ""
            found.append((f"{section.name}.{option.name}", option.default, description, annotated[0]))
    return found
