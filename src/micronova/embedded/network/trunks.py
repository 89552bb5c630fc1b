"""The trunk API: a guest has further networks at the interface of the parent port, each subport in a VLAN."""

from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.agent_liveness import hosts_with_agents
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.errors import conflict, invalid, not_found
from micronova.embedded.network.host_changes import note, topics_of_ports
from micronova.embedded.network.listing import Attributes
from micronova.embedded.network.port_rows import locked_port
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
    project_of,
)
from micronova.embedded.network.row_types import PortRow, TrunkRow
from micronova.embedded.network.rows import NewTrunk, delete_row, locked, new_row
from micronova.embedded.network.tables import networks, ports, subports, trunks
from micronova.embedded.network.trunk_ports import DOWN, bind_subport, refresh_status, subport_values
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import NotFound

MAX_VLAN = 4094


class SubportBody(Body, kw_only=True):
    """A port of a trunk, and the VLAN in which the guest has it."""

    port_id: Identifier
    segmentation_type: ShortText | None | UnsetType = UNSET
    segmentation_id: Number | None | UnsetType = UNSET


Subports = Annotated[list[SubportBody], Meta(max_length=500)]


class SubportsBody(Body, kw_only=True):
    """Subports to add or to remove."""

    sub_ports: Subports


class TrunkUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    admin_state_up: Flag | UnsetType = UNSET


