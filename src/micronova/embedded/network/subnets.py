"""The subnet API. The subnets of a network never overlap."""

import ipaddress
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.common import revisions
from micronova.embedded.common.compute_events import Event
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.address_scopes import check_subnet
from micronova.embedded.network.addresses import allocation_subnet
from micronova.embedded.network.cidrs import (
    Network,
    check_gateway,
    check_pools,
    check_range,
    default_gateway,
    default_pools,
)
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, invalid, not_found
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.ipv6 import uses_slaac
from micronova.embedded.network.listing import QUERY, Attributes, Clause, flags, only_empty
from micronova.embedded.network.network_targets import (
    NETWORK_LABELS,
    parent_network,
    parent_network_of,
    visible_network,
)
from micronova.embedded.network.networks import AUTOMATIC_OWNERS
from micronova.embedded.network.quotas import charge_all, release
from micronova.embedded.network.request_bodies import (
    Body,
    Flag,
    Identifier,
    Name,
    Number,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    ip_address,
    ip_network,
    project_of,
)
from micronova.embedded.network.row_types import SubnetOnNetworkRow, SubnetRow
from micronova.embedded.network.rows import NewSubnet, delete_row, locked, new_row
from micronova.embedded.network.sharing import (
    EXTERNAL,
    NETWORK,
    NOBODY,
    SHARED,
    Access,
    access_of,
    of_own_networks,
    reading_for,
    shared_with,
)
from micronova.embedded.network.slaac import give_to_ports, take_from_ports
from micronova.embedded.network.subnetpools import take_prefix
from micronova.embedded.network.tables import addresses, networks, ports, router_interfaces, subnets
from micronova.embedded.network.topics import network_topic
from micronova.http.request import Request

V6Mode = Literal["slaac", "dhcpv6-stateful", "dhcpv6-stateless"]
_FLAGS = ("enable_dhcp", "use_default_subnetpool", "dns_publish_fixed_ip")


class AllocationPoolBody(Body, kw_only=True):
    """An allocation pool."""

    start: ShortText
    end: ShortText


class RouteBody(Body, kw_only=True):
    """A host route, which DHCP sends to guests."""

    destination: ShortText
    nexthop: ShortText


class SubnetUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    gateway_ip: ShortText | None | UnsetType = UNSET
    enable_dhcp: Flag | UnsetType = UNSET
    allocation_pools: Annotated[list[AllocationPoolBody], Meta(max_length=100)] | None | UnsetType = UNSET
    dns_nameservers: Annotated[list[ShortText], Meta(max_length=5)] | None | UnsetType = UNSET
    host_routes: Annotated[list[RouteBody], Meta(max_length=20)] | None | UnsetType = UNSET
    service_types: Annotated[list[Name], Meta(max_length=10)] | UnsetType = UNSET
    dns_publish_fixed_ip: Flag | UnsetType = UNSET
    segment_id: None | UnsetType = UNSET


