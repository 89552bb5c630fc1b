"""The floating IP API. It stores the data; the network agent of the host with the routers applies it."""

from collections.abc import Sequence
from typing import Any, cast

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.compute_events import Event
from micronova.embedded.network import device_owners
from micronova.embedded.network.addresses import address_requests, addresses_of
from micronova.embedded.network.binding import belongs_to_server, event
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
from micronova.embedded.network.listing import Attributes
from micronova.embedded.network.network_targets import visible_network
from micronova.embedded.network.port_events import CHANGED
from micronova.embedded.network.port_rows import (
    CreatedPort,
    PortPlan,
    insert_port,
    read_port_facts,
    remember_addresses,
    remove_port,
    service_port,
)
from micronova.embedded.network.quotas import charge_all, release
from micronova.embedded.network.request_bodies import (
    Body,
    Domain,
    Identifier,
    Name,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    ip_address,
    project_of,
)
from micronova.embedded.network.row_types import FloatingIPRow, PortRow
from micronova.embedded.network.rows import Association, NewFloatingIP, delete_row, locked, new_row
from micronova.embedded.network.sharing import check_still_shared, reading_for
from micronova.embedded.network.tables import addresses, floatingips, ports, router_interfaces, routers, subnets
from micronova.embedded.network.topics import router_topic
from micronova.http.request import Request
from micronova.objects.errors import NotFound


class FloatingIPUpdate(Body, kw_only=True):
    """The attributes that an update may set; a null port disassociates the floating IP."""

    port_id: Identifier | None | UnsetType = UNSET
    fixed_ip_address: ShortText | None | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    qos_policy_id: None | UnsetType = UNSET


