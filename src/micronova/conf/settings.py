"""Every setting, typed, in one frozen object that is passed in; there is no global.

Sections and options have the names that Nova's operators know where the meaning is the same. Every option has a
default that works. The order of precedence: `MICRONOVA__SECTION__OPTION` in the environment, the TOML file, the
default.
"""

import os
import re
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
    """Settings that Nova has in its section DEFAULT."""

    host: Annotated[
        str,
        _doc(
            "Name of this machine in the cloud. Empty: its host name. Set it if "
            "host names are not unique or may change."
        ),
    ] = ""
    state_path: Annotated[
        str,
        _doc(
            "Directory of all files that survive a restart. Empty: /var/lib/micronova "
            "for root, else ~/.local/state/micronova."
        ),
    ] = ""
    user: Annotated[
        str,
        _doc(
            'System user that a cloud started by root runs as; created if it is missing. "root" keeps root\'s rights.'
        ),
    ] = "micronova"
    agent_user: Annotated[
        str,
        _doc(
            "System user that the agents of a cloud with real guests run as, if root starts the cloud; created if it "
            "is missing. It may use libvirt, which is equivalent to root; default.user may not."
        ),
    ] = "micronova-agent"
    secret_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that encrypt the secrets of waiting operations. All api and conductor "
            "processes need the same; empty: from state_path.",
        ),
    ] = ""
    transport_url: Annotated[
        str,
        _doc(
            "URL of the message bus: local:// in one process, "
            "amqp://USER:PASSWORD@HOST[,HOST…]/VHOST between processes."
        ),
    ] = "local://"
    control_users: Annotated[
        tuple[str, ...],
        _doc(
            "Broker users that may give orders and answer for services; the users of compute hosts may only report and "
            "answer for themselves. Empty: messages of all users are accepted, and every start logs a warning."
        ),
    ] = ()
    control_exchange: Annotated[
        str,
        _doc("Exchange of the broker that notifications are published to. Change it if listeners expect another name."),
    ] = "nova"
    report_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between heartbeats of a service. Longer intervals "
            "cost less and notice failures later. Conductors let compute hosts wait longer when there are more than "
            "500 for each second of it, up to a third of service_down_time.",
        ),
    ] = 5.0
    service_down_time: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a heartbeat after which a service is down. Keep it "
            "at three report_intervals or more. With thousands of hosts, 60 lets heartbeats be rarer; set "
            "conductor.lease to the same.",
        ),
    ] = 20.0
    reserved_host_memory_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of memory of each host that guests do not get. Raise it if the host runs other programs.",
        ),
    ] = 512
    reserved_host_cpus: Annotated[int, Meta(ge=0, description="CPUs of each host that guests do not get.")] = 0
    reserved_host_disk_mb: Annotated[
        int, Meta(ge=0, description="MiB of disk of each host that guests do not get.")
    ] = 0
    cpu_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0,
            description="Virtual CPUs that guests may have per CPU of a host. Raise it if "
            "guests are mostly idle and do not fit.",
        ),
    ] = 4.0
    ram_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0, description="MiB of memory that guests may have per MiB of a host. Above 1 the host may have to swap."
        ),
    ] = 1.0
    disk_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0,
            description="GiB of disk that guests may have per GiB of a host. Above 1 disks "
            "that fill up can exhaust the host's.",
        ),
    ] = 1.0
    max_concurrent_builds: Annotated[
        int,
        Meta(
            ge=0, description="Builds that run at the same time on one host; 0: no limit. Lower it if the disk is slow."
        ),
    ] = 10
    default_availability_zone: Annotated[str, _doc("Availability zone of hosts whose aggregates name none.")] = "nova"
    default_schedule_zone: Annotated[
        str | None, _doc("Availability zone of servers whose request names none; empty: any zone.")
    ] = None
    default_access_ip_network_name: Annotated[
        str | None,
        _doc("Name of the network whose addresses become a server's accessIPv4 and accessIPv6; empty: none."),
    ] = None
    vif_plugging_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a build waits until the network service reports its "
            "ports as plugged; 0: it does not wait.",
        ),
    ] = 300.0
    vif_plugging_is_fatal: Annotated[
        bool,
        _doc(
            "Whether a build fails if the ports are not plugged within "
            "vif_plugging_timeout; else the guest starts anyway."
        ),
    ] = True
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that a guest has to shut down by itself before it is powered off.")
    ] = 60.0
    resume_guests_state_on_host_boot: Annotated[
        bool | None,
        _doc(
            "Whether a compute agent that starts also starts guests that should run and do not, such as those of a "
            "machine that was switched off. Servers that their owner has stopped stay stopped. "
            "Empty: yes in a cloud of micronova up, else no."
        ),
    ] = None
    instance_build_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which an operation that has not ended fails. "
            "A build then puts its server in ERROR; most actions leave its state as it was.",
        ),
    ] = 3600.0
    log_level: Annotated[
        str,
        Meta(
            pattern="^(DEBUG|INFO|WARNING|ERROR)$",
            description="Lowest level that is logged: DEBUG, INFO, WARNING or ERROR.",
        ),
    ] = "INFO"
    log_format: Annotated[
        str,
        Meta(
            pattern="^(text|json)$",
            description="Format of the log: text for people, json for one JSON object per line.",
        ),
    ] = "text"
    log_file_max_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of DIR/micronova.log, the log of `up --detach`, above which its first half is removed; "
            "0: no limit.",
        ),
    ] = 104_857_600