class TrunkCreate(TrunkUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    port_id: Identifier
    sub_ports: Subports | None | UnsetType = UNSET


class Trunks(Creatable[TrunkRow], Updatable[TrunkRow], Deletable[TrunkRow]):
    """The trunk API."""

    singular = "trunk"
    plural = "trunks"
    slug = "trunks"
    attributes = Attributes.standard(trunks, "name", "status", "admin_state_up", "port_id")
    create_body = body_of_one_or_many("trunk", "trunks", TrunkCreate)
    update_body = body_of_one("trunk", TrunkUpdate)

    def routes(self) -> list[Route]:
        """Return the routes, with those of subports."""
        one = self.one_path
        return [
            *super().routes(),
            self.route("GET", f"{one}/get_subports", self.subports, "get_subports"),
            self.route("PUT", f"{one}/add_subports", self.add_subports, "add_subports", body=SubportsBody),
            self.route("PUT", f"{one}/remove_subports", self.remove_subports, "remove_subports", body=SubportsBody),
        ]

    def resources(self, conn: sa.Connection, rows: Sequence[TrunkRow]) -> list[Resource]:
        """Return trunks with their subports."""
        ids = [row.id for row in rows]
        tagged = tags_of(conn, ids)
        held: dict[str, list[dict[str, Any]]] = {}
        for part in chunks(ids):
            below = sa.select(subports).where(subports.c.trunk_id.in_(part))
            for row in conn.execute(below.order_by(subports.c.segmentation_id, subports.c.port_id)):
                held.setdefault(row.trunk_id, []).append(subport_values(row))
        return [Resource(_values(row, held.get(row.id, []), tagged), {"project_id": row.project_id}) for row in rows]

    # --- create, update, delete ---

    async def create(self, request: Request) -> dict[str, Any]:
        """Create trunks with their subports."""
        wanted = []
        for given in self.given(request):
            convert_text(given, ("admin_state_up",))
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            asked = _distinct(given.get("sub_ports") or [], "HTTPBadRequest")
            row: NewTrunk = {
                **new_row(self.core, project, given),
                "name": given.get("name", ""),
                "port_id": given["port_id"],
                "admin_state_up": given.get("admin_state_up", True),
                "status": DOWN,
            }
            wanted.append((row, asked, given.get("tags", [])))
        return self.answer(request, await self.core.write_and_wake(self._insert, request, wanted))

    def _insert(
        self,
        conn: sa.Connection,
        request: Request,
        wanted: Sequence[tuple[NewTrunk, list[dict[str, Any]], Sequence[str]]],
    ) -> list[Resource]:
        for row, asked, tagged in wanted:
            held = self._locked_ports(conn, request, [row["port_id"], *(each["port_id"] for each in asked)])
            _check_may_join_trunk(conn, row["port_id"])
            if not insert_if_absent(conn, trunks, row):
                raise Changed  # a concurrent request has made the port a parent
            self._add(conn, row["id"], held[row["port_id"]], asked, held)
            if tagged:
                set_tags(conn, row["id"], tagged)
            refresh_status(conn, [row["port_id"]])
        charge_all(conn, (row["project_id"] for row, _, _ in wanted), "trunk", self.core.settings.quotas)
        return self.reload_all(conn, [row["id"] for row, _, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a trunk; without admin state its ports go on, but neither they nor the trunk can be removed."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, ("admin_state_up",))
        changed = await self.core.database.write(self._change, id, resource.values["revision_number"], given)
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any]) -> Resource:
        revisions.update(conn, trunks.c.revision, id, revision, given, self.core.now())
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a trunk; its ports stay, without a host."""
        resource = await self.find_to(request, "delete", id)
        await self.core.write_and_wake(self._delete, resource)

    def _delete(self, conn: sa.Connection, resource: Resource) -> None:
        parent = locked_port(conn, resource.values["port_id"])
        row: TrunkRow = self._lock_enabled(conn, resource.id)
        below = conn.execute(sa.select(subports.c.port_id).where(subports.c.trunk_id == row.id)).scalars().all()
        self._release_ports(conn, parent, below)
        delete_row(conn, trunks, row.id)  # the database deletes its subports, too
        release(conn, row.project_id, "trunk")

    # --- subports ---

    async def subports(self, request: Request, id: str) -> Any:
        """GET get_subports."""
        resource = await self.find(request, id, "get_subports")
        return {"sub_ports": resource.values["sub_ports"]}

    async def add_subports(self, request: Request, id: str) -> Any:
        """PUT add_subports: add ports in VLANs that the trunk does not use."""
        resource = await self.find(request, id, "add_subports")
        asked = _distinct(_asked(request))
        changed = await self.core.write_and_wake(self._insert_subports, request, resource, asked)
        return self.view(request, changed)

    def _insert_subports(
        self, conn: sa.Connection, request: Request, resource: Resource, asked: list[dict[str, Any]]
    ) -> Resource:
        parent = resource.values["port_id"]
        held = self._locked_ports(conn, request, [each["port_id"] for each in asked], parent)
        row: TrunkRow = self._lock_enabled(conn, resource.id)
        self._add(conn, row.id, held[parent], asked, held)
        return self._changed(conn, row, parent)

    async def remove_subports(self, request: Request, id: str) -> Any:
        """PUT remove_subports: remove ports; they stay, without a host."""
        resource = await self.find(request, id, "remove_subports")
        gone = [each["port_id"] for each in _distinct(_asked(request))]
        changed = await self.core.write_and_wake(self._delete_subports, resource, gone)
        return self.view(request, changed)

    def _delete_subports(self, conn: sa.Connection, resource: Resource, gone: list[str]) -> Resource:
        parent = locked_port(conn, resource.values["port_id"])
        row: TrunkRow = self._lock_enabled(conn, resource.id)
        s = subports.c
        held = set(conn.execute(sa.select(s.port_id).where(s.trunk_id == row.id)).scalars())
        for port_id in gone:
            if port_id not in held:
                raise NotFound(f"SubPort {port_id[:64]} on trunk {row.id} could not be found.", type="SubPortNotFound")
        conn.execute(subports.delete().where(s.trunk_id == row.id, s.port_id.in_(gone)))
        self._release_ports(conn, parent, gone)
        return self._changed(conn, row, row.port_id)

    def _changed(self, conn: sa.Connection, row: TrunkRow, parent_id: str) -> Resource:
        revisions.update(conn, trunks.c.revision, row.id, row.revision, {}, self.core.now())
        refresh_status(conn, [parent_id])
        return self.reload(conn, row.id)

    def _lock_enabled(self, conn: sa.Connection, id: str) -> Any:
        """Lock a trunk and return its row; raise Conflict if the trunk is disabled."""
        row: TrunkRow = locked(conn, trunks, id)
        if not row.admin_state_up:
            raise conflict(f"Trunk {id} is currently disabled.", "TrunkDisabled")
        return row

    def _release_ports(self, conn: sa.Connection, parent: PortRow, ids: Sequence[str]) -> None:
        """Unbind ports that are subports no more."""
        note(conn, self.core.now(), topics_of_ports(parent))
        for id in sorted(ids):
            row = locked_port(conn, id)
            if row["host"]:
                bind_subport(conn, self.core, row, "", set())

    def _locked_ports(
        self, conn: sa.Connection, request: Request, asked: Sequence[str], parent_id: str | None = None
    ) -> dict[str, PortRow]:
        """Lock ports, those of the request and the parent; raise NotFound if the caller may not change one."""
        known = sa.select(ports.c.id, ports.c.project_id, networks.c.project_id.label("network_project")).join(
            networks, networks.c.id == ports.c.network_id
        )
        found = {row.id: row for part in chunks(asked) for row in conn.execute(known.where(ports.c.id.in_(part)))}
        for id in asked:
            row = found.get(id)
            target = {} if row is None else {"project_id": row.project_id, "network:project_id": row.network_project}
            # A trunk changes its ports, so it is not enough that the caller may see them.
            if row is None or not request.allows(target, "update_port"):
                raise not_found("port", id)
        return {id: locked_port(conn, id) for id in sorted({*asked, *([parent_id] if parent_id else ())})}

    def _add(
        self,
        conn: sa.Connection,
        trunk_id: str,
        parent: PortRow,
        asked: Sequence[dict[str, Any]],
        held: dict[str, PortRow],
    ) -> None:
        """Add subports, and bind them to the host of the parent."""
        note(conn, self.core.now(), topics_of_ports(parent))
        ids = {parent["network_id"], *(held[each["port_id"]]["network_id"] for each in asked)}
        of = {
            row.id: row
            for part in chunks(sorted(ids))
            for row in conn.execute(sa.select(networks).where(networks.c.id.in_(part)))
        }
        host = parent["host"]
        agent_hosts = hosts_with_agents(conn, [host]) if host else set()
        for each in asked:
            row = held[each["port_id"]]
            if row["id"] == parent["id"]:
                raise _parent_in_use(row["id"])
            mtu, most = of[row["network_id"]].mtu, of[parent["network_id"]].mtu
            if mtu > most:
                raise conflict(
                    f"MTU {mtu} of subport {row['id']} cannot be greater than MTU {most} of trunk {trunk_id}.",
                    "SubPortMtuGreaterThanTrunkPortMtu",
                )
            kind, number = _segment(each, of[row["network_id"]])
            _check_may_join_trunk(conn, row["id"])
            if row["device_id"]:
                raise conflict(
                    f"Unable to complete operation on port {row['id']} for network {row['network_id']}. Port already "
                    f"has an attached device {row['device_id']}.",
                    "PortInUse",
                )
            if row["host"]:  # a server uses it, even if its device was cleared: nobody else may unbind it
                raise conflict(
                    f"Unable to complete operation on port {row['id']} for network {row['network_id']}. Port is bound "
                    "to a host.",
                    "PortInUse",
                )
            new = {"trunk_id": trunk_id, "port_id": row["id"], "segmentation_type": kind, "segmentation_id": number}
            if not insert_if_absent(conn, subports, new):
                raise conflict(
                    f"segmentation_type {kind} and segmentation_id {number} already in use on trunk {trunk_id}.",
                    "DuplicateSubPort",
                )
            if host:
                bind_subport(conn, self.core, row, host, agent_hosts)


def _values(row: TrunkRow, held: list[dict[str, Any]], tagged: dict[str, list[str]]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "port_id": row.port_id,
        "admin_state_up": row.admin_state_up,
        "status": row.status,
        "sub_ports": held,
    }


def _asked(request: Request) -> list[dict[str, Any]]:
    return [
        {name: value for name in each.__struct_fields__ if (value := getattr(each, name)) is not UNSET}
        for each in request.body.sub_ports
    ]


def _distinct(asked: list[dict[str, Any]], type_: str = "InvalidInput") -> list[dict[str, Any]]:
    """Return the subports of a request; raise Invalid if two have the same port or the same VLAN."""
    seen: set[str] = set()
    used: set[tuple[Any, Any]] = set()
    for each in asked:
        port_id = each["port_id"]
        if port_id in seen:
            raise invalid(f"Non unique UUID for subport: '{port_id}'.", type_)
        seen.add(port_id)
        kind, number = each.get("segmentation_type"), each.get("segmentation_id")
        if kind == "inherit":
            continue
        if (kind is None or number is None) and len(each) > 1:
            raise invalid(_incomplete(port_id), type_)
        if number is not None:
            each["segmentation_id"] = int(number)
            if (kind, int(number)) in used:
                raise invalid(f"Segmentation ID '{number}' for '{port_id}' is not unique.", type_)
            used.add((kind, int(number)))
    return asked


def _segment(asked: dict[str, Any], network: Any) -> tuple[str, int]:
    """Return the type and the number of a subport's segment."""
    kind, number = asked.get("segmentation_type"), asked.get("segmentation_id")
    if kind == "inherit":
        kind, number = network.network_type, network.segmentation_id
    if kind is None or number is None:
        raise invalid(_incomplete(asked["port_id"]))
    if kind != "vlan":
        raise invalid(f"Unknown segmentation_type '{kind}': only vlan is supported.")
    if not 1 <= number <= MAX_VLAN:
        raise invalid(f"Segmentation ID '{number}' is not in range: it is from 1 to {MAX_VLAN}.")
    return kind, number


def _incomplete(port_id: str) -> str:
    return (
        f"Invalid subport details of port '{port_id}': missing segmentation information. Must specify both "
        "segmentation_id and segmentation_type."
    )


def _check_may_join_trunk(conn: sa.Connection, port_id: str) -> None:
    """Raise Conflict if a port is a subport or a parent already."""
    if conn.execute(sa.select(subports.c.port_id).where(subports.c.port_id == port_id)).first() is not None:
        raise conflict(f"Port {port_id} is in use by another trunk.", "TrunkPortInUse")
    if conn.execute(sa.select(trunks.c.id).where(trunks.c.port_id == port_id)).first() is not None:
        raise _parent_in_use(port_id)


def _parent_in_use(port_id: str) -> Exception:
    return conflict(
        f"Port {port_id} is currently in use and is not eligible for use as a parent port.", "ParentPortInUse"
    )
