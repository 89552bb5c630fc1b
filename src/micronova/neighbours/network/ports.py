"""Ports: where a device meets a network. One request makes a port, gives it addresses and binds it to a host."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta

from micronova.http.request import Request
from micronova.neighbours.network.addresses import Wish, addresses_of, wishes
from micronova.neighbours.network.binding import bound, status_of
from micronova.neighbours.network.collection import (
    Collection,
    Thing,
    standard,
    tags_of,
)
from micronova.neighbours.network.errors import not_found
from micronova.neighbours.network.listing import Attributes, Clause, Listing
from micronova.neighbours.network.networks import NETWORK_LABELS, on_network
from micronova.neighbours.network.networks import target as network_target
from micronova.neighbours.network.port_changes import change, check_security, delete, groups_of, insert_all
from micronova.neighbours.network.port_filters import FILTERS
from micronova.neighbours.network.port_input import checked_values
from micronova.neighbours.network.port_rows import (
    Made,
    Plan,
    Surroundings,
    blank,
    heard_since,
    learn,
    random_macs,
    surroundings,
    with_hints,
)
from micronova.neighbours.network.qos_use import check_use
from micronova.neighbours.network.security_groups import ensure_default
from micronova.neighbours.network.tables import networks, ports
from micronova.neighbours.network.wire import (
    Body,
    Flag,
    Identifier,
    Name,
    Optional,
    Project,
    Tags,
    convert,
    mac_address,
    one,
    one_or_many,
    owner,
)

Text = Annotated[str, Meta(max_length=64)]
_RENAME = {
    "binding_host_id": "binding:host_id",
    "binding_profile": "binding:profile",
    "binding_vnic_type": "binding:vnic_type",
}
_FLAGS = ("admin_state_up", "port_security_enabled", "propagate_uplink_status")


class FixedIPBody(Body, kw_only=True):
    """An address that is asked for: by subnet, by address, or both."""

    subnet_id: Annotated[str, Meta(max_length=64)] | Optional = UNSET
    ip_address: Text | Optional = UNSET


class AddressPairBody(Body, kw_only=True):
    """A further address that the port may send from."""

    ip_address: Text
    mac_address: Text | Optional = UNSET


class DhcpOptionBody(Body, kw_only=True):
    """An option that the guest is told by DHCP; without a value it is taken away."""

    opt_name: Annotated[str, Meta(min_length=1, max_length=64)]
    opt_value: Name | None | Optional = UNSET
    ip_version: int | str | Optional = UNSET


class PortUpdate(Body, kw_only=True, rename=_RENAME):
    """What may change of a port."""

    name: Name | Optional = UNSET
    description: Name | Optional = UNSET
    admin_state_up: Flag | Optional = UNSET
    device_id: Name | Optional = UNSET
    device_owner: Name | Optional = UNSET
    mac_address: Text | None | Optional = UNSET
    fixed_ips: Annotated[list[FixedIPBody], Meta(max_length=50)] | None | Optional = UNSET
    security_groups: Annotated[list[Identifier], Meta(max_length=100)] | None | Optional = UNSET
    allowed_address_pairs: Annotated[list[AddressPairBody], Meta(max_length=50)] | None | Optional = UNSET
    extra_dhcp_opts: Annotated[list[DhcpOptionBody], Meta(max_length=50)] | None | Optional = UNSET
    port_security_enabled: Flag | Optional = UNSET
    binding_host_id: Name | None | Optional = UNSET
    binding_profile: dict[str, Any] | None | Optional = UNSET
    binding_vnic_type: Annotated[str, Meta(max_length=64)] | Optional = UNSET
    dns_name: Name | Optional = UNSET
    dns_domain: Name | Optional = UNSET
    qos_policy_id: Identifier | None | Optional = UNSET


class PortCreate(PortUpdate, kw_only=True, rename=_RENAME):
    """What a new port may be given."""

    project_id: Project | Optional = UNSET
    tenant_id: Project | Optional = UNSET
    tags: Tags | Optional = UNSET
    network_id: Identifier
    propagate_uplink_status: Flag | Optional = UNSET


class Ports(Collection):
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
    create_body = one_or_many("port", "ports", PortCreate)
    update_body = one("port", PortUpdate)
    defaults = {"device_id": "", "device_owner": "", "binding:vnic_type": "normal", "allowed_address_pairs": []}

    def select(self) -> sa.Select[Any]:
        """Ports with what policy needs of their networks."""
        return _SELECT

    def scope(self, request: Request) -> Clause | None:
        """Own ports, and those on own networks."""
        if self.may_name_projects(request):
            return None
        mine = request.context.project_id
        return sa.or_(ports.c.project_id == mine, networks.c.project_id == mine)

    def things(self, conn: sa.Connection, rows: Sequence[Any]) -> list[Thing]:
        """Ports with addresses and groups."""
        return self._things(conn, rows, [])

    def _things(self, conn: sa.Connection, rows: Sequence[Any], fields: Sequence[str]) -> list[Thing]:
        """Ports, without what none of the fields needs (no fields: all of them)."""
        ids = [row.id for row in rows]
        addressed = not fields or not _ADDRESS_FIELDS.isdisjoint(fields)
        fixed = addresses_of(conn, ids) if addressed else {}
        groups = groups_of(conn, ids) if not fields or "security_groups" in fields else {}
        tagged = tags_of(conn, ids) if not fields or "tags" in fields else {}
        suffix = self.core.settings.dns_domain
        return [
            Thing(values_of(row, fixed.get(row.id, []), groups.get(row.id, []), tagged, suffix), _target(row))
            for row in rows
        ]

    def page(
        self, conn: sa.Connection, listing: Listing, conditions: Iterable[Clause], scope: Clause | None
    ) -> list[Thing] | None:
        """Compute lists ports often, and mostly asks for a few fields."""
        rows = self.rows(conn, listing, conditions, scope)
        return None if rows is None else self._things(conn, rows, listing.fields)

    def _bare(self, conn: sa.Connection, id: str) -> Thing | None:
        """Load only what a decision about deleting needs."""
        row = conn.execute(_BARE, {"id": id}).first()
        return None if row is None else Thing({"id": row.id, "revision_number": row.revision}, _target(row))

    # --- create ---

    async def create_now(self, request: Request) -> Any:
        """Create ports with their addresses, bound if a host is named, in one transaction."""
        asked = self.given(request)
        may_name = self.may_name_projects(request)
        projects = []
        for given in asked:
            convert(given, _FLAGS)
            projects.append(owner(given, request.context, may_name))
        around = await self._around(asked, projects)
        plans, targets = [], []
        for given, project in zip(asked, projects, strict=True):
            network = around.networks.get(given["network_id"])
            if network is None or not request.allows("get_network", network_target(network)):
                raise not_found("network", given["network_id"])
            target = {
                "project_id": project,
                "device_owner": owner_class(given.get("device_owner", "")),
                "network:project_id": network.project_id,
                "network:shared": network.shared,
                "network:router:external": network.external,
            }
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            if given.get("qos_policy_id"):
                await self.core.database.read(check_use, request, given)
            plans.append(await self._plan(given, project, network, around, may_name))
            targets.append(target)
        made = await self.core.change(insert_all, self.core, plans)
        learn(self.core, made)
        things = [
            self._thing(each, target, around.networks[each.row["network_id"]].qos_policy_id)
            for each, target in zip(made, targets, strict=True)
        ]
        return self.answer(request, things)

    async def _around(self, asked: Sequence[Mapping[str, Any]], projects: Sequence[str]) -> Surroundings:
        return await self.core.database.read(
            surroundings,
            list({given["network_id"] for given in asked}),
            list({p for p, given in zip(projects, asked, strict=True) if given.get("security_groups") is None}),
            list({group for given in asked for group in given.get("security_groups") or ()}),
            list({given["binding:host_id"] for given in asked if given.get("binding:host_id")}),
            heard_since(self.core),
        )

    async def _plan(
        self, given: dict[str, Any], project: str, network: Any, around: Surroundings, any_group: bool
    ) -> Plan:
        row = blank(self.core, project, network.id)
        row["port_security_enabled"] = given.get("port_security_enabled", network.port_security_enabled)
        row.update(checked_values(given, row))
        row.update(bound(network.id, row["host"], row["vnic_type"], row["port_security_enabled"]))
        row["status"] = status_of(row, row["host"] in around.watched)
        ranges = around.ranges.get(network.id, [])
        wanted = wishes(network.id, ranges, given.get("fixed_ips"), row["device_owner"])
        groups = _chosen_groups(given, project, around, any_group)
        if groups is None:
            groups = []
            if row["port_security_enabled"] and not row["device_owner"].startswith("network:"):
                groups = [around.defaults.get(project) or await ensure_default(self.core, project)]
        check_security(row, groups)
        mac = given.get("mac_address")
        return Plan(
            row=row,
            macs=[mac_address(mac)] if mac else random_macs(self.core),
            wishes=with_hints(self.core, wanted),
            groups=groups,
            tags=given.get("tags", []),
            own_mac=bool(mac),
        )

    def _thing(self, made: Made, target: dict[str, Any], network_policy: str | None) -> Thing:
        row = SimpleNamespace(**made.row, network_qos_policy=network_policy)
        tagged = {made.row["id"]: sorted(set(made.tags))}
        return Thing(values_of(row, made.fixed_ips, made.groups, tagged, self.core.settings.dns_domain), target)

    # --- update ---

    async def update_now(self, request: Request, id: str) -> Any:
        """Change a port; naming a host binds it."""
        thing = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert(given, _FLAGS)
        old = thing.values
        target = {**thing.target, "device_owner": owner_class(given.get("device_owner", old["device_owner"]))}
        self.check_fields(request, "update", given, target)
        if "qos_policy_id" in given:
            await self.core.database.read(check_use, request, given, old["qos_policy_id"])
        asked = {
            "network_id": old["network_id"],
            "security_groups": given.get("security_groups") or [],
            "binding:host_id": given.get("binding:host_id", old["binding:host_id"]),
        }
        around = await self._around([asked], [old["project_id"]])
        groups = _chosen_groups(given, old["project_id"], around, self.may_name_projects(request))
        wanted: list[Wish] | None = None
        if "fixed_ips" in given:
            owner_ = given.get("device_owner", old["device_owner"])
            ranges = around.ranges.get(old["network_id"], [])
            held = {each["ip_address"] for each in old["fixed_ips"]}
            asked_ips = given["fixed_ips"] or []
            wanted = with_hints(self.core, wishes(old["network_id"], ranges, asked_ips, owner_, held))
        mac = mac_address(given["mac_address"]) if given.get("mac_address") else None
        revision = old["revision_number"] if request.header("if-match") else None
        await self.core.change(change, self.core, id, revision, given, groups, wanted, mac, around.watched)
        changed = await self.core.database.read(self.load, id)
        if changed is None:
            raise not_found("port", id)
        return {self.singular: self.view(request, changed)}

    async def delete_now(self, request: Request, id: str) -> None:
        """Delete a port that neither a router nor a floating IP lives on."""
        await self.find_to(request, "delete", id, self._bare)
        await self.core.change(delete, self.core, id)


_ADDRESS_FIELDS = frozenset({"fixed_ips", "dns_assignment", "ip_allocation"})
_BARE = (
    sa.select(ports.c.id, ports.c.project_id, ports.c.device_owner, ports.c.revision, *NETWORK_LABELS)
    .join(networks, networks.c.id == ports.c.network_id)
    .where(ports.c.id == sa.bindparam("id"))
)
_SELECT = sa.select(ports, *NETWORK_LABELS).join(networks, networks.c.id == ports.c.network_id)


def _target(row: Any) -> dict[str, Any]:
    return {"project_id": row.project_id, "device_owner": owner_class(row.device_owner), **on_network(row)}


def owner_class(device_owner: str) -> str:
    """Return the part of a device owner that policy looks at: `network:`, `compute:`…"""
    kind, colon, _ = device_owner.partition(":")
    return kind + colon if kind in ("network", "compute", "baremetal", "manila") else ""


def values_of(
    row: Any,
    fixed: Sequence[dict[str, str]],
    groups: Sequence[str],
    tagged: Mapping[str, Sequence[str]],
    suffix: str,
) -> dict[str, Any]:
    """Return a port as clients see it."""
    return {
        **standard(row, tagged),
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
        "propagate_uplink_status": True,
    }


def _chosen_groups(
    given: Mapping[str, Any], project: str, around: Surroundings, any_group: bool
) -> list[str] | None:
    """Return the groups that a port is given; None when nothing is said about them."""
    if "security_groups" not in given:
        return None
    chosen = list(dict.fromkeys(given["security_groups"] or ()))
    for group in chosen:
        if group not in around.groups or (around.groups[group] != project and not any_group):
            raise not_found("security_group", group)
    return chosen