class API(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute API."""

    auth_strategy: Annotated[
        str,
        Meta(
            pattern="^(keystone|noauth2)$",
            description="How requests are authenticated: keystone by tokens; noauth2 believes "
            "every request and is for development.",
        ),
    ] = "keystone"
    listen: Annotated[str, _doc("Address that the HTTP APIs listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port of all HTTP APIs of a process; 0: a free one.")] = (
        8774
    )
    workers: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes that share the port of `micronova run` with HTTP "
            "roles. One per CPU is a good number.",
        ),
    ] = 1
    public_url: Annotated[
        str | None,
        _doc("scheme://host:port in links and in the catalog. Set it behind a proxy; default: what the client called."),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        _doc(
            "Addresses and networks of proxies whose headers X-Forwarded-Proto, X-Forwarded-Host and X-Forwarded-For "
            "are believed. Those of all other clients are ignored."
        ),
    ] = ("127.0.0.1", "::1")
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all clients that a process serves at once. Further ones get 503, or are "
            "closed if the APIs speak HTTPS. Each takes some 20 KB and a file descriptor.",
        ),
    ] = 4096
    max_connections_per_client: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of one address, or of one IPv6 /64 network, that a process serves at once. "
            "Further ones get 429, or are closed if the APIs speak HTTPS. Those of trusted_proxies are not counted.",
        ),
    ] = 512
    client_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a client may take for the TLS handshake, to send the headers or the body of a "
            "request, that an upload may pause, and that an answer may stay unread.",
        ),
    ] = 60.0
    max_limit: Annotated[
        int, Meta(ge=1, description="Largest number of items in one page of a list of compute or network.")
    ] = 1000
    max_request_body_size: Annotated[
        int, Meta(ge=1024, description="Largest request body in bytes; uploads of images are not limited by it.")
    ] = 114688
    policy_file: Annotated[str | None, _doc("Path of a policy.yaml with the rules that differ from the defaults.")] = (
        None
    )
    fault_injection: Annotated[
        bool, _doc("Whether admins may change the fault rules of the fake driver by the API, for tests.")
    ] = False
    metrics_listen: Annotated[
        str, _doc("ADDRESS:PORT at which `micronova run` serves Prometheus metrics at /metrics; empty: none.")
    ] = ""
    tls_certificate: Annotated[str | None, _doc("PEM file of the certificate. With tls_key the APIs speak HTTPS.")] = (
        None
    )
    tls_key: Annotated[str | None, _doc("PEM file of the certificate's private key.")] = None
    cors_allowed_origins: Annotated[
        tuple[str, ...], _doc("Web origins whose pages may call the APIs from a browser (CORS); `*`: all.")
    ] = ()
    metadata_cache_expiration: Annotated[
        float, Meta(ge=0, description="Seconds that the metadata service caches the data of a server; 0: no cache.")
    ] = 15.0
    vendordata_providers: Annotated[
        tuple[str, ...], _doc("Sources of vendor data for guests: StaticJSON, DynamicJSON.")
    ] = ("StaticJSON",)
    vendordata_jsonfile_path: Annotated[str, _doc("JSON file whose content every guest gets (StaticJSON).")] = ""
    vendordata_dynamic_targets: Annotated[
        tuple[str, ...],
        _doc("NAME@URL of the services that are asked for the vendor data of each guest (DynamicJSON)."),
    ] = ()
    vendordata_dynamic_ssl_certfile: Annotated[
        str, _doc("PEM file of the authorities that verify the certificates of these services; empty: the system's.")
    ] = ""
    vendordata_dynamic_connect_timeout: Annotated[
        float, Meta(gt=0, description="Seconds to connect to such a service.")
    ] = 5.0
    vendordata_dynamic_read_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that the answer of such a service may take.")
    ] = 5.0
    vendordata_dynamic_failure_fatal: Annotated[
        bool, _doc("Whether a guest gets an error if such a service fails; else that part of its data is empty.")
    ] = False


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The database."""

    connection: Annotated[
        str,
        _doc(
            "URL of the database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; empty: SQLite in state_path."
        ),
    ] = ""
    pool_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections that one process keeps to PostgreSQL. Their sum must stay "
            "below the server's max_connections.",
        ),
    ] = 10


