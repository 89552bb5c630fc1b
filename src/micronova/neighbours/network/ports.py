"""Ports: where a device meets a network. One request makes a port, gives it addresses and binds it to a host."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta

from micronova.http.request import Request
from micronova.neighbours.network.addresses import Wish, addresses_of, wishes
from micronova.neighbours.network.binding import bound, news_of, status_of
from micronova.neighbours.network.collection import (
    Collection,
    Thing,
    check_revision,
    chunks,
    standard,
    tags_of,
)
from micronova.neighbours.network.core import Changed, Core
from micronova.neighbours.network.errors import conflict, not_found
from micronova.neighbours.network.listing import Attributes, Clause
from micronova.neighbours.network.networks import NETWORK_LABELS, bump, on_network
from micronova.neighbours.network.networks import target as network_target
from micronova.neighbours.network.notifier import Event
from micronova.neighbours.network.port_filters import FILTERS
from micronova.neighbours.network.port_input import checked_values
from micronova.neighbours.network.port_rows import (
    Made,
    Plan,
    Surroundings,
    belongs_to_service,
    blank,
    heard_since,
    insert,
    learn,
    mac_in_use,
    random_macs,
    remove,
    surroundings,
    take_all,
    with_hints,
)
from micronova.neighbours.network.security_groups import ensure_default
from micronova.neighbours.network.tables import addresses, networks, port_security_groups, ports
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
    qos_policy_id: None | Optional = UNSET


class PortCreate(PortUpdate, kw_only=True, rename=_RENAME):
    """What a new port may be given."""

    network_id: Identifier
    project_id: Project | Optional = UNSET
    tenant_id: Project | Optional = UNSET
    tags: Tags | Optional = UNSET
    propagate_uplink_status: Flag | Optional = UNSET


class Ports(Collection):
    """The port API."""

    singular = "port"
    plural = "ports"
    slug = "ports"
    attributes = Attributes(
        ports,
        {
            **{name: ports.c[name] for name in ("id", "project_id", "name", "description", "network_id")},
            **{name: ports.c[name] for name in ("mac_address", "admin_state_up", "status", "device_id")},
            **{name: ports.c[name] for name in ("device_owner", "port_security_enabled", "dns_name", "dns_domain")},
            "binding:host_id": ports.c.host,
            "binding:vif_type": ports.c.vif_type,
            "binding:vnic_type": ports.c.vnic_type,
            "created_at": ports.c.created_at,
            "updated_at": ports.c.updated_at,
            "revision_number": ports.c.revision,
        },
        FILTERS,
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
        ids = [row.id for row in rows]
        fixed, groups, tagged = addresses_of(conn, ids), groups_of(conn, ids), tags_of(conn, ids)
        suffix = self.core.settings.dns_domain
        return [
            Thing(
                values_of(row, fixed.get(row.id, []), groups.get(row.id, []), tagged, suffix),
                {"project_id": row.project_id, "device_owner": owner_class(row.device_owner), **on_network(row)},
            )
            for row in rows
        ]

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
            plans.append(await self._plan(given, project, network, around, may_name))
            targets.append(target)
        made = await self.core.change(_insert_all, self.core, plans)
        learn(self.core, made)
        things = [self._thing(each, target) for each, target in zip(made, targets, strict=True)]
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
        _check_security(row, groups)
        mac = given.get("mac_address")
        return Plan(
            row=row,
            macs=[mac_address(mac)] if mac else random_macs(self.core),
            wishes=with_hints(self.core, wanted),
            groups=groups,
            tags=given.get("tags", []),
            own_mac=bool(mac),
        )

    def _thing(self, made: Made, target: dict[str, Any]) -> Thing:
        row = SimpleNamespace(**made.row)
        tagged = {made.row["id"]: sorted(set(made.tags))}
        return Thing(values_of(row, made.fixed_ips, made.groups, tagged, self.core.settings.dns_domain), target)

    # --- update ---

    async def update_now(self, request: Request, id: str) -> Any:
        """Change a port; naming a host binds it."""
        thing = await self.find(request, id, "update_port")
        check_revision(request, thing)
        [given] = self.given(request)
        convert(given, _FLAGS)
        old = thing.values
        target = {**thing.target, "device_owner": owner_class(given.get("device_owner", old["device_owner"]))}
        self.check_fields(request, "update", given, target)
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
            wanted = with_hints(self.core, wishes(old["network_id"], ranges, given["fixed_ips"] or [], owner_))
        mac = mac_address(given["mac_address"]) if given.get("mac_address") else None
        await self.core.change(
            _change, self.core, id, old["revision_number"], given, groups, wanted, mac, around.watched
        )
        changed = await self.core.database.read(self.load, id)
        if changed is None:
            raise not_found("port", id)
        return {self.singular: self.view(request, changed)}

    async def delete_now(self, request: Request, id: str) -> None:
        """Delete a port that neither a router nor a floating IP lives on."""
        thing = await self.find(request, id, "delete_port")
        check_revision(request, thing)
        await self.core.change(_delete, self.core, id)


_SELECT = sa.select(ports, *NETWORK_LABELS).join(networks, networks.c.id == ports.c.network_id)


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
        "qos_policy_id": None,
        "qos_network_policy_id": None,
        "propagate_uplink_status": True,
    }


def groups_of(conn: sa.Connection, port_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the security groups of ports."""
    found: dict[str, list[str]] = {}
    for part in chunks(port_ids):
        for row in conn.execute(_GROUPS, {"ids": part}):
            found.setdefault(row.port_id, []).append(row.security_group_id)
    return found


