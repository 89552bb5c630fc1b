"""The port API. One request creates a port, allocates its addresses and binds it to a host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import AddressRequest, address_requests, addresses_of
from micronova.embedded.network.binding import binding_columns, status_of
from micronova.embedded.network.collection import Creatable, Deletable, Resource, Updatable, standard_values, tags_of
from micronova.embedded.network.errors import not_found
from micronova.embedded.network.listing import Attributes, Clause, Listing
from micronova.embedded.network.network_targets import (
    NETWORK_LABELS,
    parent_network,
    parent_network_of,
    visible_network,
)
from micronova.embedded.network.port_changes import create_ports, delete_port, update_port
from micronova.embedded.network.port_filters import FILTERS
from micronova.embedded.network.port_input import check_port_security, requested_columns
from micronova.embedded.network.port_rows import (
    CreatedPort,
    PortFacts,
    PortPlan,
    groups_of,
    new_port_row,
    random_macs,
    read_port_facts,
    remember_addresses,
    with_hints,
)
from micronova.embedded.network.qos_use import check_use
from micronova.embedded.network.request_bodies import (
    Body,
    Domain,
    Flag,
    Identifier,
    Name,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    mac_address,
    project_of,
)
from micronova.embedded.network.resource_requests import resource_requests_of
from micronova.embedded.network.row_types import (
    PortAccessRow,
    PortNetworkRow,
    PortOnNetworkRow,
    port_on_network,
    port_with,
)
from micronova.embedded.network.security_groups import ensure_default_group
from micronova.embedded.network.sharing import (
    NETWORK,
    NOBODY,
    SECURITY_GROUP,
    Use,
    access_of,
    of_own_networks,
    reading_for,
    uses,
)
from micronova.embedded.network.tables import networks, ports
from micronova.embedded.network.trunk_ports import trunk_details_of
from micronova.http.request import Request
from micronova.objects.errors import Forbidden

_RENAME = {
    "binding_host_id": "binding:host_id",
    "binding_profile": "binding:profile",
    "binding_vnic_type": "binding:vnic_type",
}
_FLAGS = ("admin_state_up", "port_security_enabled")


class FixedIPBody(Body, kw_only=True):
    """A requested address: by subnet, by address, or both."""

    subnet_id: ShortText | UnsetType = UNSET
    ip_address: ShortText | UnsetType = UNSET


class AddressPairBody(Body, kw_only=True):
    """An additional source address of the port."""

    ip_address: ShortText
    mac_address: ShortText | UnsetType = UNSET


class DhcpOptionBody(Body, kw_only=True):
    """A DHCP option of the port; without a value it is removed."""

    opt_name: Annotated[str, Meta(min_length=1, max_length=64)]
    opt_value: Name | None | UnsetType = UNSET
    ip_version: int | str | UnsetType = UNSET


class PortUpdate(Body, kw_only=True, rename=_RENAME):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    admin_state_up: Flag | UnsetType = UNSET
    device_id: Name | UnsetType = UNSET
    device_owner: Name | UnsetType = UNSET
    mac_address: ShortText | None | UnsetType = UNSET
    fixed_ips: Annotated[list[FixedIPBody], Meta(max_length=50)] | None | UnsetType = UNSET
    security_groups: Annotated[list[Identifier], Meta(max_length=100)] | None | UnsetType = UNSET
    allowed_address_pairs: Annotated[list[AddressPairBody], Meta(max_length=50)] | None | UnsetType = UNSET
    extra_dhcp_opts: Annotated[list[DhcpOptionBody], Meta(max_length=50)] | None | UnsetType = UNSET
    port_security_enabled: Flag | UnsetType = UNSET
    binding_host_id: Name | None | UnsetType = UNSET
    binding_profile: dict[str, Any] | None | UnsetType = UNSET
    binding_vnic_type: ShortText | UnsetType = UNSET
    dns_name: Name | UnsetType = UNSET
    dns_domain: Domain | UnsetType = UNSET
    qos_policy_id: Identifier | None | UnsetType = UNSET


class PortCreate(PortUpdate, kw_only=True, rename=_RENAME):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    network_id: Identifier


class Ports(Creatable[PortOnNetworkRow], Updatable[PortOnNetworkRow], Deletable[PortOnNetworkRow]):
    """The port API."""

    singular = "port"
    plural = "ports"
    slug = "ports"
    attributes = Attributes.standard(
        ports,
        *("name", "network_id", "mac_address", "admin_state_up", "status", "device_id", "device_owner"),
        *("port_security_enabled", "dns_name", "dns_domain", "qos_policy_id"),
        renamed={
            "binding:host_id": ports.c.host,
            "binding:vif_type": ports.c.vif_type,
            "binding:vnic_type": ports.c.vnic_type,
        },
        special=FILTERS,
    )
    create_body = body_of_one_or_many("port", "ports", PortCreate)
    update_body = body_of_one("port", PortUpdate)
    defaults = {"device_id": "", "device_owner": "", "binding:vnic_type": "normal", "allowed_address_pairs": []}

    def select(self) -> sa.Select[Any]:
        """Select ports with the attributes of their networks that policy needs."""
        return _SELECT

    def visible_rows(self, request: Request) -> Clause | None:
        """Limit callers to their own ports and ports on their own networks."""
        if self.crosses_projects(request):
            return None
        return of_own_networks(ports, request.context.project_id)

    def resources(self, conn: sa.Connection, rows: Sequence[PortOnNetworkRow]) -> list[Resource]:
        """Return ports with their addresses and security groups."""
        return self._resources(conn, rows, [])

    def _resources(
        self, conn: sa.Connection, rows: Sequence[PortOnNetworkRow], fields: Sequence[str]
    ) -> list[Resource]:
        """Return ports with what these fields need; without fields, with everything."""
        ids = [row.id for row in rows]
        addressed = not fields or not _ADDRESS_FIELDS.isdisjoint(fields)
        fixed = addresses_of(conn, ids) if addressed else {}
        groups = groups_of(conn, ids) if not fields or "security_groups" in fields else {}
        tagged = tags_of(conn, ids) if not fields or "tags" in fields else {}
        trunked = trunk_details_of(conn, ids) if not fields or "trunk_details" in fields else {}
        asking = resource_requests_of(conn, rows) if not fields or "resource_request" in fields else {}
        suffix = self.core.settings.dns_domain
        access = access_of(conn, NETWORK, list({row.network_id for row in rows}))
        return [
            Resource(
                values_of(row, fixed.get(row.id, []), groups.get(row.id, []), tagged, suffix, asking.get(row.id))
                | ({"trunk_details": trunked[row.id]} if row.id in trunked else {}),
                _target(row),
                access.get(row.network_id, NOBODY),
            )
            for row in rows
        ]

    def page(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], visible: Clause | None
    ) -> list[Resource] | None:
        """Return a page; only the requested fields are read, because compute often lists ports with few fields."""
        rows = self.rows(conn, listing, conditions, visible)
        return None if rows is None else self._resources(conn, rows, listing.fields)

    def _load_for_delete(self, conn: sa.Connection, id: str) -> Resource | None:
        """Return a port with only what a delete needs."""
        row = conn.execute(_SELECT_FOR_DELETE, {"id": id}).first()
        if row is None:
            return None
        access = access_of(conn, NETWORK, [row.network_id]).get(row.network_id, NOBODY)
        return Resource({"id": row.id, "revision_number": row.revision}, _target(row), access)

    # --- create ---

    async def create(self, request: Request) -> dict[str, Any]:
        """Create ports with their addresses, bound if the request names a host, in one transaction."""
        asked = self.given(request)
        crosses_projects = self.crosses_projects(request)
        projects = []
        for given in asked:
            convert_text(given, _FLAGS)
            projects.append(project_of(given, request.context, crosses_projects))
        facts = await self._facts(request, asked, projects)
        plans = []
        for given, project in zip(asked, projects, strict=True):
            network = visible_network(request, given["network_id"], facts.networks, facts.access)
            target = {
                "project_id": project,
                "device_owner": owner_class(given.get("device_owner", "")),
                **parent_network(request, network, facts.access),
            }
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            relied_on: list[Use] = []
            if given.get("qos_policy_id"):
                relied_on = await self.core.database.read(check_use, request, given)
            plan = await self._plan(given, project, network, facts, crosses_projects)
            plan.relies_on += relied_on
            plans.append(plan)
        made = await self.core.write_with_events(create_ports, self.core, plans)
        remember_addresses(self.core, made)
        rows = [
            port_on_network(each.row, facts.networks[each.row["network_id"]], each.network_qos_policy) for each in made
        ]
        asking: dict[str, dict[str, Any]] = {}
        if any(row.qos_policy_id or row.network_qos_policy for row in rows):
            asking = await self.core.database.read(resource_requests_of, rows)
        resources = [self._resource(row, each, facts, asking.get(row.id)) for row, each in zip(rows, made, strict=True)]
        return self.answer(request, resources)

    async def _facts(self, request: Request, asked: Sequence[Mapping[str, Any]], projects: Sequence[str]) -> PortFacts:
        by_default = {p for p, given in zip(projects, asked, strict=True) if given.get("security_groups") is None}
        return await self.core.database.read(
            reading_for({request.context.project_id, *projects}, read_port_facts),
            list({given["network_id"] for given in asked}),
            projects=list(by_default),
            group_ids=list({group for given in asked for group in given.get("security_groups") or ()}),
            hosts=list({given["binding:host_id"] for given in asked if given.get("binding:host_id")}),
        )

    async def _plan(
        self, given: dict[str, Any], project: str, network: PortNetworkRow, facts: PortFacts, crosses_projects: bool
    ) -> PortPlan:
        row = new_port_row(self.core, project, network.id)
        row["port_security_enabled"] = given.get("port_security_enabled", network.port_security_enabled)
        row = port_with(row, requested_columns(given, row))
        row = port_with(row, binding_columns(network.id, row["host"], row["vnic_type"], row["port_security_enabled"]))
        row["status"] = status_of(row, row["host"] in facts.agent_hosts)
        candidates = facts.subnets.get(network.id, [])
        wanted = address_requests(network.id, candidates, given.get("fixed_ips"), row["device_owner"])
        groups = _chosen_groups(given, project, facts, crosses_projects)
        if groups is None:
            groups = []
            if row["port_security_enabled"] and not device_owners.is_service(row["device_owner"]):
                groups = [facts.default_groups.get(project) or await ensure_default_group(self.core, project)]
        check_port_security(row, groups)
        mac = given.get("mac_address")
        return PortPlan(
            row=row,
            macs=[mac_address(mac)] if mac else random_macs(self.core),
            address_requests=with_hints(self.core, wanted),
            groups=groups,
            tags=given.get("tags", []),
            mac_is_given=bool(mac),
            relies_on=[
                *uses(NETWORK, network.id, network.project_id, project, facts.access.get(network.id, NOBODY)),
                *_uses_of_groups(groups, project, facts),
            ],
            network_qos_policy=network.qos_policy_id,
        )

    def _resource(
        self, row: PortOnNetworkRow, made: CreatedPort, facts: PortFacts, asking: dict[str, Any] | None
    ) -> Resource:
        tagged = {row.id: sorted(set(made.tags))}
        suffix = self.core.settings.dns_domain
        access = facts.access.get(row.network_id, NOBODY)
        return Resource(values_of(row, made.fixed_ips, made.groups, tagged, suffix, asking), _target(row), access)

    # --- update ---

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a port; setting a host binds it."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, _FLAGS)
        old = resource.values
        target = {**resource.target, "device_owner": owner_class(given.get("device_owner", old["device_owner"]))}
        self.check_fields(request, "update", given, target)
        relies_on: list[Use] = []
        if "qos_policy_id" in given:
            relies_on = await self.core.database.read(check_use, request, given, old["qos_policy_id"])
        asked = {
            "network_id": old["network_id"],
            "security_groups": given.get("security_groups") or [],
            "binding:host_id": given.get("binding:host_id", old["binding:host_id"]),
        }
        facts = await self._facts(request, [asked], [old["project_id"]])
        groups = _chosen_groups(given, old["project_id"], facts, self.crosses_projects(request))
        relies_on += _uses_of_groups(groups or (), old["project_id"], facts)
        replacements: list[AddressRequest] | None = None
        if "fixed_ips" in given:
            device_owner = given.get("device_owner", old["device_owner"])
            candidates = facts.subnets.get(old["network_id"], [])
            held = {each["ip_address"] for each in old["fixed_ips"]}
            asked_ips = given["fixed_ips"] or []
            requests = address_requests(old["network_id"], candidates, asked_ips, device_owner, held)
            replacements = with_hints(self.core, requests)
        mac = mac_address(given["mac_address"]) if given.get("mac_address") else None
        revision = old["revision_number"] if request.header("if-match") else None
        await self.core.write_with_events(
            update_port,
            self.core,
            id,
            given,
            agent_hosts=facts.agent_hosts,
            revision=revision,
            groups=groups,
            address_requests=replacements,
            mac=mac,
            relies_on=relies_on,
        )
        changed = await self.core.database.read(reading_for([request.context.project_id], self.load), id)
        if changed is None:
            raise not_found("port", id)
        return {self.singular: self.view(request, changed)}

    async def delete(self, request: Request, id: str) -> None:
        """Delete a port that does not belong to a router or a floating IP."""
        try:
            await self.find_to(request, "delete", id, self._load_for_delete)
        except Forbidden as error:
            port = await self.core.database.read(self._load_for_delete, id)
            if port is None or port.target["device_owner"] != "compute:":
                raise
            raise Forbidden(
                f"{error.message} The port belongs to a server: detach it there (openstack server remove port)."
            ) from None
        await self.core.write_with_events(delete_port, self.core, id)


_ADDRESS_FIELDS = frozenset({"fixed_ips", "dns_assignment", "ip_allocation"})
_SELECT_FOR_DELETE = (
    sa.select(
        *(ports.c[name] for name in ("id", "project_id", "network_id", "device_owner", "revision")), *NETWORK_LABELS
    )
    .join(networks, networks.c.id == ports.c.network_id)
    .where(ports.c.id == sa.bindparam("id"))
)
_SELECT = sa.select(ports, *NETWORK_LABELS).join(networks, networks.c.id == ports.c.network_id)


def _target(row: PortAccessRow) -> dict[str, Any]:
    return {"project_id": row.project_id, "device_owner": owner_class(row.device_owner), **parent_network_of(row)}


def owner_class(device_owner: str) -> str:
    """Return the part of a device owner that policy rules compare, such as `compute:`."""
    kind, colon, _ = device_owner.partition(":")
    return kind + colon if kind in ("network", "compute", "baremetal", "manila") else ""


def values_of(
    row: PortOnNetworkRow,
    fixed: Sequence[dict[str, str]],
    groups: Sequence[str],
    tagged: Mapping[str, Sequence[str]],
    suffix: str,
    resource_request: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the attributes of a port in the API."""
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "network_id": row.network_id,
        "mac_address": row.mac_address,
        "admin_state_up": row.admin_state_up,
        "status": row.status,
        "device_id": row.device_id,
        "device_owner": row.device_owner,
        "fixed_ips": fixed,
        "security_groups": groups,
        "allowed_address_pairs": row.allowed_address_pairs,
        "extra_dhcp_opts": row.extra_dhcp_opts,
        "port_security_enabled": row.port_security_enabled,
        "binding:host_id": row.host,
        "binding:vif_type": row.vif_type,
        "binding:vif_details": row.vif_details,
        "binding:vnic_type": row.vnic_type,
        "binding:profile": row.profile,
        "dns_name": row.dns_name,
        "dns_domain": row.dns_domain,
        "dns_assignment": [
            {
                "ip_address": each["ip_address"],
                "hostname": name,
                "fqdn": f"{name}.{suffix}",
            }
            for each in fixed
            for name in [row.dns_name or "host-" + each["ip_address"].replace(".", "-").replace(":", "-")]
        ],
        "ip_allocation": "immediate" if fixed else "none",
        "qos_policy_id": row.qos_policy_id,
        "qos_network_policy_id": row.network_qos_policy,
        "resource_request": resource_request,
    }


def _chosen_groups(
    given: Mapping[str, Any], project: str, facts: PortFacts, crosses_projects: bool
) -> list[str] | None:
    """Return the requested security groups; None if the request does not name any."""
    if "security_groups" not in given:
        return None
    chosen = list(dict.fromkeys(given["security_groups"] or ()))
    for group in chosen:
        owner = facts.group_projects.get(group)
        shared = facts.group_access.get(group, NOBODY).is_shared(project)
        if owner is None or not (owner == project or shared or crosses_projects):
            raise not_found("security_group", group)
    return chosen


def _uses_of_groups(groups: Sequence[str], project: str, facts: PortFacts) -> list[Use]:
    """Return the uses of security groups that other projects share."""
    return [
        use
        for group in groups
        for use in uses(
            SECURITY_GROUP,
            group,
            facts.group_projects.get(group, project),
            project,
            facts.group_access.get(group, NOBODY),
        )
    ]
