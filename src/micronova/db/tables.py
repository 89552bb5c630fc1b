"""The schema of the compute database.

Conventions: keys are uuids (they shard); times are BigInteger microseconds since 1970 in UTC (exact, compact,
alike on both databases); JSON columns hold what is read and written as a whole. Rows are deleted for real; what
the API still shows of deleted servers lives in `deleted_instances`.
"""

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, String, Text

from micronova.placement.model import MOST_UNITS

metadata = sa.MetaData()

Time = BigInteger


def _instance_columns() -> list[Column]:  # type: ignore[type-arg]
    return [
        Column("uuid", String(36), primary_key=True),
        Column("project_id", String(64), nullable=False),
        Column("user_id", String(64), nullable=False),
        Column("reservation_id", String(64), nullable=False),
        Column("launch_index", Integer, nullable=False, default=0),
        Column("display_name", String(255), nullable=False),
        Column("display_description", String(255)),
        Column("hostname", String(255), nullable=False),
        Column("vm_state", String(32), nullable=False),
        Column("task_state", String(32)),
        Column("power_state", Integer, nullable=False, default=0),
        Column("progress", Integer, nullable=False, default=0),
        # Raised at each change of owner; every order, report and state write carries it.
        Column("epoch", Integer, nullable=False, default=1),
        Column("host", String(255)),
        Column("node", String(255)),
        Column("node_uuid", String(36)),
        Column("availability_zone", String(255)),  # where it runs
        Column("pinned_availability_zone", String(255)),  # what the user asked for
        Column("image_ref", String(36)),
        Column("image", sa.JSON),  # ImageMeta as it was at create
        Column("flavor_id", String(255), nullable=False),
        Column("flavor", sa.JSON, nullable=False),
        Column("key_name", String(255)),
        Column("key_data", Text),
        Column("user_data", Text),
        Column("config_drive", Boolean, nullable=False, default=False),
        Column("access_ip_v4", String(39)),
        Column("access_ip_v6", String(39)),
        Column("disk_config", String(16), nullable=False, default="MANUAL"),
        Column("root_device_name", String(255)),
        Column("locked_by", String(16)),  # "owner" | "admin"
        Column("locked_reason", String(255)),
        Column("metadata", sa.JSON, nullable=False, default=dict),
        Column("tags", sa.JSON, nullable=False, default=list),
        Column("network_info", sa.JSON, nullable=False, default=list),  # [VIF]
        Column("security_groups", sa.JSON, nullable=False, default=list),  # their names
        Column("hints", sa.JSON, nullable=False, default=dict),
        Column("server_group_id", String(36)),
        Column("trusted_certs", sa.JSON),
        Column("system_metadata", sa.JSON),  # who created it, for its images; NULL: it is older than this column
        Column("fault", sa.JSON),  # {code, message, details, created}
        Column("created_at", Time, nullable=False),
        Column("updated_at", Time, nullable=False),
        Column("launched_at", Time),
        Column("terminated_at", Time),
    ]


instances = sa.Table(
    "instances",
    metadata,
    *_instance_columns(),
    Column("deleted_at", Time),  # since when it is soft-deleted
    Index("instances_by_project", "project_id", "created_at", "uuid"),
    Index("instances_by_created", "created_at", "uuid"),
    Index("instances_by_host", "host"),
    Index("instances_by_reservation", "reservation_id"),
    Index("instances_by_updated", "updated_at"),
    Index(
        "instances_by_group",
        "server_group_id",
        sqlite_where=sa.text("server_group_id IS NOT NULL"),
        postgresql_where=sa.text("server_group_id IS NOT NULL"),
    ),
    Index(
        "instances_rescued",
        "launched_at",
        sqlite_where=sa.text("vm_state = 'rescued'"),
        postgresql_where=sa.text("vm_state = 'rescued'"),
    ),
    Index(
        "instances_shelved",
        "uuid",
        sqlite_where=sa.text("vm_state = 'shelved'"),
        postgresql_where=sa.text("vm_state = 'shelved'"),
    ),
    Index(
        "instances_soft_deleted",
        "deleted_at",
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    ),
)

# Deleted servers: the API shows it to admins (deleted=true) and in changes-since lists.
deleted_instances = sa.Table(
    "deleted_instances",
    metadata,
    *_instance_columns(),
    Column("deleted_at", Time, nullable=False),
    Index("deleted_instances_by_project", "project_id", "created_at", "uuid"),
    Index("deleted_instances_by_created", "created_at", "uuid"),
    Index("deleted_instances_by_updated", "updated_at"),
    Index("deleted_instances_by_time", "deleted_at"),
    Index("deleted_instances_by_project_and_time", "project_id", "deleted_at"),
)

