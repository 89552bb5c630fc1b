"""Settings of what controls the cloud: database, conductor, scheduler, notifications, traces, versions of messages."""

from typing import Annotated

import msgspec
from msgspec import Meta


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The database."""

    connection: Annotated[
        str,
        Meta(
            description="URL of the database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; empty: "
            "SQLite in state_path. Set it in a region.",
            examples=["postgresql://micronova:SECRET@database.example/micronova"],
        ),
    ] = ""
    pool_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections that one process keeps to PostgreSQL. The sum over all processes must stay "
            "below max_connections of the server. Raise it if requests fail because all connections "
            "are in use; lower it if there are many processes.",
        ),
    ] = 10


class ConductorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable operations."""

    lease: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which another conductor takes over an operation whose lease was not "
            "renewed. Raise it together with default.service_down_time in a region of thousands of "
            "hosts.",
        ),
    ] = 20.0
    workers: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes of `micronova run` with the role conductor. Each is a conductor with another "
            "name (HOST, HOST-2…). Raise it if one conductor uses a whole CPU.",
        ),
    ] = 1
    sweep_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between searches for operations without a valid lease. Raise it if the search "
            "burdens the database.",
        ),
    ] = 2.0
    require_host_users: Annotated[
        bool,
        Meta(
            description="Whether each compute host needs a broker user for itself (micronova host add). Set it in "
            "a region.",
        ),
    ] = False
    keep_finished: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that finished operations are kept, for `micronova timeline`. Raise it if you look "
            "into the past further than a day.",
        ),
    ] = 86400.0
    keep_deleted: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that the records of deleted servers are kept, with their actions, faults and "
            "usage; 0 keeps them until `micronova db purge`. Set it if the database should not grow "
            "for ever.",
        ),
    ] = 0.0
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            description="Operations that one conductor runs at the same time. Raise it if operations wait while "
            "the conductor is idle.",
        ),
    ] = 64


class ImageCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fetching images to hosts ahead of time."""

    precache_concurrency: Annotated[
        int,
        Meta(
            ge=1,
            description="Hosts that fetch images ahead of time (POST /os-aggregates/ID/images) at once, for each "
            "conductor. More hosts end sooner, and burden the image service more. Raise it if the "
            "image service is fast.",
        ),
    ] = 1


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler."""

    workers: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes of `micronova run` with the role scheduler. Each is a scheduler with another "
            "name (HOST, HOST-2…). Raise it if one scheduler uses a whole CPU.",
        ),
    ] = 1
    max_attempts: Annotated[
        int,
        Meta(
            ge=1,
            description="Hosts on which a build may fail before the server is in ERROR. As many hosts may go down "
            "during the build, one after the other: these are counted separately, and not in an outage "
            "of all hosts. Raise it if builds fail on single hosts of a large fleet.",
        ),
    ] = 3
    refresh_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between updates of the scheduler's table of hosts. Raise it if the updates burden "
            "the database.",
        ),
    ] = 0.5
    query_placement_for_image_type_support: Annotated[
        bool,
        Meta(
            description="Whether servers go only to hosts with the trait COMPUTE_IMAGE_TYPE_… of the format of their "
            "image. Turn it on if not all hosts take all formats, and all report these traits."
        ),
    ] = False
    limit_tenants_to_placement_aggregate: Annotated[
        bool,
        Meta(
            description="Whether servers of a project that an aggregate names (a metadata key that begins with "
            "filter_tenant_id) go only to hosts of such aggregates. Set it to true if projects have "
            "separate hosts.",
        ),
    ] = False
    placement_aggregate_required_for_tenants: Annotated[
        bool,
        Meta(
            description="With limit_tenants_to_placement_aggregate, whether servers of projects that no aggregate "
            "names go nowhere. Else such servers go to any host. Set it to true if every project has "
            "separate hosts.",
        ),
    ] = False
    enable_isolated_aggregate_filtering: Annotated[
        bool,
        Meta(
            description="Whether hosts of aggregates with trait:NAME=required in their metadata take only servers "
            "whose flavor or image requires all traits that are named there. Turn it on to keep hosts, "
            "such as those with licences, for such servers; the nodes of these hosts need the traits, "
            "too.",
        ),
    ] = False
    image_metadata_prefilter: Annotated[
        bool,
        Meta(
            description="Whether servers go only to hosts with the traits for the architecture, disk bus, CD bus, "
            "video model and interface model that their image names. Turn it on if hosts differ in these, and all "
            "report these traits."
        ),
    ] = False


Ratios = tuple[Annotated[str, Meta(pattern=r"^[^=]+=\s*[-+]?(\d+(\.\d*)?|\.\d+)\s*$")], ...]
"""Names with numbers: `name=1.0`."""