class Conductor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable operations."""

    lease: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which another conductor takes over an operation whose lease was not renewed.",
        ),
    ] = 20.0
    sweep_interval: Annotated[
        float, Meta(gt=0, description="Seconds between searches for operations without a valid lease.")
    ] = 2.0
    require_host_users: Annotated[
        bool, _doc("Whether a compute host needs its own broker user (micronova host add). Set it in a region.")
    ] = False
    keep_finished: Annotated[
        float, Meta(ge=0, description="Seconds that finished operations are kept, for `micronova timeline`.")
    ] = 86400.0
    keep_deleted: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that the records of deleted servers are kept, with their actions, faults and usage; "
            "0 keeps them until `micronova db purge`.",
        ),
    ] = 0.0
    concurrency: Annotated[int, Meta(ge=1, description="Operations that one conductor runs at the same time.")] = 64


class Scheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler."""

    max_attempts: Annotated[
        int, Meta(ge=1, description="Hosts on which a build may fail before its server is in ERROR.")
    ] = 3
    refresh_interval: Annotated[
        float, Meta(gt=0, description="Seconds between updates of the scheduler's table of hosts.")
    ] = 0.5


class FilterScheduler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and weighers."""

    enabled_filters: Annotated[
        tuple[str, ...],
        _doc(
            "Filters that are applied to every request, in this order. The API reads this too: it refuses scheduler "
            "hints and extra specs that no enabled filter honours, so it must be the same there."
        ),
    ] = (
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
    host_subset_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of best hosts among which one is chosen at random. Above 1 "
            "several schedulers collide less often.",
        ),
    ] = 1
    shuffle_best_same_weighed_hosts: Annotated[
        bool, _doc("Whether to choose at random among hosts of equal weight.")
    ] = False
    ram_weight_multiplier: Annotated[
        float, _doc("Weight of free memory: positive spreads servers over hosts, negative fills hosts one by one.")
    ] = 1.0
    cpu_weight_multiplier: Annotated[
        float, _doc("Weight of free CPUs: positive spreads servers over hosts, negative fills hosts one by one.")
    ] = 1.0
    disk_weight_multiplier: Annotated[
        float, _doc("Weight of free disk: positive spreads servers over hosts, negative fills hosts one by one.")
    ] = 1.0
    soft_affinity_weight_multiplier: Annotated[
        float, Meta(ge=0, description="Weight of hosts that have servers of the same soft-affinity group.")
    ] = 1.0
    soft_anti_affinity_weight_multiplier: Annotated[
        float, Meta(ge=0, description="Weight of hosts that have few servers of the same soft-anti-affinity group.")
    ] = 1.0
    build_failure_weight_multiplier: Annotated[
        float, _doc("Weight against hosts whose recent builds failed; 0: failures do not matter.")
    ] = 1000000.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default limits of a project; -1 is no limit."""

    instances: Annotated[int, _doc("Servers of one project.")] = 10
    cores: Annotated[int, _doc("Virtual CPUs of all servers of one project.")] = 20
    ram: Annotated[int, _doc("MiB of memory of all servers of one project.")] = 51200
    metadata_items: Annotated[int, _doc("Metadata items of one server.")] = 128
    injected_files: Annotated[int, _doc("Files injected into one server.")] = 5
    injected_file_content_bytes: Annotated[int, _doc("Bytes of one injected file.")] = 10240
    injected_file_path_length: Annotated[int, _doc("Characters of an injected file's path.")] = 255
    key_pairs: Annotated[int, _doc("Key pairs of one user.")] = 100
    server_groups: Annotated[int, _doc("Server groups of one project.")] = 10
    server_group_members: Annotated[int, _doc("Servers in one server group.")] = 10

    def limits(self) -> dict[str, int]:
        """Return the limits by the names that the API and the database use: one setting has Nova's other name."""
        found = msgspec.structs.asdict(self)
        found["injected_file_path_bytes"] = found.pop("injected_file_path_length")
        return found


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity service and the service user."""

    auth_url: Annotated[str, _doc("URL of a Keystone (https://…/v3); empty: the embedded identity service.")] = ""
    username: Annotated[str, _doc("Service user that calls the other OpenStack services.")] = "micronova"
    password: Annotated[str, _doc("Password of the service user; empty: from state_path.")] = ""
    project_name: Annotated[str, _doc("Project of the service user.")] = "service"
    user_domain_name: Annotated[str, _doc("Domain of the service user.")] = "Default"
    project_domain_name: Annotated[str, _doc("Domain of the service user's project.")] = "Default"
    region_name: Annotated[
        str, _doc("Region of this cloud; endpoints of other services are taken from this region of the catalog.")
    ] = "RegionOne"
    token_cache_time: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that the validation of a token is cached. A revoked token is "
            "accepted for that long; 0: no cache.",
        ),
    ] = 300.0
    token_lifetime: Annotated[
        float, Meta(gt=0, description="Seconds that a token of the embedded identity service is valid.")
    ] = 14400.0
    max_password_checks: Annotated[
        int,
        Meta(
            ge=1,
            description="Passwords that may wait to be checked by the embedded identity service, which takes some "
            "30 ms each; a further log-in gets 503.",
        ),
    ] = 256
    public_key: Annotated[
        str,
        _doc(
            "Hex digits of the keys (separated by spaces) that verify tokens of an embedded identity service in "
            "another process, without asking it; `micronova token-key show` prints them. Tokens of other keys are "
            "asked about."
        ),
    ] = ""


class OtherService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenStack service besides compute."""

    endpoint_override: Annotated[
        str,
        _doc(
            "URL of the service; empty: the embedded one, or without it the internal or public endpoint in the catalog."
        ),
    ] = ""