# The request of each instance as the scheduler needs it, also for later moves.
request_specs = sa.Table(
    "request_specs",
    metadata,
    Column("instance_uuid", String(36), primary_key=True),
    Column("spec", LargeBinary, nullable=False),  # objects.scheduling.RequestSpec in MessagePack
    Column("networks", sa.JSON, nullable=False),  # PlannedPorts: "auto" | "none" | [PlannedPort]
)

block_devices = sa.Table(
    "block_devices",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("instance_uuid", String(36), nullable=False),
    Column("device", sa.JSON, nullable=False),  # objects.block_device.BlockDevice
    Column("volume_id", String(36)),  # of the device, if it is a volume
    Index("block_devices_by_instance", "instance_uuid"),
    Index("block_devices_by_volume", "volume_id"),
)

# `current_…` is what the hypervisor counts now, `earlier_…` what it had counted before it began anew.
volume_usages = sa.Table(
    "volume_usages",
    metadata,
    Column("volume_id", String(36), primary_key=True),
    Column("instance_uuid", String(36), primary_key=True),
    Column("current_reads", BigInteger, nullable=False),
    Column("current_read_bytes", BigInteger, nullable=False),
    Column("current_writes", BigInteger, nullable=False),
    Column("current_write_bytes", BigInteger, nullable=False),
    Column("earlier_reads", BigInteger, nullable=False),
    Column("earlier_read_bytes", BigInteger, nullable=False),
    Column("earlier_writes", BigInteger, nullable=False),
    Column("earlier_write_bytes", BigInteger, nullable=False),
    Column("refreshed_at", Time, nullable=False),
    Index("volume_usages_by_age", "refreshed_at"),
)

# Passwords that guests post to the metadata service; a table of its own, because few servers have one.
server_passwords = sa.Table(
    "server_passwords",
    metadata,
    Column("instance_uuid", String(36), primary_key=True),
    Column("password", Text, nullable=False),
    Column("created_at", Time, nullable=False),
)

# Console tokens; only their digests are stored.
console_tokens = sa.Table(
    "console_tokens",
    metadata,
    Column("token_digest", String(64), primary_key=True),
    Column("instance_uuid", String(36), nullable=False),
    Column("host", String(255), nullable=False),  # a token is not valid when the instance has left this host
    Column("protocol", String(16), nullable=False),  # vnc | spice | spice-direct | serial
    Column("created_at", Time, nullable=False),
    Column("expires_at", Time, nullable=False),
    Index("console_tokens_by_instance", "instance_uuid"),
    Index("console_tokens_by_expiry", "expires_at"),
)