def ratios_of(given: Ratios) -> dict[str, float]:
    """Return numbers by name."""
    return {name.strip(): float(number) for name, _, number in (each.partition("=") for each in given)}


class FilterSchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and weighers."""

    enabled_filters: Annotated[
        tuple[str, ...],
        Meta(
            description="Filters that are applied to every request, in this order. The API reads the same list: it "
            "refuses scheduler hints and extra specs that no enabled filter honours, so the list must "
            "be the same there. What each filter does is in docs/scheduler.md. Change it if servers "
            "need other rules.",
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
        "SameHostFilter",
        "DifferentHostFilter",
        "NUMATopologyFilter",
        "PciPassthroughFilter",
    )
    max_io_ops_per_host: Annotated[
        int,
        Meta(
            ge=1,
            description="Servers that a host may work on at once (build, resize, snapshot, …) before IoOpsFilter "
            "and AggregateIoOpsFilter choose others. Raise it if hosts have fast disks.",
        ),
    ] = 8
    max_instances_per_host: Annotated[
        int,
        Meta(
            ge=1,
            description="Servers that a host may have, for NumInstancesFilter and AggregateNumInstancesFilter. "
            "Lower it if hosts should have few servers.",
        ),
    ] = 50
    isolated_images: Annotated[
        tuple[str, ...],
        Meta(
            description="Ids of images that IsolatedHostsFilter keeps to isolated_hosts. Set it with "
            "isolated_hosts, for images with a licence for example.",
            examples=[["6f70656e-7374-4163-8b00-6d6963726f6e"]],
        ),
    ] = ()
    isolated_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that IsolatedHostsFilter keeps for isolated_images. Set it with isolated_images.",
            examples=[["compute-17"]],
        ),
    ] = ()
    restrict_isolated_hosts_to_isolated_images: Annotated[
        bool,
        Meta(
            description="Whether isolated_hosts take no images but isolated_images. Set it to false if "
            "isolated_hosts may take all images."
        ),
    ] = True
    aggregate_image_properties_isolation_namespace: Annotated[
        str,
        Meta(
            description="How keys in the metadata of aggregates begin that AggregateImagePropertiesIsolation "
            "compares with properties of images; empty: all keys. Set it if aggregates have other "
            "metadata as well.",
            examples=["isolation"],
        ),
    ] = ""
    aggregate_image_properties_isolation_separator: Annotated[
        str,
        Meta(
            description="What separates aggregate_image_properties_isolation_namespace from the rest of a key. "
            "Change it if keys have another separator."
        ),
    ] = "."
    image_properties_default_architecture: Annotated[
        str,
        Meta(
            description="Architecture that ImagePropertiesFilter assumes for images that name none, such as "
            "x86_64; empty: such images run anywhere. Set it if hosts have different architectures.",
            examples=["x86_64"],
        ),
    ] = ""
    host_subset_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Number of best hosts among which one is chosen at random. Above 1 several schedulers "
            "collide less often. Raise it if several schedulers often choose the same host.",
        ),
    ] = 1
    shuffle_best_same_weighed_hosts: Annotated[
        bool,
        Meta(
            description="Whether to choose at random among hosts of equal weight. Set it to true if equal hosts "
            "should be used alike."
        ),
    ] = False
    ram_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of free memory: positive spreads servers over hosts, negative fills hosts one by "
            "one. Change it to fill hosts instead of spreading servers.",
        ),
    ] = 1.0
    cpu_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of free CPUs: positive spreads servers over hosts, negative fills hosts one by "
            "one. Change it to fill hosts instead of spreading servers."
        ),
    ] = 1.0
    disk_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of free disk: positive spreads servers over hosts, negative fills hosts one by "
            "one. Change it to fill hosts instead of spreading servers."
        ),
    ] = 1.0
    soft_affinity_weight_multiplier: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of hosts that have servers of the same soft-affinity group. Raise it if such "
            "groups should count more than free resources.",
        ),
    ] = 1.0
    soft_anti_affinity_weight_multiplier: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of hosts that have few servers of the same soft-anti-affinity group. Raise it if "
            "such groups should count more than free resources.",
        ),
    ] = 1.0
    pci_weight_multiplier: Annotated[
        float,
        Meta(
            ge=0,
            description="Weight of hosts with few free PCI devices, which keeps the other hosts for servers that "
            "want devices. Raise it if such servers find no host.",
        ),
    ] = 1.0
    build_failure_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight against hosts whose recent builds failed; 0: failures do not matter. Lower it if "
            "hosts fail for reasons that pass."
        ),
    ] = 1000000.0
    io_ops_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of servers that a host works on: negative prefers hosts with little to do. Change "
            "it if busy hosts should be avoided more or less."
        ),
    ] = -1.0
    num_instances_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of servers that a host has: negative prefers hosts with few, positive with many. "
            "Change it if the number of servers matters more than their size."
        ),
    ] = 0.0
    hypervisor_version_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of newer hypervisors: positive prefers the newest, negative the oldest. Change it "
            "while hypervisors are upgraded."
        ),
    ] = 1.0
    image_props_weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of servers on a host whose images have the same properties as the requested one: "
            "positive puts them together, negative apart. Other than 0, each decision reads the images "
            "of all servers, at most every few seconds. Change it if a licence counts the hosts that "
            "run an operating system.",
        ),
    ] = 0.0
    image_props_weight_setting: Annotated[
        Ratios,
        Meta(
            description='Properties that count for image_props_weight_multiplier and how much, as "os_distro=2.0"; '
            "empty: all count the same. Set it if some properties matter more than others.",
            examples=[["os_distro=2.0"]],
        ),
    ] = ()


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placing servers by what the monitors of hosts measure (default.compute_monitors)."""

    weight_multiplier: Annotated[
        float,
        Meta(
            description="Weight of the sum of metrics in weight_setting. Raise it if metrics should count more "
            "than free resources."
        ),
    ] = 1.0
    weight_setting: Annotated[
        Ratios,
        Meta(
            description="Metrics by which hosts are preferred, each with a number. The weight of a host is the sum "
            "of the metrics of the host times these numbers. Set it if hosts report metrics "
            "(default.compute_monitors).",
            examples=[["cpu.percent=-1.0"]],
        ),
    ] = ()
    required: Annotated[
        bool,
        Meta(
            description="Whether hosts without one of the metrics of weight_setting get no servers, as if "
            "MetricsFilter were enabled. Otherwise the weight of such hosts is weight_of_unavailable. "
            "Set it to false while not all hosts report metrics.",
        ),
    ] = True
    weight_of_unavailable: Annotated[
        float,
        Meta(
            description="Weight of hosts without one of the metrics of weight_setting, unless metrics.required is "
            "true. Raise it if hosts without metrics are as good as others."
        ),
    ] = -10000.0

    def ratios(self) -> dict[str, float]:
        """Return how much each metric counts."""
        return ratios_of(self.weight_setting)


class NotificationsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Notifications to other services."""

    notification_format: Annotated[
        str,
        Meta(
            pattern="^(unversioned|versioned|both|none)$",
            description="Kinds of notifications that are sent: unversioned, versioned, both or none. Set it to "
            "none if nobody listens, to versioned if all listeners know it.",
        ),
    ] = "both"
    notify_on_state_change: Annotated[
        str,
        Meta(
            pattern="^(none|vm_state|vm_and_task_state)$",
            description="Whether every change of a server sends instance.update, and which changes of states the "
            "notification shows: none (nothing is sent), vm_state, vm_and_task_state. Each change then "
            "costs some reads of the database. Change it if a listener follows the states of servers.",
        ),
    ] = "none"
    versioned_notifications_topics: Annotated[
        tuple[str, ...],
        Meta(description="Topics of versioned notifications. Change it if listeners have other topics."),
    ] = ("versioned_notifications",)
    topics: Annotated[
        tuple[str, ...],
        Meta(description="Topics of unversioned notifications. Change it if listeners have other topics."),
    ] = ("notifications",)
    transport_url: Annotated[
        str,
        Meta(
            description="URL of the broker that notifications are sent to; empty: the broker of "
            "default.transport_url. Set it if listeners use another broker.",
            examples=["amqp://micronova:SECRET@notifications.example/"],
        ),
    ] = ""


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces."""

    otlp_endpoint: Annotated[
        str,
        Meta(
            description="URL of the OTLP/HTTP collector that traces are sent to; empty: no traces. Set it if you "
            "have a collector of traces.",
            examples=["http://collector.example:4318/v1/traces"],
        ),
    ] = ""


class UpgradeLevelsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contract versions to pin messages to during a rolling upgrade; empty: the newest."""

    compute: Annotated[
        str,
        Meta(
            description="Newest version of the messages to compute hosts that this process sends; empty: the "
            "newest that this release knows. Set it during a rolling upgrade to the version of the "
            "release before, until all compute hosts are upgraded.",
            examples=["2.2"],
        ),
    ] = ""
    conductor: Annotated[
        str,
        Meta(
            description="Newest version of the messages to conductors that this process sends; empty: the newest "
            "that this release knows. Set it during a rolling upgrade to the version of the release "
            "before, until all conductors are upgraded.",
            examples=["1.0"],
        ),
    ] = ""
    scheduler: Annotated[
        str,
        Meta(
            description="Newest version of the messages to schedulers that this process sends; empty: the newest "
            "that this release knows. Set it during a rolling upgrade to the version of the release "
            "before, until all schedulers are upgraded.",
            examples=["1.1"],
        ),
    ] = ""
