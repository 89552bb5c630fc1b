"""The tables of the network service: its own metadata, its own migrations, its own database.

Rows that decide races: `addresses` (an address of a subnet belongs to one port), `ports` (a MAC address is unique on
its network), `usages` (what counts against a quota), `networks` (a segment carries one network),
`security_groups.default_of` (one default group per project), `security_group_rules` (no two alike in a group).
Times are microseconds since 1970 (UTC). `row_types` has the types of rows.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.embedded.common.compute_events import event_columns

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


def _owned(*, by_project: bool = True) -> list[sa.Column[Any]]:
    """Return the columns of every resource that a project owns, perhaps with an index of those of a project."""
    return [
        sa.Column("project_id", sa.String(255), nullable=False, index=by_project),
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

dscp_marking_rules = sa.Table(
    "dscp_marking_rules",
    metadata,
    _id(),
    sa.Column(
        "policy_id", sa.String(36), sa.ForeignKey("qos_policies.id", ondelete="CASCADE"), nullable=False, unique=True
    ),
    sa.Column("dscp_mark", sa.Integer, nullable=False),
)

minimum_bandwidth_rules = sa.Table(
    "minimum_bandwidth_rules",
    metadata,
    _id(),
    sa.Column("policy_id", sa.String(36), sa.ForeignKey("qos_policies.id", ondelete="CASCADE"), nullable=False),
    sa.Column("direction", sa.String(8), nullable=False),
    sa.Column("min_kbps", sa.Integer, nullable=False),
    sa.UniqueConstraint("policy_id", "direction", name="minimum_bandwidth_rules_direction"),
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

# Addresses of a scope are unique in it, and are routed without translation.
address_scopes = sa.Table(
    "address_scopes",
    metadata,
    _id(),
    sa.Column("project_id", sa.String(255), nullable=False, index=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("ip_version", sa.Integer, nullable=False),
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
    sa.Column("address_scope_id", sa.String(36), sa.ForeignKey("address_scopes.id"), index=True),
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
    *_owned(by_project=False),  # ports_by_project_created finds them
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

# The rules that new security groups get.
default_security_group_rules = sa.Table(
    "default_security_group_rules",
    metadata,
    _id(),
    sa.Column("description", sa.String(255), nullable=False),
    sa.Column("direction", sa.String(8), nullable=False),
    sa.Column("ethertype", sa.String(8), nullable=False),
    sa.Column("protocol", sa.String(40)),
    sa.Column("port_range_min", sa.Integer),
    sa.Column("port_range_max", sa.Integer),
    sa.Column("remote_ip_prefix", sa.String(64)),
    sa.Column("remote_group_id", sa.String(36), sa.ForeignKey("security_groups.id", ondelete="CASCADE"), index=True),
    sa.Column("remote_is_parent", sa.Boolean, nullable=False),  # the remote group is the new group itself
    sa.Column("used_in_default_sg", sa.Boolean, nullable=False),
    sa.Column("used_in_non_default_sg", sa.Boolean, nullable=False),
    sa.Column("fingerprint", sa.String(200), nullable=False, unique=True),  # equal for equal rules
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

trunks = sa.Table(
    "trunks",
    metadata,
    _id(),
    *_owned(),
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id"), nullable=False, unique=True),  # its parent
    sa.Column("admin_state_up", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),  # it follows from those of its ports
)

subports = sa.Table(
    "subports",
    metadata,
    sa.Column("port_id", sa.String(36), sa.ForeignKey("ports.id"), primary_key=True),
    sa.Column("trunk_id", sa.String(36), sa.ForeignKey("trunks.id", ondelete="CASCADE"), nullable=False),
    sa.Column("segmentation_type", sa.String(32), nullable=False),
    sa.Column("segmentation_id", sa.Integer, nullable=False),
    sa.UniqueConstraint("trunk_id", "segmentation_type", "segmentation_id", name="subports_segment"),
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

# Who may use what belongs to another project. There is one row for each object, action and target.
rbac_policies = sa.Table(
    "rbac_policies",
    metadata,
    _id(),
    sa.Column("project_id", sa.String(255), nullable=False, index=True),
    sa.Column("object_type", sa.String(32), nullable=False),
    sa.Column("object_id", sa.String(36), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("target", sa.String(255), nullable=False),  # a project, or * for all
    sa.UniqueConstraint("object_id", "object_type", "action", "target", name="rbac_policies_entry"),
    sa.Index("rbac_policies_by_target", "target", "object_type", "action", "object_id"),
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

AGENT_TYPE = "Linux bridge agent"
AGENT_BINARY = "micronova-network-agent"  # clients/network/client.py asks for it

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

# The host that has the routers, in one row.
router_placement = sa.Table(
    "router_placement",
    metadata,
    sa.Column("name", sa.String(16), primary_key=True),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("silent_since", sa.BigInteger),  # when its agent was first found silent while others were alive
)

# The outbox of events for compute: written with the change, deleted when compute has answered.
events = sa.Table(
    "events",
    metadata,
    _id(),
    *event_columns(),
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