_GROUPS = (
    sa.select(port_security_groups)
    .where(port_security_groups.c.port_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(port_security_groups.c.port_id, port_security_groups.c.security_group_id)
)


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


def _check_security(row: Mapping[str, Any], groups: Sequence[str]) -> None:
    if row["port_security_enabled"]:
        return
    if groups:
        raise conflict(
            "Port has security group associated. Cannot disable port security or ip address until security group "
            "is removed.",
            "PortSecurityPortHasSecurityGroup",
        )
    if row["allowed_address_pairs"]:
        raise conflict(
            "Port Security must be enabled in order to have allowed address pairs on a port.",
            "AddressPairAndPortSecurityRequired",
        )


def _insert_all(conn: sa.Connection, core: Core, plans: Sequence[Plan]) -> tuple[list[Made], list[Event]]:
    made, news = [], []
    for plan in plans:
        each = insert(conn, plan, core.settings.quotas)
        made.append(each)
        news += news_of(core, None, each.row)
    return made, news


def _change(
    conn: sa.Connection,
    core: Core,
    id: str,
    revision: int,
    given: Mapping[str, Any],
    groups: list[str] | None,
    wanted: list[Wish] | None,
    mac: str | None,
    watched: set[str],
) -> tuple[None, list[Event]]:
    found = conn.execute(sa.select(ports).where(ports.c.id == id).with_for_update()).mappings().first()
    if found is None or found["revision"] != revision:
        raise Changed
    before = dict(found)
    after = {**before, **checked_values(given, before)}
    _check_service_port(conn, before, after)
    if mac is not None and mac != before["mac_address"]:
        _check_mac(conn, before, mac)
        after["mac_address"] = mac
    rebound = (after["host"], after["vnic_type"]) != (before["host"], before["vnic_type"])
    if rebound or after["port_security_enabled"] != before["port_security_enabled"]:
        after.update(bound(after["network_id"], after["host"], after["vnic_type"], after["port_security_enabled"]))
    switched = rebound or after["admin_state_up"] != before["admin_state_up"]
    if switched and not after["device_owner"].startswith("network:"):
        after["status"] = status_of(after, after["host"] in watched)
    current = groups if groups is not None else groups_of(conn, [id]).get(id, [])
    _check_security(after, current)
    moved = wanted is not None and _readdress(conn, id, after["mac_address"], wanted)
    if groups is not None:
        conn.execute(port_security_groups.delete().where(port_security_groups.c.port_id == id))
        if groups:
            rows = [{"port_id": id, "security_group_id": group} for group in groups]
            conn.execute(port_security_groups.insert(), rows)
    changes = {name: value for name, value in after.items() if value != before[name]}
    bump(conn, ports, id, revision, core.now(), changes)
    # A server that lets its port go (device_id "" in the same request) is told under its old name.
    subject = after if after["device_id"] else {**after, **{n: before[n] for n in ("device_id", "device_owner")}}
    return None, news_of(core, before, subject, moved)


def _check_service_port(conn: sa.Connection, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    same = all(before[name] == after[name] for name in ("device_id", "device_owner"))
    if same or not before["device_owner"].startswith("network:"):
        return
    if belongs_to_service(conn, before["id"]):
        raise conflict(
            f"Operation update is not supported for device_owner {before['device_owner']} on port {before['id']}.",
            "UnsupportedPortDeviceOwner",
        )


def _check_mac(conn: sa.Connection, before: Mapping[str, Any], mac: str) -> None:
    if before["host"] and before["vif_type"] not in ("unbound", "binding_failed"):
        raise conflict(
            f"Unable to complete operation on port {before['id']}, port is already bound, port type: "
            f"{before['vif_type']}, old_mac {before['mac_address']}, new_mac {mac}.",
            "PortBound",
        )
    same = sa.select(ports.c.id).where(ports.c.network_id == before["network_id"], ports.c.mac_address == mac)
    if conn.execute(same).first() is not None:
        raise mac_in_use(before["network_id"], mac)


def _readdress(conn: sa.Connection, id: str, mac: str, wanted: Sequence[Wish]) -> bool:
    """Give a port the addresses that it is to have from now on; what it has already of them it keeps."""
    a = addresses.c
    held = list(conn.execute(sa.select(a.subnet_id, a.address).where(a.port_id == id).order_by(a.position)))
    keep: set[tuple[str, str]] = set()
    new: list[Wish] = []
    for wish in sorted(wanted, key=lambda w: w.address is None):  # those that name an address have the first word
        subnet = wish.choices[0]
        kept = next(
            (
                (row.subnet_id, row.address)
                for row in held
                if row.subnet_id == subnet.id
                and (wish.address is None or row.address == str(wish.address))
                and (row.subnet_id, row.address) not in keep
            ),
            None,
        )
        if kept is not None:
            keep.add(kept)
        else:
            new.append(wish)
    gone = [row for row in held if (row.subnet_id, row.address) not in keep]
    for row in gone:
        conn.execute(addresses.delete().where(a.subnet_id == row.subnet_id, a.address == row.address))
    take_all(conn, new, id, mac, start=len(held))
    return bool(gone or new)


def _delete(conn: sa.Connection, core: Core, id: str) -> tuple[None, list[Event]]:
    gone = remove(conn, id, core.now())
    return None, news_of(core, gone, None)