class Glance(OtherService, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image service."""

    ticket_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that an embedded image service shares with conductors in "
            "other processes, to sign image tickets.",
        ),
    ] = ""


class Image(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded image service."""

    user_storage_quota: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of image data that a project may keep; an upload beyond that gets 413. 0: no limit.",
        ),
    ] = 107_374_182_400
    image_size_cap: Annotated[
        int, Meta(ge=1, description="Bytes that one image may have; a larger upload gets 413.")
    ] = 1_099_511_627_776
    uploads_per_project: Annotated[
        int,
        Meta(
            ge=0,
            description="Uploads that a project may have under way at once; a further one gets 413. 0: no limit.",
        ),
    ] = 10


class Neutron(OtherService, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        str,
        _doc(
            "Secret that the metadata service shares with the proxies of a real Neutron; "
            "empty: only Micronova's agents are believed."
        ),
    ] = ""
    metadata_url: Annotated[
        str,
        _doc("URL of the metadata service, for a network agent in another process; empty: the one in this process."),
    ] = ""


class NetworkAgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network agent of a host."""

    connections_per_port: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="Connections that the kernel tracks for one port at once; further ones are dropped, so that "
            "one guest cannot fill the kernel's table (net.netfilter.nf_conntrack_max). Raise it for guests with more "
            "connections, and that table with it. 0 is no limit.",
        ),
    ] = 10_000
    metadata_connections_per_guest: Annotated[
        int, Meta(ge=1, description="Connections of one guest to its metadata proxy at once; further ones get a 503.")
    ] = 16
    metadata_connections_per_network: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of one network on the host to its metadata proxy at once; further "
            "ones get a 503.",
        ),
    ] = 256
    metadata_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all guests of the host to metadata proxies at once; further ones get a 503. "
            "Each takes two file descriptors of the network agent.",
        ),
    ] = 1024
    metadata_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds within which a guest has to send its metadata request, and again to receive the "
            "answer; then the connection is closed.",
        ),
    ] = 10.0


class Nova(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute service, as an embedded network service reaches it."""

    endpoint_override: Annotated[
        str,
        _doc(
            "URL of the compute API to which the embedded network service sends events of ports; empty: the API in the "
            "same process, or without it the internal or public endpoint in the catalog."
        ),
    ] = ""


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checks of uploads to the embedded image service."""

    require_image_format_match: Annotated[
        bool,
        _doc("Whether the embedded image service refuses an upload that is unsafe or not of its declared disk_format."),
    ] = True


class Fake(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated hypervisor."""

    hosts: Annotated[int, Meta(ge=1, description="Simulated hosts in one process.")] = 1
    host_pattern: Annotated[str, _doc("Names of the simulated hosts; {} stands for the number.")] = "fake-{}"
    vcpus: Annotated[int, Meta(ge=1, description="CPUs of each simulated host.")] = 64
    memory_mb: Annotated[int, Meta(ge=1, description="MiB of memory of each simulated host.")] = 262144
    local_gb: Annotated[int, Meta(ge=1, description="GiB of disk of each simulated host.")] = 4096
    rules: Annotated[tuple[dict[str, Any], ...], _doc("Fault and latency rules; see docs/fake-driver.md.")] = ()


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent on a host."""

    compute_driver: Annotated[str, _doc("Hypervisor driver: fake, libvirt, or the entry point of another.")] = "fake"
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds that running work has to end when the agent is told to stop.")
    ] = 10.0
    resource_interval: Annotated[float, Meta(gt=0, description="Seconds between reports of a host's resources.")] = 60.0
    boot_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds after which a guest that shows no sign of booting is in ERROR; 0: never."),
    ] = 300.0


class Notifications(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notifications to other services."""

    notification_format: Annotated[
        str,
        Meta(
            pattern="^(unversioned|versioned|both|none)$",
            description="Kinds of notifications that are sent: unversioned, versioned, both or none.",
        ),
    ] = "both"
    versioned_notifications_topics: Annotated[tuple[str, ...], _doc("Topics of versioned notifications.")] = (
        "versioned_notifications",
    )
    topics: Annotated[tuple[str, ...], _doc("Topics of unversioned notifications.")] = ("notifications",)
    transport_url: Annotated[
        str, _doc("URL of the broker that notifications are sent to; empty: that of default.transport_url.")
    ] = ""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces."""

    otlp_endpoint: Annotated[str, _doc("URL of the OTLP/HTTP collector that traces are sent to; empty: no traces.")] = (
        ""
    )


class UpgradeLevels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contract versions to pin messages to during a rolling upgrade; empty: the newest."""

    compute: Annotated[str, _doc("Version of messages to compute hosts.")] = ""
    conductor: Annotated[str, _doc("Version of messages to conductors.")] = ""
    scheduler: Annotated[str, _doc("Version of messages to schedulers.")] = ""


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
    image: Image = Image()
    image_format: ImageFormat = ImageFormat()
    neutron: Neutron = Neutron()
    network_agent: NetworkAgentSettings = NetworkAgentSettings()
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
        unknown = re.fullmatch("Object contains unknown field `(.*)`", text)
        place = where.rstrip("`")
        if unknown is not None:
            problem = f"There is no setting {place}.{unknown[1]}" if place else f"There is no section {unknown[1]}"
        else:
            problem = f"Bad setting {place}: {text}"
        raise SettingsError(f"{problem}. `micronova config` lists every option with its meaning.") from None


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
