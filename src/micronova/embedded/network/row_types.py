"""The types of rows as a cursor returns them, with columns as attributes; they cost nothing.

A test compares them with the tables. A port's row that is created or changed is a dictionary, `PortRow`, because
changes to it are merged before they are written. `rows` has the types of new rows.
"""

from types import SimpleNamespace
from typing import Any, Protocol, TypedDict, cast


class OwnedRow(Protocol):
    """The columns that the rows of nearly all resources have."""

    id: str
    project_id: str
    description: str
    created_at: int
    updated_at: int
    revision: int


class NetworkAccessRow(Protocol):
    """What policy and routers need of a row of `networks`."""

    id: str
    project_id: str
    external: bool


class PortNetworkRow(NetworkAccessRow, Protocol):
    """What a new port needs of a row of `networks`."""

    port_security_enabled: bool
    qos_policy_id: str | None


class NetworkOfRow(Protocol):
    """What policy and ports need of the network of a subnet or port; `network_targets.NETWORK_LABELS` select it."""

    network_project: str
    network_external: bool
    network_qos_policy: str | None


class QosPolicyRow(OwnedRow, Protocol):
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


class DscpMarkingRow(Protocol):
    """A row of `dscp_marking_rules`."""

    id: str
    policy_id: str
    dscp_mark: int


class MinimumBandwidthRow(Protocol):
    """A row of `minimum_bandwidth_rules`."""

    id: str
    policy_id: str
    direction: str
    min_kbps: int


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


class AddressScopeRow(Protocol):
    """A row of `address_scopes`."""

    id: str
    project_id: str
    name: str
    ip_version: int


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
    address_scope_id: str | None


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


class SecurityGroupRuleRow(OwnedRow, Protocol):
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


class DefaultSecurityGroupRuleRow(Protocol):
    """A row of `default_security_group_rules`."""

    id: str
    description: str
    direction: str
    ethertype: str
    protocol: str | None
    port_range_min: int | None
    port_range_max: int | None
    remote_ip_prefix: str | None
    remote_group_id: str | None
    remote_is_parent: bool
    used_in_default_sg: bool
    used_in_non_default_sg: bool
    fingerprint: str


class RuleOfGroupRow(SecurityGroupRuleRow, Protocol):
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


class TrunkRow(OwnedRow, Protocol):
    """A row of `trunks`."""

    name: str
    port_id: str
    admin_state_up: bool
    status: str


class SubportRow(Protocol):
    """A row of `subports`."""

    port_id: str
    trunk_id: str
    segmentation_type: str
    segmentation_id: int


class RbacPolicyRow(Protocol):
    """A row of `rbac_policies`."""

    id: str
    project_id: str
    object_type: str
    object_id: str
    action: str
    target: str


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


class ShownAgentRow(AgentRow, Protocol):
    """A row of `agents` with whether the agent is alive."""

    is_alive: bool


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


def port_on_network(row: PortRow, network: PortNetworkRow, qos_policy: str | None) -> PortOnNetworkRow:
    """Return a row of `ports` as a cursor returns it, with what policy and the API need of its network.

    `qos_policy` is that of the network, which may have changed since the network was read.
    """
    labels = {
        "network_project": network.project_id,
        "network_external": network.external,
        "network_qos_policy": qos_policy,
    }
    return cast(PortOnNetworkRow, SimpleNamespace(**row, **labels))


def port_with(row: PortRow, changes: PortChanges) -> PortRow:
    """Return a row of `ports` with changes."""
    return cast(PortRow, {**row, **changes})
