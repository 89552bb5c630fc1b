"""Creating, locking and deleting rows of resources.

The types of new rows have the columns of the rows in `row_types`; a test compares them.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import sqlalchemy as sa

from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.core import Core
from micronova.embedded.network.tables import tags


class OwnedColumns(TypedDict):
    """The columns that nearly all new rows have."""

    id: str
    project_id: str
    description: str
    created_at: int
    updated_at: int
    revision: int


class NewNetwork(OwnedColumns):
    """A new row of `networks`."""

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


class NewAddressScope(TypedDict):
    """A new row of `address_scopes`."""

    id: str
    project_id: str
    name: str
    ip_version: int


class SubnetPoolSizes(TypedDict):
    """The columns of `subnetpools` that follow from its prefixes."""

    ip_version: int
    prefixes: list[str]
    min_prefixlen: int
    default_prefixlen: int
    max_prefixlen: int


class NewSubnetPool(OwnedColumns, SubnetPoolSizes):
    """A new row of `subnetpools`."""

    name: str
    default_quota: int | None
    shared: bool
    is_default: bool
    address_scope_id: str | None


class NewSubnet(OwnedColumns):
    """A new row of `subnets`."""

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


class NewSecurityGroup(OwnedColumns):
    """A new row of `security_groups`."""

    name: str
    stateful: bool
    default_of: str | None


class RuleMatch(TypedDict):
    """The columns of `security_group_rules` that say which packets a rule allows."""

    ethertype: str
    protocol: str | None
    port_range_min: int | None
    port_range_max: int | None
    remote_ip_prefix: str | None


class NewSecurityGroupRule(OwnedColumns, RuleMatch):
    """A new row of `security_group_rules`."""

    security_group_id: str
    direction: str
    remote_group_id: str | None
    fingerprint: str


class NewDefaultSecurityGroupRule(RuleMatch):
    """A new row of `default_security_group_rules`."""

    id: str
    description: str
    direction: str
    remote_group_id: str | None
    remote_is_parent: bool
    used_in_default_sg: bool
    used_in_non_default_sg: bool
    fingerprint: str


class NewRouter(OwnedColumns):
    """A new row of `routers`."""

    name: str
    admin_state_up: bool
    status: str
    external_network_id: str | None
    gateway_port_id: str | None
    enable_snat: bool
    routes: list[dict[str, str]]
    availability_zone_hints: list[str]


class Association(TypedDict):
    """The columns of `floatingips` that associate a floating IP with a port."""

    port_id: str | None
    fixed_ip_address: str | None
    router_id: str | None
    status: str


class NewFloatingIP(OwnedColumns, Association):
    """A new row of `floatingips`."""

    floating_network_id: str
    floating_port_id: str
    floating_ip_address: str
    dns_name: str
    dns_domain: str


class NewQosPolicy(OwnedColumns):
    """A new row of `qos_policies`."""

    name: str
    shared: bool
    default_of: str | None


class NewTrunk(OwnedColumns):
    """A new row of `trunks`."""

    name: str
    port_id: str
    admin_state_up: bool
    status: str


class NewRbacPolicy(TypedDict):
    """A new row of `rbac_policies`."""

    id: str
    project_id: str
    object_type: str
    object_id: str
    action: str
    target: str


def new_row(core: Core, project: str, given: Mapping[str, Any], revision: int = 0) -> OwnedColumns:
    """Return the columns that nearly all new rows have."""
    now = core.now()
    return {
        "id": core.new_id(),
        "project_id": project,
        "description": given.get("description") or "",
        "created_at": now,
        "updated_at": now,
        "revision": revision,
    }


def locked(conn: sa.Connection, table: sa.Table, id: str) -> Any:
    """Lock a row and return it, of the type that `row_types` has for it; raise Changed if it is gone."""
    row = conn.execute(sa.select(table).where(table.c.id == id).with_for_update()).first()
    if row is None:
        raise Changed
    return row


def delete_row(conn: sa.Connection, table: sa.Table, id: str) -> None:
    """Delete a row and its tags."""
    conn.execute(table.delete().where(table.c.id == id))
    conn.execute(tags.delete().where(tags.c.resource_id == id))
