"""Routers: what joins subnets with each other and with an external network. Data only: an agent makes it real."""

from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta

from micronova.http.request import Request
from micronova.http.service import Route
from micronova.neighbours.network.addresses import addresses_of
from micronova.neighbours.network.collection import (
    Collection,
    Thing,
    set_tags,
    standard,
    tags_of,
)
from micronova.neighbours.network.core import again
from micronova.neighbours.network.errors import conflict, invalid
from micronova.neighbours.network.listing import Attributes, flag, only_empty
from micronova.neighbours.network.port_rows import learn
from micronova.neighbours.network.quotas import charge_all, give_back
from micronova.neighbours.network.router_ports import (
    check_routes,
    clear_gateway,
    connect,
    disconnect,
    plan_gateway,
    plan_interface,
    set_gateway,
)
from micronova.neighbours.network.rows import bump, erase, locked, new_row
from micronova.neighbours.network.tables import router_interfaces, routers, topologies
from micronova.neighbours.network.wire import (
    Body,
    Flag,
    Identifier,
    Name,
    Optional,
    Project,
    Tags,
    convert,
    one,
    one_or_many,
    owner,
    refuse_nul,
)

Text = Annotated[str, Meta(max_length=64)]


class ExternalIPBody(Body, kw_only=True):
    """An address of the router on its external network."""

    subnet_id: Identifier | Optional = UNSET
    ip_address: Text | Optional = UNSET


class GatewayBody(Body, kw_only=True):
    """The external network of a router."""

    network_id: Identifier | None | Optional = UNSET  # without it: no external network
    enable_snat: Flag | Optional = UNSET
    external_fixed_ips: Annotated[list[ExternalIPBody], Meta(max_length=10)] | Optional = UNSET
    qos_policy_id: None | Optional = UNSET


class ExtraRouteBody(Body, kw_only=True):
    """A further route of a router."""

    destination: Text
    nexthop: Text


ExtraRoutes = Annotated[list[ExtraRouteBody], Meta(max_length=30)]


class RouterUpdate(Body, kw_only=True):
    """What may change of a router."""

    name: Name | Optional = UNSET
    description: Name | Optional = UNSET
    admin_state_up: Flag | Optional = UNSET
    external_gateway_info: GatewayBody | None | Optional = UNSET
    routes: ExtraRoutes | None | Optional = UNSET
    distributed: Flag | None | Optional = UNSET
    ha: Flag | None | Optional = UNSET


class RouterCreate(RouterUpdate, kw_only=True):
    """What a new router may be given."""

    project_id: Project | Optional = UNSET
    tenant_id: Project | Optional = UNSET
    tags: Tags | Optional = UNSET
    availability_zone_hints: Annotated[list[Name], Meta(max_length=10)] | Optional = UNSET
    flavor_id: None | Optional = UNSET


class InterfaceBody(Body, kw_only=True):
    """What is joined to a router: a subnet (by its gateway's address) or a port (by its own)."""

    subnet_id: Identifier | Optional = UNSET
    port_id: Identifier | Optional = UNSET


class RoutesOnly(Body, kw_only=True):
    """Routes to add or to take away."""

    routes: ExtraRoutes