# Durable work; `conductor/operations/engine.py` explains it.
operations = sa.Table(
    "operations",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("version", Integer, nullable=False, default=1),
    Column("instance_uuid", String(36), nullable=False),
    Column("batch_id", String(64), nullable=False),  # operations of one request: leased and run together
    Column("step", String(32), nullable=False),
    Column("owner", String(255)),  # a conductor's id, or "host:NAME" while a host works on it
    Column("epoch", Integer, nullable=False),  # the instance's epoch that this work belongs to
    Column("lease_until", Time, nullable=False, default=0),
    Column("deadline", Time, nullable=False),
    Column("leases", Integer, nullable=False, default=0),  # how often a conductor has leased it
    Column("payload", LargeBinary, nullable=False),  # the kind's own struct in MessagePack
    Column("secrets", LargeBinary),  # encrypted: admin password, injected files; erased when it ends
    Column("context", LargeBinary, nullable=False),  # objects.context.Context in MessagePack
    Column("created_at", Time, nullable=False),
    Column("finished_at", Time),
    Column("result", String(16)),  # "success" | "error" | "cancelled"
    Column("explanation", sa.JSON),  # how the scheduler decided, for admins
    Index(
        "operations_open",
        "lease_until",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    Index(
        "operations_by_owner",
        "owner",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    Index("operations_by_instance", "instance_uuid"),
    # Each request ends what is open, and a server that lives for long has many that have ended.
    Index(
        "operations_open_by_instance",
        "instance_uuid",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    Index(
        "operations_finished",
        "finished_at",
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    ),
)

# Work of the whole cloud that one conductor does at a time: who has claimed it, and when it is due again.
periodic_jobs = sa.Table(
    "periodic_jobs",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("next_at", Time, nullable=False),
    Column("began_at", Time),  # the last run
    Column("ended_at", Time),
    Column("error", Text),  # of the last run that ended; empty: none
    Column("place", String(255)),  # where the next run continues, if the job goes through something in parts
)

# The processes of the region, for `micronova status` and `micronova check`; hosts are in `services`.
processes = sa.Table(
    "processes",
    metadata,
    Column("id", String(36), primary_key=True),  # made at its start
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("roles", String(255), nullable=False),  # separated by spaces
    Column("release", String(64), nullable=False),
    Column("secret_key_id", String(32)),  # `key_id` of the key that it seals secrets with; none if it seals none
    Column("started_at", Time, nullable=False),
    Column("seen_at", Time, nullable=False),
)

# The audits of `micronova audit`, the newest only.
audits = sa.Table(
    "audits",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("began_at", Time, nullable=False),
    Column("ended_at", Time, nullable=False),
    Column("auditor", String(255), nullable=False),  # USER@MACHINE
    Column("findings", sa.JSON, nullable=False),  # their number by kind
)

# What is done once in a period for each host: the audit of usage.
task_logs = sa.Table(
    "task_logs",
    metadata,
    Column("task_name", String(64), primary_key=True),
    Column("period_beginning", Time, primary_key=True, autoincrement=False),
    Column("period_ending", Time, primary_key=True, autoincrement=False),
    Column("host", String(255), primary_key=True),
    Column("state", String(16), nullable=False),  # RUNNING | DONE
    Column("task_items", Integer, nullable=False),
    Column("errors", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("updated_at", Time, nullable=False),
    Index("task_logs_by_period", "period_ending"),
)

# Records that an instance left a host: see `db/departures.py`.
departures = sa.Table(
    "departures",
    metadata,
    Column("host", String(255), primary_key=True),
    Column("instance_uuid", String(36), primary_key=True),
    Column("epoch", Integer, nullable=False),  # the host destroys guests of this instance up to this epoch
    Column("created_at", Time, nullable=False),
    Index("departures_by_instance", "instance_uuid"),
)

# Moves of servers. While one is open, its uuid is the consumer that holds the resources of the source.
migrations = sa.Table(
    "migrations",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),  # shown by the API
    Column("uuid", String(36), nullable=False, unique=True),
    Column("instance_uuid", String(36), nullable=False),
    Column("migration_type", String(16), nullable=False),
    Column("status", String(32), nullable=False),
    Column("source_compute", String(255), nullable=False),
    Column("source_node", String(255)),
    Column("source_node_uuid", String(36)),
    Column("source_zone", String(255)),
    Column("dest_compute", String(255)),
    Column("dest_node", String(255)),
    Column("dest_host", String(255)),
    Column("old_flavor", sa.JSON, nullable=False),
    Column("new_flavor", sa.JSON, nullable=False),
    Column("old_vm_state", String(32), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time),
    Index("migrations_by_instance", "instance_uuid"),
    Index("migrations_by_status", "status", "updated_at"),
    Index("migrations_by_created", "created_at", "id"),
    Index("migrations_by_project", "project_id", "created_at", "id"),
    Index("migrations_by_source", "source_compute", "created_at", "id"),
    Index("migrations_by_destination", "dest_compute", "created_at", "id"),
    Index("migrations_by_user", "user_id", "created_at", "id"),
    Index("migrations_by_updated", "updated_at", "created_at"),
)

instance_actions = sa.Table(
    "instance_actions",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("instance_uuid", String(36), primary_key=True),
    Column("action", String(255), nullable=False),
    Column("user_id", String(64)),
    Column("project_id", String(64)),
    Column("start_time", Time, nullable=False),
    Column("finish_time", Time),
    Column("updated_at", Time, nullable=False),
    Column("message", String(255)),
    Index("instance_actions_by_instance", "instance_uuid", "start_time"),
)

instance_action_events = sa.Table(
    "instance_action_events",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("instance_uuid", String(36), primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("event", String(255), nullable=False),
    Column("start_time", Time, nullable=False),
    Column("finish_time", Time),
    Column("result", String(255)),
    Column("traceback", Text),
    Column("host", String(255)),
    Column("details", Text),
)

flavors = sa.Table(
    "flavors",
    metadata,
    Column("flavorid", String(255), primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("memory_mb", Integer, nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("root_gb", Integer, nullable=False),
    Column("ephemeral_gb", Integer, nullable=False, default=0),
    Column("swap", Integer, nullable=False, default=0),
    Column("rxtx_factor", Float, nullable=False, default=1.0),
    Column("is_public", Boolean, nullable=False, default=True),
    Column("disabled", Boolean, nullable=False, default=False),
    Column("description", Text),
    Column("extra_specs", sa.JSON, nullable=False, default=dict),
    Column("created_at", Time, nullable=False),
)

flavor_access = sa.Table(
    "flavor_access",
    metadata,
    Column("flavorid", String(255), primary_key=True),
    Column("project_id", String(64), primary_key=True),
)

key_pairs = sa.Table(
    "key_pairs",
    metadata,
    Column("user_id", String(64), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("id", Integer, nullable=False, unique=True),  # shown by the API
    Column("type", String(16), nullable=False, default="ssh"),
    Column("fingerprint", String(255), nullable=False),
    Column("public_key", Text, nullable=False),
    Column("created_at", Time, nullable=False),
)

# Limits that differ from the defaults; `usage` is charged in the transaction that takes the resource.
quota_limits = sa.Table(
    "quota_limits",
    metadata,
    Column("project_id", String(64), primary_key=True),
    Column("user_id", String(64), primary_key=True, default=""),  # "" = the project's
    Column("resource", String(64), primary_key=True),
    Column("hard_limit", Integer, nullable=False),
)

quota_class_limits = sa.Table(
    "quota_class_limits",
    metadata,
    Column("class_name", String(255), primary_key=True),
    Column("resource", String(64), primary_key=True),
    Column("hard_limit", Integer, nullable=False),
)

quota_usages = sa.Table(
    "quota_usages",
    metadata,
    Column("project_id", String(64), primary_key=True),
    Column("user_id", String(64), primary_key=True, default=""),
    Column("resource", String(64), primary_key=True),
    Column("in_use", Integer, nullable=False),
)

server_groups = sa.Table(
    "server_groups",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("policy", String(32), nullable=False),
    Column("rules", sa.JSON, nullable=False, default=dict),
    Column("created_at", Time, nullable=False),
    Index("server_groups_by_project", "project_id", "created_at"),
)

# Members placed on each host, counted in the transaction that claims: two schedulers cannot both add the last member.
server_group_hosts = sa.Table(
    "server_group_hosts",
    metadata,
    Column("group_uuid", String(36), primary_key=True),
    Column("host", String(255), primary_key=True),
    Column("members", Integer, nullable=False),
)

services = sa.Table(
    "services",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("id", Integer, nullable=False, unique=True),  # shown by old microversions
    Column("host", String(255), nullable=False),
    Column("binary", String(64), nullable=False),
    Column("disabled", Boolean, nullable=False, default=False),
    Column("disabled_reason", String(255)),
    Column("forced_down", Boolean, nullable=False, default=False),
    Column("last_seen_at", Time, nullable=False),
    # When it is known to have been alive: `last_seen_at` may be long after its last message was sent.
    Column("alive_at", Time, nullable=False, default=0, server_default="0"),
    Column("stopped_at", Time),  # when it announced its stop; null when it is heard of again
    Column(
        "heartbeat_number", BigInteger, nullable=False, default=0, server_default="0"
    ),  # of the newest, if it has one
    Column("version", Integer, nullable=False, default=1),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time),
    sa.UniqueConstraint("host", "binary"),
    Index("services_by_updated", "updated_at"),
)

compute_nodes = sa.Table(
    "compute_nodes",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("id", Integer, nullable=False, unique=True),  # shown by old microversions
    Column("host", String(255), nullable=False),
    Column("hypervisor_hostname", String(255), nullable=False),
    Column("hypervisor_type", String(255), nullable=False),
    Column("hypervisor_version", Integer, nullable=False),
    Column("host_ip", String(39), nullable=False),
    Column("cpu_info", sa.JSON, nullable=False, default=dict),
    Column("supported", sa.JSON, nullable=False, default=list),
    Column("capabilities", sa.JSON, nullable=False, default=dict),
    Column(
        "traits", sa.JSON, nullable=False, default=list, server_default="[]"
    ),  # as its host reported them, COMPUTE_NODE and OWNER_NOVA
    Column("vcpus_used", Integer, nullable=False, default=0),
    Column("memory_mb_used", Integer, nullable=False, default=0),
    Column("local_gb_used", Integer, nullable=False, default=0),
    Column("disk_available_gb", Integer),
    Column("running_vms", Integer, nullable=False, default=0),
    Column("current_workload", Integer, nullable=False, default=0),
    Column("failed_builds", Integer, nullable=False, default=0),
    Column("metrics", sa.JSON),  # what its monitors measured last of what the scheduler needs; NULL: nothing
    Column("created_at", Time, nullable=False),
    Column("changed_at", Time, nullable=False),
    sa.UniqueConstraint("host", "hypervisor_hostname"),
    Index("compute_nodes_by_change", "changed_at"),
    Index("compute_nodes_by_name", "hypervisor_hostname"),
)

# A compute node is a resource provider with the same uuid; the others are made through the Placement API.
resource_providers = sa.Table(
    "resource_providers",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("name", String(300), nullable=False, unique=True),
    Column("parent_uuid", String(36)),
    Column("root_uuid", String(36), nullable=False),  # its own uuid, if it has no parent
    Column("generation", Integer, nullable=False, default=0),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    Index("resource_providers_by_root", "root_uuid"),
    Index("resource_providers_by_parent", "parent_uuid"),
)

provider_traits = sa.Table(
    "provider_traits",
    metadata,
    Column("provider_uuid", String(36), primary_key=True),
    Column("trait", String(255), primary_key=True),
    Index("provider_traits_by_trait", "trait"),
)

provider_aggregates = sa.Table(
    "provider_aggregates",
    metadata,
    Column("provider_uuid", String(36), primary_key=True),
    Column("aggregate_uuid", String(36), primary_key=True),
    Index("provider_aggregates_by_aggregate", "aggregate_uuid"),
)

# Custom ones; those of OpenStack are data of the program (placement/standard.json).
traits = sa.Table(
    "traits",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("created_at", Time, nullable=False),
)

resource_classes = sa.Table(
    "resource_classes",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("created_at", Time, nullable=False),
)

# Those that others made through the Placement API. Servers and migrations have rows of their own.
consumers = sa.Table(
    "consumers",
    metadata,
    Column("uuid", String(36), primary_key=True),
    Column("project_id", String(255), nullable=False),
    Column("user_id", String(255), nullable=False),
    Column("consumer_type", String(255)),
    Column("generation", Integer, nullable=False),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    Index("consumers_by_project", "project_id"),
)

inventories = sa.Table(
    "inventories",
    metadata,
    Column("node_uuid", String(36), primary_key=True),  # of the resource provider, which need not be a compute node
    Column("resource_class", String(255), primary_key=True),
    Column("total", Integer, nullable=False),
    Column("reserved", Integer, nullable=False, default=0),
    Column("min_unit", Integer, nullable=False, default=1, server_default="1"),
    Column("max_unit", Integer, nullable=False, default=MOST_UNITS, server_default=str(MOST_UNITS)),
    Column("step_size", Integer, nullable=False, default=1, server_default="1"),
    Column("allocation_ratio", Float, nullable=False, default=1.0),
    Column("capacity", Integer, nullable=False),  # by `placement.model.capacity`
    Column("used", Integer, nullable=False, default=0),
    Column("changed_at", Time, nullable=False),
    Index("inventories_by_change", "changed_at"),
)

allocations = sa.Table(
    "allocations",
    metadata,
    Column("consumer_uuid", String(36), primary_key=True),
    Column("node_uuid", String(36), primary_key=True),  # of the resource provider, which need not be a compute node
    Column("resource_class", String(255), primary_key=True),
    Column("used", Integer, nullable=False),
    Index("allocations_by_node", "node_uuid"),
)

# What a node's host reports of its NUMA cells and PCI devices, and what instances hold of them, both as JSON: texts,
# because they are compared.
node_topologies = sa.Table(
    "node_topologies",
    metadata,
    Column("node_uuid", String(36), primary_key=True),
    Column("topology", sa.Text, nullable=False),
    Column("held", sa.Text, nullable=False),
    Column("changed_at", Time, nullable=False),
    Index("node_topologies_by_change", "changed_at"),
)

# The cells, CPUs, pages and devices of its node that an instance or a migration holds.
topology_claims = sa.Table(
    "topology_claims",
    metadata,
    Column("consumer_uuid", String(36), primary_key=True),
    Column("node_uuid", String(36), nullable=False),
    Column("assignment", sa.Text, nullable=False),
    Index("topology_claims_by_node", "node_uuid"),
)

aggregates = sa.Table(
    "aggregates",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("uuid", String(36), nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("metadata", sa.JSON, nullable=False, default=dict),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time),
)

aggregate_hosts = sa.Table(
    "aggregate_hosts",
    metadata,
    Column("aggregate_id", Integer, primary_key=True),
    Column("host", String(255), primary_key=True),
    Index("aggregate_hosts_by_host", "host"),
)

# Broker users of compute hosts, made by `micronova host add`. One that was removed stays: the broker may still know it.
hosts = sa.Table(
    "hosts",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("console_address", String(300), nullable=False, server_default=""),  # ADDRESS:PORT of the host's relay
    Column("created_at", Time, nullable=False),
    Column("removed_at", Time),
)