class SubnetCreate(SubnetUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    network_id: Identifier
    ip_version: Number | UnsetType = UNSET
    cidr: ShortText | None | UnsetType = UNSET
    prefixlen: Number | UnsetType = UNSET
    subnetpool_id: Identifier | None | UnsetType = UNSET
    use_default_subnetpool: Flag | UnsetType = UNSET
    ipv6_ra_mode: V6Mode | None | UnsetType = UNSET
    ipv6_address_mode: V6Mode | None | UnsetType = UNSET


class Subnets(Creatable[SubnetOnNetworkRow], Updatable[SubnetOnNetworkRow], Deletable[SubnetOnNetworkRow]):
    """The subnet API."""

    singular = "subnet"
    plural = "subnets"
    slug = "subnets"
    attributes = Attributes.standard(
        subnets,
        *("name", "network_id", "cidr", "ip_version", "gateway_ip", "enable_dhcp", "subnetpool_id"),
        *("ipv6_ra_mode", "ipv6_address_mode"),
        special={
            "router:external": lambda values: QUERY.matches(networks.c.external, "router:external", values),
            "segment_id": only_empty,
        },
    )
    create_body = body_of_one_or_many("subnet", "subnets", SubnetCreate)
    update_body = body_of_one("subnet", SubnetUpdate)
    defaults = {"service_types": []}

    def select(self) -> sa.Select[Any]:
        """Select subnets with the attributes of their networks that policy needs."""
        return sa.select(subnets, *NETWORK_LABELS).join(networks, networks.c.id == subnets.c.network_id)

    def visible_rows(self, request: Request) -> Clause | None:
        """Limit callers to their own subnets and those of networks that they may use."""
        if self.crosses_projects(request):
            return None
        return of_own_networks(subnets, request.context.project_id, (SHARED, EXTERNAL))

    def attributes_for(self, request: Request) -> Attributes:
        """Return the attributes by which the caller can filter; a subnet is as shared as its network."""
        mine = flags(shared=shared_with(NETWORK, subnets.c.network_id, request.context.project_id))
        return replace(self.attributes, special={**self.attributes.special, **mine})

    def resources(self, conn: sa.Connection, rows: Sequence[SubnetOnNetworkRow]) -> list[Resource]:
        """Return subnets."""
        tagged = tags_of(conn, [row.id for row in rows])
        access = access_of(conn, NETWORK, list({row.network_id for row in rows}))
        return [
            Resource(
                _values(row, tagged),
                {"project_id": row.project_id, **parent_network_of(row)},
                access.get(row.network_id, NOBODY),
            )
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create subnets with a given range or one from a pool."""
        asked = self.given(request)
        names = list({given["network_id"] for given in asked})
        read = reading_for([request.context.project_id], _networks)
        known, access = await self.core.database.read(read, names)
        wanted = []
        for given in asked:
            convert_text(given, _FLAGS, ("ip_version", "prefixlen"))
            network = visible_network(request, given["network_id"], known, access)
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project, **parent_network(request, network, access)}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            wanted.append((self.row(project, given), given))
        any_pool = request.context.is_admin
        made = await self.core.write_with_events(self._insert_with_events, wanted, request.context.project_id, any_pool)
        return self.answer(request, made)

    def row(self, project: str, given: dict[str, Any]) -> NewSubnet:
        """Return the row of a new subnet, without what depends on the range if that comes from a pool."""
        version = given.get("ip_version")
        if version is None:
            version = ip_network(given["cidr"], "cidr").version if given.get("cidr") else 4
        if version not in (4, 6):
            raise invalid(f"Invalid input for ip_version: {version} is not 4 or 6.", "HTTPBadRequest")
        row: NewSubnet = {
            **new_row(self.core, project, given),
            "name": given.get("name", ""),
            "network_id": given["network_id"],
            "subnetpool_id": None,
            "ip_version": version,
            "cidr": "",  # this, the gateway and the pools are set below, or at the insert if the range is of a pool
            "gateway_ip": None,
            "allocation_pools": [],
            "enable_dhcp": given.get("enable_dhcp", True),
            "ipv6_ra_mode": given.get("ipv6_ra_mode"),
            "ipv6_address_mode": given.get("ipv6_address_mode"),
            "dns_nameservers": _nameservers(given),
            "host_routes": [],
            "service_types": given.get("service_types", []),
            "dns_publish_fixed_ip": given.get("dns_publish_fixed_ip", False),
        }
        _check_modes(row)
        pooled = given.get("subnetpool_id") or given.get("use_default_subnetpool")
        if not pooled:
            if not given.get("cidr"):
                raise invalid("Bad subnets request: a subnet needs a cidr, or a pool to take one from.", "BadRequest")
            if "prefixlen" in given:
                raise invalid("prefixlen can only be given with a subnet pool.")
            _settle_range(row, given, ip_network(given["cidr"], "cidr"))
        elif given.get("cidr") and "prefixlen" in given:
            raise invalid("cidr and prefixlen must not be supplied together.")
        return row

    def insert(
        self, conn: sa.Connection, wanted: list[tuple[NewSubnet, dict[str, Any]]], caller: str, any_pool: bool
    ) -> list[Resource]:
        """Insert subnets."""
        for row, given in wanted:
            # The lock serialises new subnets of a network, so that the check for overlap holds.
            lock = sa.select(networks.c.id).where(networks.c.id == row["network_id"])
            if conn.execute(lock.with_for_update(key_share=True)).first() is None:
                raise not_found("network", row["network_id"])
            if given.get("subnetpool_id") or given.get("use_default_subnetpool"):
                pool_id, cidr = take_prefix(conn, given, row["ip_version"], caller, any_pool)
                row["subnetpool_id"] = pool_id
                row["ip_version"] = cidr.version
                _settle_range(row, given, cidr)
            check_subnet(conn, row["network_id"], row["ip_version"], row["subnetpool_id"])
            _check_overlap(conn, row["network_id"], ipaddress.ip_network(row["cidr"]))
            conn.execute(subnets.insert(), row)
            if given.get("tags"):
                set_tags(conn, row["id"], given["tags"])
        note(conn, self.core.now(), [network_topic(row["network_id"]) for row, _ in wanted])
        charge_all(conn, (row["project_id"] for row, _ in wanted), "subnet", self.core.settings.quotas)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    def _insert_with_events(
        self, conn: sa.Connection, wanted: list[tuple[NewSubnet, dict[str, Any]]], caller: str, any_pool: bool
    ) -> tuple[list[Resource], list[Event]]:
        """Insert subnets; existing ports get the addresses that their guests derive by SLAAC."""
        made = self.insert(conn, wanted, caller, any_pool)
        rows = conn.execute(sa.select(subnets).where(subnets.c.id.in_([resource.id for resource in made]))).all()
        return made, [events for row in rows for events in give_to_ports(conn, self.core, allocation_subnet(row))]

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a subnet."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, _FLAGS)
        self.check_fields(request, "update", given, resource.target)
        changed = await self.core.write_and_wake(
            self._change, id, resource.values["revision_number"], given, self.core.now()
        )
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], now: int) -> Resource:
        row = conn.execute(sa.select(subnets).where(subnets.c.id == id)).first()
        if row is None:
            raise Changed
        cidr = ipaddress.ip_network(row.cidr)
        values = {k: v for k, v in given.items() if k != "segment_id"}
        gateway = row.gateway_ip
        if "gateway_ip" in given:
            gateway = check_gateway(cidr, given["gateway_ip"]) if given["gateway_ip"] is not None else None
            values["gateway_ip"] = gateway
            if gateway != row.gateway_ip and row.gateway_ip is not None:
                _check_gateway_unused(conn, row)
        if given.get("allocation_pools") is not None or "gateway_ip" in given:
            pools = given.get("allocation_pools")
            values["allocation_pools"] = check_pools(cidr, row.allocation_pools if pools is None else pools, gateway)
        if "dns_nameservers" in given:
            values["dns_nameservers"] = _nameservers(given)
        if "host_routes" in given:
            values["host_routes"] = _routes(given, cidr)
        if "enable_dhcp" in given and not given["enable_dhcp"]:
            _check_modes({**row._mapping, "enable_dhcp": False})
        values = {k: v for k, v in values.items() if v is not None or k == "gateway_ip"}
        revisions.update(conn, subnets.c.revision, id, revision, values, now)
        note(conn, now, [network_topic(row.network_id)])
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a subnet; raise Conflict if a port has an address of it."""
        await self.find_to(request, "delete", id)
        await self.core.write_with_events(_delete, self.core, id)


def _values(row: SubnetOnNetworkRow, tagged: dict[str, list[str]]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "network_id": row.network_id,
        "ip_version": row.ip_version,
        "cidr": row.cidr,
        "gateway_ip": row.gateway_ip,
        "enable_dhcp": row.enable_dhcp,
        "allocation_pools": row.allocation_pools,
        "dns_nameservers": row.dns_nameservers,
        "host_routes": row.host_routes,
        "ipv6_ra_mode": row.ipv6_ra_mode,
        "ipv6_address_mode": row.ipv6_address_mode,
        "subnetpool_id": row.subnetpool_id,
        "service_types": row.service_types,
        "dns_publish_fixed_ip": row.dns_publish_fixed_ip,
        "segment_id": None,
        "router:external": row.network_external,
    }


def _networks(conn: sa.Connection, ids: list[str]) -> tuple[dict[str, Any], dict[str, Access]]:
    rows = conn.execute(sa.select(networks).where(networks.c.id.in_(ids)))
    return {row.id: row for row in rows}, access_of(conn, NETWORK, ids)


def _settle_range(row: NewSubnet, given: dict[str, Any], cidr: Network) -> None:
    """Set what depends on the range: gateway, allocation pools, host routes."""
    if cidr.version != row["ip_version"]:
        raise invalid(f"cidr '{cidr}' does not match the ip_version '{row['ip_version']}'.")
    check_range(cidr)
    if cidr.version == 6 and cidr.prefixlen != 64 and uses_slaac(row["ipv6_ra_mode"], row["ipv6_address_mode"]):
        raise invalid(f"Invalid CIDR {cidr} for IPv6 address mode: a SLAAC subnet has a /64.")
    row["cidr"] = str(cidr)
    gateway = given.get("gateway_ip", "")
    if gateway == "":
        row["gateway_ip"] = default_gateway(cidr)
    else:
        row["gateway_ip"] = None if gateway is None else check_gateway(cidr, gateway)
    pools = given.get("allocation_pools")
    if pools is None:
        row["allocation_pools"] = default_pools(cidr, row["gateway_ip"])
    else:
        row["allocation_pools"] = check_pools(cidr, pools, row["gateway_ip"])
    row["host_routes"] = _routes(given, cidr)


def _check_modes(row: Any) -> None:
    ra, mode = row["ipv6_ra_mode"], row["ipv6_address_mode"]
    if ra is None and mode is None:
        return
    if row["ip_version"] == 4:
        raise invalid("ipv6_ra_mode and ipv6_address_mode are not valid when ip_version is 4.")
    if not row["enable_dhcp"]:
        raise invalid("ipv6_ra_mode or ipv6_address_mode cannot be set when enable_dhcp is set to False.")
    if ra is not None and mode is not None and ra != mode:
        raise invalid(f"ipv6_ra_mode set to '{ra}' with ipv6_address_mode set to '{mode}' is not valid.")


def _nameservers(given: dict[str, Any]) -> list[str]:
    found = [str(ip_address(text, "dns_nameservers")) for text in given.get("dns_nameservers") or ()]
    if len(set(found)) != len(found):
        raise invalid("Invalid input for dns_nameservers: duplicate entries.", "HTTPBadRequest")
    return found


def _routes(given: dict[str, Any], cidr: Network) -> list[dict[str, str]]:
    found = []
    for route in given.get("host_routes") or ():
        destination = ip_network(route["destination"], "host_routes")
        hop = ip_address(route["nexthop"], "host_routes")
        if destination.version != cidr.version or hop.version != cidr.version:
            raise invalid(f"host_routes: {destination} via {hop} does not match the ip_version '{cidr.version}'.")
        found.append({"destination": str(destination), "nexthop": str(hop)})
    if len({(r["destination"], r["nexthop"]) for r in found}) != len(found):
        raise invalid("Invalid input for host_routes: duplicate entries.", "HTTPBadRequest")
    return found


def _check_overlap(conn: sa.Connection, network_id: str, cidr: Network) -> None:
    rows = conn.execute(sa.select(subnets.c.id, subnets.c.cidr).where(subnets.c.network_id == network_id))
    for row in rows:
        other = ipaddress.ip_network(row.cidr)
        if other.version == cidr.version and cidr.overlaps(other):
            raise invalid(
                f"Invalid input for operation: Requested subnet with cidr: {cidr} for network: {network_id} "
                f"overlaps with another subnet."
            )


def _check_gateway_unused(conn: sa.Connection, row: SubnetOnNetworkRow) -> None:
    """Raise Conflict if a router has the gateway address."""
    at = (
        sa.select(addresses.c.port_id)
        .join(router_interfaces, router_interfaces.c.port_id == addresses.c.port_id)
        .where(addresses.c.subnet_id == row.id, addresses.c.address == row.gateway_ip)
    )
    port = conn.execute(at).scalar()
    if port:
        raise conflict(
            f"Current gateway ip {row.gateway_ip} already in use by port {port}. Unable to update.", "GatewayIpInUse"
        )


def _delete(conn: sa.Connection, core: Core, id: str) -> tuple[None, list[Event]]:
    row: SubnetRow = locked(conn, subnets, id)
    used = (
        sa.select(ports.c.id)
        .join(addresses, addresses.c.port_id == ports.c.id)
        .where(addresses.c.subnet_id == id, ports.c.device_owner.not_in(AUTOMATIC_OWNERS))
    )
    if not allocation_subnet(row).slaac and conn.execute(used.limit(1)).first() is not None:
        raise conflict(
            f"Unable to complete operation on subnet {id}: One or more ports have an IP allocation from this subnet.",
            "SubnetInUse",
        )
    if conn.execute(sa.select(router_interfaces.c.port_id).where(router_interfaces.c.subnet_id == id)).first():
        raise conflict(f"Unable to complete operation on subnet {id}: A router is attached to it.", "SubnetInUse")
    events = take_from_ports(conn, core, id)
    delete_row(conn, subnets, id)
    note(conn, core.now(), [network_topic(row.network_id)])
    release(conn, row.project_id, "subnet")
    return None, events