class Routers(Collection):
    """The router API."""

    singular = "router"
    plural = "routers"
    slug = "routers"
    attributes = Attributes.standard(
        routers,
        *("name", "status", "admin_state_up"),
        special={"distributed": flag(sa.false()), "ha": flag(sa.false()), "flavor_id": only_empty},
    )
    create_body = one_or_many("router", "routers", RouterCreate)
    update_body = one("router", RouterUpdate)
    defaults = {"distributed": None, "ha": None, "external_gateway_info": None}

    def routes(self) -> list[Route]:
        """Declare the operations: those of every kind, and what joins and parts."""
        one_ = f"{self.path}/{{id}}"
        extra = one("router", RoutesOnly)
        return [
            *super().routes(),
            self._route("PUT", f"{one_}/add_router_interface", self.add_interface, "add_router_interface",
                        body=InterfaceBody),
            self._route("PUT", f"{one_}/remove_router_interface", self.remove_interface, "remove_router_interface",
                        body=InterfaceBody),
            self._route("PUT", f"{one_}/add_extraroutes", self.add_routes, "add_extraroutes", body=extra),
            self._route("PUT", f"{one_}/remove_extraroutes", self.remove_routes, "remove_extraroutes", body=extra),
        ]

    def things(self, conn: sa.Connection, rows: Sequence[Any]) -> list[Thing]:
        """Routers with the addresses of their gateways."""
        tagged = tags_of(conn, [row.id for row in rows])
        fixed = addresses_of(conn, [row.gateway_port_id for row in rows if row.gateway_port_id])
        return [
            Thing(_values(row, fixed.get(row.gateway_port_id or "", []), tagged), {"project_id": row.project_id})
            for row in rows
        ]

    async def create_now(self, request: Request) -> Any:
        """Create routers."""
        wanted = []
        for given in self.given(request):
            convert(given, ("admin_state_up", "distributed", "ha"))
            _settle_gateway(given)
            project = owner(given, request.context, self.may_name_projects(request))
            target = {"project_id": project}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            _refuse_modes(given)
            row = self.row(project, given)
            gateway = given.get("external_gateway_info")
            plan = await plan_gateway(self.core, request, row["id"], gateway) if gateway else None
            wanted.append((row, given, plan))
        made = await self.core.database.write(self.insert, wanted)
        for _, _, plan in wanted:
            if plan is not None:
                learn(self.core, plan.made)
        return self.answer(request, made)

    def row(self, project: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the row of a new router, without its gateway."""
        return {
            **new_row(self.core, project, given, revision=1),
            "name": given.get("name", ""),
            "admin_state_up": given.get("admin_state_up", True),
            "status": "ACTIVE",
            "external_network_id": None,
            "gateway_port_id": None,
            "enable_snat": True,
            "routes": [],
            "availability_zone_hints": given.get("availability_zone_hints", []),
        }

    def insert(self, conn: sa.Connection, wanted: list[Any]) -> list[Thing]:
        """Make routers with their gateways and routes."""
        found = []
        for row, given, plan in wanted:
            conn.execute(routers.insert(), row)
            if plan is not None:
                set_gateway(conn, self.core, row["id"], plan)
            if given.get("routes"):
                checked = check_routes(conn, row["id"], given["routes"])
                conn.execute(routers.update().where(routers.c.id == row["id"]).values(routes=checked))
            if given.get("tags"):
                set_tags(conn, row["id"], given["tags"])
            found.append(self.reload(conn, row["id"]))
        charge_all(conn, (row["project_id"] for row, _, _ in wanted), "router", self.core.settings.quotas)
        return found

    async def update_now(self, request: Request, id: str) -> Any:
        """Change a router, its gateway among the rest."""
        thing = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert(given, ("admin_state_up", "distributed", "ha"))
        _settle_gateway(given)
        self.check_fields(request, "update", given, thing.target)
        _refuse_modes(given)
        gateway = given.get("external_gateway_info")
        plan = await plan_gateway(self.core, request, id, gateway) if gateway else None
        changed = await self.core.database.write(
            self._change, id, thing.values["revision_number"], given, plan
        )
        if plan is not None:
            learn(self.core, plan.made)
        return {self.singular: self.view(request, changed)}

    def _change(
        self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], plan: Any
    ) -> Thing:
        plain = ("name", "description", "admin_state_up")
        values: dict[str, Any] = {name: given[name] for name in plain if name in given}
        bump(conn, routers, id, revision, self.core.now(), values)
        if "external_gateway_info" in given:
            row = conn.execute(sa.select(routers).where(routers.c.id == id)).one()
            if plan is None:
                clear_gateway(conn, self.core, row)
            elif plan.network_id == row.external_network_id and not plan.explicit:
                conn.execute(routers.update().where(routers.c.id == id).values(enable_snat=plan.enable_snat))
            else:
                clear_gateway(conn, self.core, row, moving_within=plan.network_id)
                set_gateway(conn, self.core, id, plan)
        if "routes" in given:
            checked = check_routes(conn, id, given["routes"] or [])
            conn.execute(routers.update().where(routers.c.id == id).values(routes=checked))
        return self.reload(conn, id)

    def remove(self, conn: sa.Connection, id: str) -> None:
        """Delete a router, unless it still joins something."""
        row = locked(conn, routers, id)
        if conn.execute(sa.select(router_interfaces.c.port_id).where(router_interfaces.c.router_id == id)).first():
            raise conflict(f"Router {id} still has ports", "RouterInUse")
        clear_gateway(conn, self.core, row)
        conn.execute(topologies.update().where(topologies.c.router_id == id).values(router_id=None))
        erase(conn, routers, id)
        give_back(conn, row.project_id, "router")

    # --- interfaces and routes ---

    async def add_interface(self, request: Request, id: str) -> Any:
        """PUT add_router_interface: join a subnet or a port."""
        return await again(self._add_interface, request, id)

    async def _add_interface(self, request: Request, id: str) -> Any:
        thing = await self.find(request, id, "add_router_interface")
        subnet_id, port_id = _interface(request)
        plan = await plan_interface(self.core, request, thing.values, subnet_id, port_id)
        joined = await self.core.database.write(connect, self.core, id, plan)
        return _joined(thing, joined)

    async def remove_interface(self, request: Request, id: str) -> Any:
        """PUT remove_router_interface: part from a subnet or a port."""
        return await again(self._remove_interface, request, id)

    async def _remove_interface(self, request: Request, id: str) -> Any:
        thing = await self.find(request, id, "remove_router_interface")
        subnet_id, port_id = _interface(request)
        parted = await self.core.database.write(disconnect, self.core, id, subnet_id, port_id)
        return _joined(thing, parted)

    async def add_routes(self, request: Request, id: str) -> Any:
        """PUT add_extraroutes: add to the routes that there are."""
        return await again(self._change_routes, request, id, "add_extraroutes")

    async def remove_routes(self, request: Request, id: str) -> Any:
        """PUT remove_extraroutes: take some of the routes away."""
        return await again(self._change_routes, request, id, "remove_extraroutes")

    async def _change_routes(self, request: Request, id: str, rule: str) -> Any:
        thing = await self.find(request, id, rule)
        [given] = self.given(request)
        current = {(r["destination"], r["nexthop"]): r for r in thing.values["routes"]}
        asked = {(r["destination"], r["nexthop"]): r for r in given["routes"]}
        merged = {**current, **asked} if rule == "add_extraroutes" else {
            key: route for key, route in current.items() if key not in asked
        }
        changes = {"routes": list(merged.values())}
        changed = await self.core.database.write(
            self._change, id, thing.values["revision_number"], changes, None
        )
        return {self.singular: self.view(request, changed)}


def _values(row: Any, fixed: list[dict[str, str]], tagged: dict[str, list[str]]) -> dict[str, Any]:
    gateway = None
    if row.external_network_id is not None:
        gateway = {
            "network_id": row.external_network_id,
            "enable_snat": row.enable_snat,
            "external_fixed_ips": fixed,
        }
    return {
        **standard(row, tagged),
        "name": row.name,
        "admin_state_up": row.admin_state_up,
        "status": row.status,
        "external_gateway_info": gateway,
        "external_gateways": [gateway] if gateway else [],
        "routes": row.routes,
        "distributed": False,
        "ha": False,
        "flavor_id": None,
        "availability_zone_hints": row.availability_zone_hints,
        "availability_zones": [],
    }


def _settle_gateway(given: dict[str, Any]) -> None:
    """Check `external_gateway_info`: null, {} and a gateway without a network all mean none."""
    gateway = given.get("external_gateway_info")
    if gateway is None:
        return
    if not gateway.get("network_id"):
        if any(value for value in gateway.values()):
            raise invalid("Invalid input for external_gateway_info: network_id is required.", "HTTPBadRequest")
        given["external_gateway_info"] = None
        return
    convert(gateway, ("enable_snat",))


def _refuse_modes(given: dict[str, Any]) -> None:
    if given.get("distributed") or given.get("ha"):
        raise invalid("Distributed and highly available routers are not supported here.", "BadRequest")


def _interface(request: Request) -> tuple[str | None, str | None]:
    subnet_id, port_id = request.body.subnet_id, request.body.port_id
    subnet_id = None if subnet_id is UNSET else subnet_id
    port_id = None if port_id is UNSET else port_id
    refuse_nul([subnet_id, port_id])
    if subnet_id is None and port_id is None:
        raise invalid("Bad router request: Either subnet_id or port_id must be specified.", "BadRequest")
    return subnet_id, port_id


def _joined(thing: Thing, port: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": thing.id,
        "project_id": thing.values["project_id"],
        "tenant_id": thing.values["project_id"],
        "port_id": port["port_id"],
        "network_id": port["network_id"],
        "subnet_id": port["subnet_ids"][0],
        "subnet_ids": port["subnet_ids"],
        "tags": thing.values["tags"],
    }