class FloatingIPCreate(FloatingIPUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    floating_network_id: Identifier
    floating_ip_address: ShortText | None | UnsetType = UNSET
    subnet_id: Identifier | None | UnsetType = UNSET
    dns_name: Name | UnsetType = UNSET
    dns_domain: Domain | UnsetType = UNSET


class FloatingIPs(Creatable[FloatingIPRow], Updatable[FloatingIPRow], Deletable[FloatingIPRow]):
    """The floating IP API."""

    singular = "floatingip"
    plural = "floatingips"
    slug = "floatingips"
    attributes = Attributes.standard(
        floatingips,
        *("status", "port_id", "floating_network_id", "floating_ip_address", "router_id", "fixed_ip_address"),
    )
    create_body = body_of_one_or_many("floatingip", "floatingips", FloatingIPCreate)
    update_body = body_of_one("floatingip", FloatingIPUpdate)

    def resources(self, conn: sa.Connection, rows: Sequence[FloatingIPRow]) -> list[Resource]:
        """Return floating IPs with details of their ports."""
        tagged = tags_of(conn, [row.id for row in rows])
        known: dict[str, Any] = {}
        for part in chunks([row.port_id for row in rows if row.port_id]):
            known.update((port.id, port) for port in conn.execute(sa.select(ports).where(ports.c.id.in_(part))))
        return [
            Resource(_values(row, known.get(row.port_id or ""), tagged), {"project_id": row.project_id}) for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create floating IPs, associated with a port if the request names one."""
        wanted = []
        for given in self.given(request):
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project}
            request.authorize(target)
            self.check_fields(request, "create", {k: v for k, v in given.items() if v is not None}, target)
            row: NewFloatingIP = {
                **new_row(self.core, project, given),
                "floating_network_id": given["floating_network_id"],
                "floating_port_id": "",  # this and the address are set when the port is inserted
                "floating_ip_address": "",
                "port_id": None,
                "fixed_ip_address": None,
                "router_id": None,
                "status": "DOWN",
                "dns_name": given.get("dns_name", ""),
                "dns_domain": given.get("dns_domain", ""),
            }
            wanted.append((row, given, await self._plan(request, row["id"], given)))
        any_port = request.context.is_admin
        resources, made = await self.core.write_with_events(self._insert, wanted, any_port)
        remember_addresses(self.core, made)
        return self.answer(request, resources)

    async def _plan(self, request: Request, id: str, given: dict[str, Any]) -> PortPlan:
        network_id = given["floating_network_id"]
        read = reading_for([request.context.project_id], read_port_facts)
        facts = await self.core.database.read(read, [network_id])
        network = visible_network(request, network_id, facts.networks, facts.access)
        if not network.external:
            raise invalid(
                f"Bad floatingip request: Network {network_id} is not a valid external network.", "BadRequest"
            )
        asked = {}
        if given.get("subnet_id"):
            asked["subnet_id"] = given["subnet_id"]
        if given.get("floating_ip_address"):
            asked["ip_address"] = given["floating_ip_address"]
        candidates = [each for each in facts.subnets.get(network_id, []) if each.version == 4]
        wanted = address_requests(network_id, candidates, [asked] if asked else None, device_owners.FLOATING_IP)
        if not wanted:
            raise invalid(
                f"Bad floatingip request: Network {network_id} does not contain any IPv4 subnet.", "BadRequest"
            )
        return service_port(self.core, "", network_id, id, device_owners.FLOATING_IP, wanted, "N/A")

    def _insert(
        self, conn: sa.Connection, wanted: Sequence[tuple[NewFloatingIP, dict[str, Any], PortPlan]], any_port: bool
    ) -> tuple[tuple[list[Resource], list[CreatedPort]], list[Event]]:
        found: list[Resource] = []
        ports_made: list[CreatedPort] = []
        events: list[Event] = []
        topics: set[str] = set()
        _lock_ports(conn, [given["port_id"] for _, given, _ in wanted if given.get("port_id")])
        for row, given, plan in wanted:
            made = insert_port(conn, plan)
            check_still_shared(conn, plan.relies_on)
            ports_made.append(made)
            row["floating_port_id"] = made.row["id"]
            row["floating_ip_address"] = made.fixed_ips[0]["ip_address"]
            if given.get("port_id"):
                change, port = _association(conn, row, given, any_port)
                row = {**row, **change}
                events += _changed_events(self.core, port)
            elif given.get("fixed_ip_address"):
                raise invalid(
                    "Bad floatingip request: fixed_ip_address cannot be specified without a port_id.", "BadRequest"
                )
            conn.execute(floatingips.insert(), row)
            topics |= _topics(row["router_id"])
            if given.get("tags"):
                set_tags(conn, row["id"], given["tags"])
            found.append(self.reload(conn, row["id"]))
        note(conn, self.core.now(), topics)
        charge_all(conn, (row["project_id"] for row, _, _ in wanted), "floatingip", self.core.settings.quotas)
        return (found, ports_made), events

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a floating IP, for example its port."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        any_port = request.context.is_admin
        port_id = given.get("port_id", resource.values["port_id"])
        changed = await self.core.write_with_events(
            self._change, id, resource.values["revision_number"], given, port_id, any_port
        )
        return {self.singular: self.view(request, changed)}

    def _change(
        self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], port_id: str | None, any_port: bool
    ) -> tuple[Resource, list[Event]]:
        """Write the change; `port_id` is the port that the floating IP then has, if the revision is still this one."""
        _lock_ports(conn, [port_id] if port_id else [])
        row = locked(conn, floatingips, id)._mapping
        values = {"description": given["description"]} if "description" in given else {}
        events: list[Event] = []
        if "port_id" in given or given.get("fixed_ip_address"):
            events += _changed_events(self.core, _port(conn, row["port_id"]))
            if port_id:
                change, port = _association(conn, row, {**given, "port_id": port_id}, any_port)
                values.update(change)
                events += [each for each in _changed_events(self.core, port) if each.tag not in {n.tag for n in events}]
            else:
                values.update(port_id=None, fixed_ip_address=None, router_id=None, status="DOWN")
        revisions.update(conn, floatingips.c.revision, id, revision, values, self.core.now())
        note(conn, self.core.now(), _topics(row["router_id"], values.get("router_id")))
        return self.reload(conn, id), events

    async def delete(self, request: Request, id: str) -> None:
        """Delete a floating IP."""
        await self.find_to(request, "delete", id)
        await self.core.write_with_events(self._delete, id)

    def _delete(self, conn: sa.Connection, id: str) -> tuple[None, list[Event]]:
        row: FloatingIPRow = locked(conn, floatingips, id)
        delete_row(conn, floatingips, id)
        note(conn, self.core.now(), _topics(row.router_id))
        remove_port(conn, row.floating_port_id, self.core.now(), with_owner=True)
        release(conn, row.project_id, "floatingip")
        return None, _changed_events(self.core, _port(conn, row.port_id))


def _topics(*router_ids: str | None) -> set[str]:
    return {router_topic(id) for id in router_ids if id}


def _values(row: FloatingIPRow, port: Any, tagged: dict[str, list[str]]) -> dict[str, Any]:
    details = None
    if port is not None:
        names = ("name", "network_id", "mac_address", "admin_state_up", "status", "device_id", "device_owner")
        details = {name: getattr(port, name) for name in names}
    return {
        **standard_values(row, tagged),
        "floating_network_id": row.floating_network_id,
        "floating_ip_address": row.floating_ip_address,
        "port_id": row.port_id,
        "fixed_ip_address": row.fixed_ip_address,
        "router_id": row.router_id,
        "status": row.status,
        "port_details": details,
        "port_forwardings": [],
        "dns_name": row.dns_name,
        "dns_domain": row.dns_domain,
        "qos_policy_id": None,
    }


def _port(conn: sa.Connection, id: str | None) -> PortRow | None:
    found = conn.execute(sa.select(ports).where(ports.c.id == id)).mappings().first() if id else None
    return cast(PortRow | None, found)


def _lock_ports(conn: sa.Connection, ids: Sequence[str]) -> None:
    """Lock the ports that floating IPs get, so that none loses its address meanwhile.

    They are locked before the floating IPs, as by a delete of a port.
    """
    if ids:
        conn.execute(sa.select(ports.c.id).where(ports.c.id.in_(ids)).order_by(ports.c.id).with_for_update())


def _association(conn: sa.Connection, row: Any, given: dict[str, Any], any_port: bool) -> tuple[Association, PortRow]:
    """Return the columns that associate a floating IP with a port, and the port."""
    port = _port(conn, given["port_id"])
    if port is None or (port["project_id"] != row["project_id"] and not any_port):
        raise not_found("port", given["port_id"])
    fixed = addresses_of(conn, [port["id"]]).get(port["id"], [])
    candidates = [each for each in fixed if ":" not in each["ip_address"]]
    if given.get("fixed_ip_address"):
        wanted = str(ip_address(given["fixed_ip_address"], "fixed_ip_address"))
        candidates = [each for each in candidates if each["ip_address"] == wanted]
        if not candidates:
            raise invalid(f"Bad floatingip request: Port {port['id']} does not have fixed ip {wanted}.", "BadRequest")
    if not candidates:
        raise invalid(
            f"Bad floatingip request: Cannot add floating IP to port {port['id']} that has no fixed IPv4 addresses.",
            "BadRequest",
        )
    if len(candidates) > 1:
        raise invalid(
            f"Bad floatingip request: Port {port['id']} has multiple fixed IPv4 addresses. Must provide a specific "
            f"IPv4 address when assigning a floating IP.",
            "BadRequest",
        )
    chosen = candidates[0]
    router_id = _router_between(conn, chosen["subnet_id"], row["floating_network_id"])
    if router_id is None:
        raise NotFound(
            f"External network {row['floating_network_id']} is not reachable from subnet {chosen['subnet_id']}. "
            f"Therefore, cannot associate Port {port['id']} with a Floating IP.",
            type="ExternalGatewayForFloatingIPNotFound",
        )
    taken = sa.select(floatingips.c.id).where(
        floatingips.c.port_id == port["id"],
        floatingips.c.fixed_ip_address == chosen["ip_address"],
        floatingips.c.id != row["id"],
    )
    if conn.execute(taken).first() is not None:
        raise conflict(
            f"Cannot associate floating IP {row['floating_ip_address']} with port {port['id']} using fixed IP "
            f"{chosen['ip_address']}, as that fixed IP already has a floating IP on external network "
            f"{row['floating_network_id']}.",
            "FloatingIPPortAlreadyAssociated",
        )
    change: Association = {
        "port_id": port["id"],
        "fixed_ip_address": chosen["ip_address"],
        "router_id": router_id,
        "status": "ACTIVE",
    }
    return change, port


def _router_between(conn: sa.Connection, subnet_id: str, network_id: str) -> str | None:
    """Return the router between a subnet and an external network; of several, the one at the gateway address."""
    statement = (
        sa.select(routers.c.id)
        .join(router_interfaces, router_interfaces.c.router_id == routers.c.id)
        .join(subnets, subnets.c.id == router_interfaces.c.subnet_id)
        .outerjoin(
            addresses,
            sa.and_(addresses.c.port_id == router_interfaces.c.port_id, addresses.c.address == subnets.c.gateway_ip),
        )
        .where(router_interfaces.c.subnet_id == subnet_id, routers.c.external_network_id == network_id)
        .order_by(addresses.c.address.is_(None), routers.c.created_at)
    )
    return conn.execute(statement.limit(1)).scalar()


def _changed_events(core: Core, port: PortRow | None) -> list[Event]:
    """Return the event for the server of a port whose floating IPs change; none if it is not a server's port."""
    if port is None or not belongs_to_server(port):
        return []
    return [event(core, CHANGED, port)]
