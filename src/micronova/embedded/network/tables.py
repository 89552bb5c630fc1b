"""The tables of the network service: its own metadata, its own migrations, its own database.

Rows that decide races: `addresses` (an address of a subnet belongs to one port), `ports` (a MAC address is unique on
its network), `usages` (what counts against a quota), `networks` (a segment carries one network),
`security_groups.default_of` (one default group per project), `security_group_rules` (no two alike in a group).
Times are microseconds since 1970 (UTC).
"""

from types import SimpleNamespace
from typing import Any, Protocol, TypedDict, cast

import msgspec
import sqlalchemy as sa

metadata = sa.MetaData()


class Document(sa.types.TypeDecorator[Any]):
    """A small JSON value."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:
        """Encode the value."""
        return msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Decode the value."""
        return None if value is None else msgspec.json.decode(value)


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.String(36), primary_key=True)


def _owned() -> list[sa.Column[Any]]:
    """Return the columns of every resource that a project owns."""
    return [
        sa.Column("project_id", sa.String(255), nullable=False, index=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("description", sa.String(255), nullable=False),
        *_changed(),
    ]


def _changed() -> list[sa.Column[Any]]:
    return [
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
    ]


# The types of rows as a cursor returns them, with columns as attributes; they cost nothing. A test compares them with
# the tables. A port's row that is created or changed is a dictionary, `PortRow`, because changes to it are merged
# before they are written.


class OwnedRow(Protocol):
    """The columns that the rows of nearly all resources have."""

    id: str
    project_id: str
    description: str
    created_at: int
    updated_at: int
    revision: int


class NetworkAccessRow(Protocol):
    """What policy needs of a row of `networks`."""

    project_id: str
    shared: bool
    external: bool


class PortNetworkRow(NetworkAccessRow, Protocol):
    """What a new port needs of a row of `networks`."""

    id: str
    port_security_enabled: bool
    qos_policy_id: str | None


class NetworkOfRow(Protocol):
    """What policy and ports need to know of the network of a subnet or port; `networks.NETWORK_LABELS` select it."""

    network_project: str
    network_shared: bool
    network_external: bool
    network_qos_policy: str | None


class PolicyRow(OwnedRow, Protocol):
    """A row of `qos_policies`."""

    name: str
    shared: bool
    default_of: str | None


class BandwidthLimitRow(Protocol):
    """A row of `bandwidth_limit_rules`."""

    id: str
    policy_id: str
    direction: str
    max_kbps: int
    max_burst_kbps: int


class NetworkRow(OwnedRow, Protocol):
    """A row of `networks`."""

    name: str
    admin_state_up: bool
    status: str
    shared: bool
    external: bool
    is_default: bool
    port_security_enabled: bool
    mtu: int
    dns_domain: str
    network_type: str
    physical_network: str
    segmentation_id: int | None
    availability_zone_hints: list[str]
    qos_policy_id: str | None


class SubnetPoolRow(OwnedRow, Protocol):
    """A row of `subnetpools`."""

    name: str
    ip_version: int
    prefixes: list[str]
    min_prefixlen: int
    default_prefixlen: int
    max_prefixlen: int
    default_quota: int | None
    shared: bool
    is_default: bool


class SubnetRow(OwnedRow, Protocol):
    """A row of `subnets`."""

    name: str
    network_id: str
    subnetpool_id: str | None
    ip_version: int
    cidr: str
    gateway_ip: str | None
    enable_dhcp: bool
    ipv6_ra_mode: str | None
    ipv6_address_mode: str | None
    allocation_pools: list[dict[str, str]]
    dns_nameservers: list[str]
    host_routes: list[dict[str, str]]
    service_types: list[str]
    dns_publish_fixed_ip: bool


class SubnetOnNetworkRow(SubnetRow, NetworkOfRow, Protocol):
    """A row of `subnets` with what policy needs of its network."""


class PortAccessRow(NetworkOfRow, Protocol):
    """What policy needs of a row of `ports` and of its network."""

    project_id: str
    device_owner: str


class PortOnNetworkRow(OwnedRow, PortAccessRow, Protocol):
    """A row of `ports` with what policy and the API need of its network."""

    name: str
    network_id: str
    mac_address: str
    admin_state_up: bool
    status: str
    device_id: str
    host: str
    vif_type: str
    vif_details: dict[str, Any]
    vnic_type: str
    profile: dict[str, Any]
    port_security_enabled: bool
    allowed_address_pairs: list[dict[str, str]]
    extra_dhcp_opts: list[dict[str, Any]]
    dns_name: str
    dns_domain: str
    qos_policy_id: str | None


class SecurityGroupRow(OwnedRow, Protocol):
    """A row of `security_groups`."""

    name: str
    stateful: bool
    default_of: str | None


class RuleRow(OwnedRow, Protocol):
    """A row of `security_group_rules`."""

    security_group_id: str
    direction: str
    ethertype: str
    protocol: str | None
    port_range_min: int | None
    port_range_max: int | None
    remote_ip_prefix: str | None
    remote_group_id: str | None
    fingerprint: str


class RuleOfGroupRow(RuleRow, Protocol):
    """A row of `security_group_rules` with what policy and the API need of its group."""

    group_project: str
    default_of: str | None


class RouterRow(OwnedRow, Protocol):
    """A row of `routers`."""

    name: str
    admin_state_up: bool
    status: str
    external_network_id: str | None
    gateway_port_id: str | None
    enable_snat: bool
    routes: list[dict[str, str]]
    availability_zone_hints: list[str]


class FloatingIPRow(OwnedRow, Protocol):
    """A row of `floatingips`."""

    floating_network_id: str
    floating_port_id: str
    floating_ip_address: str
    port_id: str | None
    fixed_ip_address: str | None
    router_id: str | None
    status: str
    dns_name: str
    dns_domain: str


class AgentRow(Protocol):
    """A row of `agents`."""

    id: str
    agent_type: str
    binary: str
    host: str
    topic: str
    availability_zone: str | None
    description: str
    admin_state_up: bool
    configurations: dict[str, Any]
    created_at: int
    started_at: int
    heartbeat_at: int


qos_policies = sa.Table(
    "qos_policies",
    metadata,
    _id(),
    *_owned(),
    sa.Column("shared", sa.Boolean, nullable=False),
    sa.Column("default_of", sa.String(255), unique=True),  # the project whose new networks get this policy
)

bandwidth_limit_rules = sa.Table(
    "bandwidth_limit_rules",
    metadata,
    _id(),
    sa.Column("policy_id", sa.String(36), sa.ForeignKey("qos_policies.id", ondelete="CASCADE"), nullable=False),
    sa.Column("direction", sa.String(8), nullable=False),
    sa.Column("max_kbps", sa.Integer, nullable=False),
    sa.Column("max_burst_kbps", sa.Integer, nullable=False),
    sa.UniqueConstraint("policy_id", "direction", name="bandwidth_limit_rules_direction"),
)

networks = sa.Table(
    "networks",
    metadata,
    _id(),
    *_owned(),
    sa.Column("admin_state_up", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("shared", sa.Boolean, nullable=False),
    sa.Column("external", sa.Boolean, nullable=False),
    sa.Column("is_default", sa.Boolean, nullable=False),
    sa.Column("port_security_enabled", sa.Boolean, nullable=False),
    sa.Column("mtu", sa.Integer, nullable=False),
    sa.Column("dns_domain", sa.String(255), nullable=False),
    sa.Column("network_type", sa.String(32), nullable=False),
    sa.Column("physical_network", sa.String(64), nullable=False),  # "" if the type has none
    # NULL for local networks, of which there may be many; 0 for flat ones, so that a physical network has one.
    sa.Column("segmentation_id", sa.Integer),
    sa.Column("availability_zone_hints", Document, nullable=False),
    sa.Column("qos_policy_id", sa.String(36), sa.ForeignKey("qos_policies.id"), index=True),
    sa.UniqueConstraint("network_type", "physical_network", "segmentation_id", name="networks_segment"),
)

subnetpools = sa.Table(
    "subnetpools",
    metadata,
    _id(),
    *_owned(),
    sa.Column("ip_version", sa.Integer, nullable=False),
    sa.Column("prefixes", Document, nullable=False),
    sa.Column("min_prefixlen", sa.Integer, nullable=False),
    sa.Column("default_prefixlen", sa.Integer, nullable=False),
    sa.Column("max_prefixlen", sa.Integer, nullable=False),
    sa.Column("default_quota", sa.Integer),
    sa.Column("shared", sa.Boolean, nullable=False),
    sa.Column("is_default", sa.Boolean, nullable=False),
)

subnets = sa.Table(
    "subnets",
    metadata,
    _id(),
    *_owned(),
    sa.Column("network_id", sa.String(36), sa.ForeignKey("networks.id"), nullable=False, index=True),
    sa.Column("subnetpool_id", sa.String(36), sa.ForeignKey("subnetpools.id"), index=True),
    sa.Column("ip_version", sa.Integer, nullable=False),
    sa.Column("cidr", sa.String(64), nullable=False),
    sa.Column("gateway_ip", sa.String(45)),
    sa.Column("enable_dhcp", sa.Boolean, nullable=False),
    sa.Column("ipv6_ra_mode", sa.String(16)),
    sa.Column("ipv6_address_mode", sa.String(16)),
    sa.Column("allocation_pools", Document, nullable=False),
    sa.Column("dns_nameservers", Document, nullable=False),
    sa.Column("host_routes", Document, nullable=False),
    sa.Column("service_types", Document, nullable=False),
    sa.Column("dns_publish_fixed_ip", sa.Boolean, nullable=False),
)

ports = sa.Table(
    "ports",
    metadata,
    _id(),
    *_owned(),
    sa.Column("network_id", sa.String(36), sa.ForeignKey("networks.id"), nullable=False),
    sa.Column("mac_address", sa.String(17), nullable=False),
    sa.Column("admin_state_up", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("device_id", sa.String(255), nullable=False, index=True),
    sa.Column("device_owner", sa.String(255), nullable=False),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    sa.Column("vif_type", sa.String(64), nullable=False),
    sa.Column("vif_details", Document, nullable=False),
    sa.Column("vnic_type", sa.String(64), nullable=False),
    sa.Column("profile", Document, nullable=False),
    sa.Column("port_security_enabled", sa.Boolean, nullable=False),
    sa.Column("allowed_address_pairs", Document, nullable=False),
    sa.Column("extra_dhcp_opts", Document, nullable=False),
    sa.Column("dns_name", sa.String(255), nullable=False),
    sa.Column("dns_domain", sa.String(255), nullable=False),
    sa.Column("qos_policy_id", sa.String(36), sa.ForeignKey("qos_policies.id"), index=True),
    sa.UniqueConstraint("network_id", "mac_address", name="ports_mac"),
    # The order of lists, of all projects and of one.
    sa.Index("ports_by_created", "created_at", "id"),
    sa.Index("ports_by_project_created", "project_id", "created_at", "id"),
)


class PortChanges(TypedDict, total=False):
    """Columns of `ports` that a request, a binding or a report may change."""

    name: str
    description: str
    admin_state_up: bool
    status: str
    mac_address: str
    device_id: str
    device_owner: str
    host: str
    vif_type: str
    vif_details: dict[str, Any]
    vnic_type: str
    profile: dict[str, Any]
    port_security_enabled: bool
    allowed_address_pairs: list[dict[str, str]]
    extra_dhcp_opts: list[dict[str, Any]]
    dns_name: str
    dns_domain: str
    qos_policy_id: str | None
    updated_at: int
    revision: int


class PortRow(TypedDict):
    """A row of `ports`."""

    id: str
    project_id: str
    name: str
    description: str
    created_at: int
    updated_at: int
    revision: int
    network_id: str
    mac_address: str
    admin_state_up: bool
    status: str
    device_id: str
    device_owner: str
    host: str
    vif_type: str
    vif_details: dict[str, Any]
    vnic_type: str
    profile: dict[str, Any]
    port_security_enabled: bool
    allowed_address_pairs: list[dict[str, str]]
    extra_dhcp_opts: list[dict[str, Any]]
    dns_name: str
    dns_domain: str
    qos_policy_id: str | None


def port_on_network(row: PortRow, network: PortNetworkRow) -> PortOnNetworkRow:
    """Return a row of `ports` as a cursor returns it, with what policy and the API need of its network."""
    labels = {
        "network_project": network.project_id,
        "network_shared": network.shared,
        "network_external": network.external,
        "network_qos_policy": network.qos_policy_id,
    }
    return cast(PortOnNetworkRow, SimpleNamespace(**row, **labels))


def port_with(row: PortRow, changes: PortChanges) -> PortRow:
    """Return a row of `ports` with changes."""
    return cast(PortRow, {**row, **changes})


addresses = sa.Table(
    "addresses",
    metadata,
    sa.Column("subnet_id", sa.String(36), sa.ForeignKey("subnets.id"), primary_key=True),
    # The address as hexadecimal digits of a fixed width, which sorts like the number.
    sa.Column("number", sa.String(32), primary_key=True),
    sa.Column("address", sa.String(45), nullable=False, index=True),
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("position", sa.Integer, nullable=False),
)

security_groups = sa.Table(
    "security_groups",
    metadata,
    _id(),
    *_owned(),
    sa.Column("stateful", sa.Boolean, nullable=False),
    sa.Column("default_of", sa.String(255), unique=True),  # the project whose default security group this is
)

security_group_rules = sa.Table(
    "security_group_rules",
    metadata,
    _id(),
    sa.Column("project_id", sa.String(255), nullable=False, index=True),
    sa.Column("description", sa.String(255), nullable=False),
    *_changed(),
    sa.Column(
        "security_group_id", sa.String(36), sa.ForeignKey("security_groups.id", ondelete="CASCADE"), nullable=False
    ),
    sa.Column("direction", sa.String(8), nullable=False),
    sa.Column("ethertype", sa.String(8), nullable=False),
    sa.Column("protocol", sa.String(40)),
    sa.Column("port_range_min", sa.Integer),
    sa.Column("port_range_max", sa.Integer),
    sa.Column("remote_ip_prefix", sa.String(64)),
    sa.Column("remote_group_id", sa.String(36), sa.ForeignKey("security_groups.id", ondelete="CASCADE"), index=True),
    sa.Column("fingerprint", sa.String(200), nullable=False),  # equal for equal rules
    sa.UniqueConstraint("security_group_id", "fingerprint", name="security_group_rules_alike"),
)

port_security_groups = sa.Table(
    "port_security_groups",
    metadata,
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("security_group_id", sa.String(36), sa.ForeignKey("security_groups.id"), primary_key=True, index=True),
)

routers = sa.Table(
    "routers",
    metadata,
    _id(),
    *_owned(),
    sa.Column("admin_state_up", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("external_network_id", sa.String(36), sa.ForeignKey("networks.id"), index=True),
    sa.Column("gateway_port_id", sa.String(36), sa.ForeignKey("ports.id"), index=True),
    sa.Column("enable_snat", sa.Boolean, nullable=False),
    sa.Column("routes", Document, nullable=False),
    sa.Column("availability_zone_hints", Document, nullable=False),
)

router_interfaces = sa.Table(
    "router_interfaces",
    metadata,
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id"), primary_key=True),
    sa.Column("router_id", sa.String(36), sa.ForeignKey("routers.id"), nullable=False),
    sa.Column("subnet_id", sa.String(36), sa.ForeignKey("subnets.id"), primary_key=True, index=True),
    sa.UniqueConstraint("router_id", "subnet_id", name="router_interfaces_subnet"),
)

floatingips = sa.Table(
    "floatingips",
    metadata,
    _id(),
    sa.Column("project_id", sa.String(255), nullable=False, index=True),
    sa.Column("description", sa.String(255), nullable=False),
    *_changed(),
    sa.Column("floating_network_id", sa.String(36), sa.ForeignKey("networks.id"), nullable=False, index=True),
    sa.Column("floating_port_id", sa.String(36), sa.ForeignKey("ports.id"), nullable=False, index=True),
    sa.Column("floating_ip_address", sa.String(45), nullable=False),
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id")),
    sa.Column("fixed_ip_address", sa.String(45)),
    sa.Column("router_id", sa.String(36), sa.ForeignKey("routers.id"), index=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("dns_name", sa.String(255), nullable=False),
    sa.Column("dns_domain", sa.String(255), nullable=False),
    sa.UniqueConstraint("port_id", "fixed_ip_address", name="floatingips_fixed"),
)

tags = sa.Table(
    "tags",
    metadata,
    sa.Column("resource_id", sa.String(36), primary_key=True),
    sa.Column("tag", sa.String(255), primary_key=True),
)

limits = sa.Table(
    "limits",
    metadata,
    sa.Column("project_id", sa.String(255), primary_key=True),
    sa.Column("resource", sa.String(64), primary_key=True),
    sa.Column("maximum", sa.Integer, nullable=False),  # -1: no limit
)

usages = sa.Table(
    "usages",
    metadata,
    sa.Column("project_id", sa.String(255), primary_key=True),
    sa.Column("resource", sa.String(64), primary_key=True),
    sa.Column("used", sa.Integer, nullable=False),
)

topologies = sa.Table(
    "topologies",
    metadata,
    sa.Column("project_id", sa.String(255), primary_key=True),
    sa.Column("network_id", sa.String(36), sa.ForeignKey("networks.id"), nullable=False),
    sa.Column("router_id", sa.String(36), sa.ForeignKey("routers.id")),
)

# Tasks that are done once, such as creating the first networks, which must not come back when they are deleted.
marks = sa.Table("marks", metadata, sa.Column("name", sa.String(64), primary_key=True))

# One row per network agent. A port that is bound to a host with an agent becomes ACTIVE when the agent reports it.
agents = sa.Table(
    "agents",
    metadata,
    _id(),
    sa.Column("agent_type", sa.String(255), nullable=False),
    sa.Column("binary", sa.String(255), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("topic", sa.String(255), nullable=False),
    sa.Column("availability_zone", sa.String(255)),
    sa.Column("description", sa.String(255), nullable=False),
    sa.Column("admin_state_up", sa.Boolean, nullable=False),
    sa.Column("configurations", Document, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=False),
    sa.Column("heartbeat_at", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("host", "agent_type", name="agents_host"),
)

# The outbox of events for compute: written with the change, deleted when compute has answered.
events = sa.Table(
    "events",
    metadata,
    _id(),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("server_id", sa.String(255), nullable=False),
    sa.Column("tag", sa.String(255), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("not_before", sa.BigInteger, nullable=False, index=True),  # until then a process is sending it
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Index("events_by_port", "tag", "server_id"),
)

# Changes of what the desired states of hosts depend on, for the processes in which network agents wait for them.
host_changes = sa.Table(
    "host_changes",
    metadata,
    sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
    sa.Column("topics", Document, nullable=False),
    sqlite_autoincrement=True,  # a position is never used twice, also after all rows are deleted
)
