"""The router API. It stores the data; the network agent of the host with the routers applies it."""

from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.common import revisions
from micronova.embedded.network.addresses import addresses_of
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    check_revision,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import Attributes, flags, only_empty
from micronova.embedded.network.port_rows import remember_addresses
from micronova.embedded.network.quotas import charge_all, release
from micronova.embedded.network.request_bodies import (
    Body,
    Flag,
    Identifier,
    Name,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    project_of,
    zone_hints,
)
from micronova.embedded.network.router_ports import (
    GatewayPlan,
    check_routes,
    clear_gateway,
    connect,
    disconnect,
    plan_gateway,
    plan_interface,
    set_gateway,
)
from micronova.embedded.network.row_types import RouterRow
from micronova.embedded.network.rows import NewRouter, delete_row, locked, new_row
from micronova.embedded.network.tables import router_interfaces, routers, topologies
from micronova.embedded.network.topics import ROUTERS_TOPIC, router_topic
from micronova.http.request import Request
from micronova.http.service import Route


class ExternalIPBody(Body, kw_only=True):
    """An address of the router on its external network."""

    subnet_id: Identifier | UnsetType = UNSET
    ip_address: ShortText | UnsetType = UNSET


class GatewayBody(Body, kw_only=True):
    """The external network of a router."""

    network_id: Identifier | None | UnsetType = UNSET  # missing: no external network
    enable_snat: Flag | UnsetType = UNSET
    external_fixed_ips: Annotated[list[ExternalIPBody], Meta(max_length=10)] | UnsetType = UNSET
    qos_policy_id: None | UnsetType = UNSET


class ExtraRouteBody(Body, kw_only=True):
    """An extra route of a router."""

    destination: ShortText
    nexthop: ShortText


ExtraRoutes = Annotated[list[ExtraRouteBody], Meta(max_length=30)]


class RouterUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    admin_state_up: Flag | UnsetType = UNSET
    external_gateway_info: GatewayBody | None | UnsetType = UNSET
    routes: ExtraRoutes | None | UnsetType = UNSET
    distributed: Flag | None | UnsetType = UNSET
    ha: Flag | None | UnsetType = UNSET


class RouterCreate(RouterUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    availability_zone_hints: Annotated[list[Name], Meta(max_length=10)] | UnsetType = UNSET
    flavor_id: None | UnsetType = UNSET


class InterfaceBody(Body, kw_only=True):
    """The interface to add or remove: a subnet, at its gateway address, or a port."""

    subnet_id: Identifier | UnsetType = UNSET
    port_id: Identifier | UnsetType = UNSET


class RoutesOnly(Body, kw_only=True):
    """Routes to add or to remove."""

    routes: ExtraRoutes


class NoGateways(Body, kw_only=True):
    """An empty object, which clients send for an empty list of gateways."""


class GatewaysOnly(Body, kw_only=True):
    """Gateways to add, to set or to remove."""

    external_gateways: Annotated[list[GatewayBody], Meta(max_length=10)] | NoGateways | None | UnsetType = UNSET


class Routers(Creatable[RouterRow], Updatable[RouterRow], Deletable[RouterRow]):
    """The router API."""

    singular = "router"
    plural = "routers"
    slug = "routers"
    attributes = Attributes.standard(
        routers,
        *("name", "status", "admin_state_up"),
        special={**flags(distributed=sa.false(), ha=sa.false()), "flavor_id": only_empty},
    )
    create_body = body_of_one_or_many("router", "routers", RouterCreate)
    update_body = body_of_one("router", RouterUpdate)
    defaults = {"distributed": None, "ha": None, "external_gateway_info": None}

    def routes(self) -> list[Route]:
        """Return the routes, with those for interfaces and extra routes."""
        one = self.one_path
        extra = body_of_one("router", RoutesOnly)
        gateways = body_of_one("router", GatewaysOnly)
        return [
            *super().routes(),
            self.route(
                "PUT", f"{one}/add_router_interface", self.add_interface, "add_router_interface", body=InterfaceBody
            ),
            self.route(
                "PUT",
                f"{one}/remove_router_interface",
                self.remove_interface,
                "remove_router_interface",
                body=InterfaceBody,
            ),
            self.route("PUT", f"{one}/add_extraroutes", self.change_routes, "add_extraroutes", body=extra),
            self.route("PUT", f"{one}/remove_extraroutes", self.change_routes, "remove_extraroutes", body=extra),
            *(
                self.route("PUT", f"{one}/{name}", handler, name, body=gateways)
                for name, handler in (
                    ("add_external_gateways", self.add_gateways),
                    ("update_external_gateways", self.set_gateways),
                    ("remove_external_gateways", self.remove_gateways),
                )
            ),
        ]

    def resources(self, conn: sa.Connection, rows: Sequence[RouterRow]) -> list[Resource]:
        """Return routers with the addresses of their gateways."""
        tagged = tags_of(conn, [row.id for row in rows])
        fixed = addresses_of(conn, [row.gateway_port_id for row in rows if row.gateway_port_id])
        return [
            Resource(_values(row, fixed.get(row.gateway_port_id or "", []), tagged), {"project_id": row.project_id})
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create routers."""
        wanted = []
        for given in self.given(request):
            convert_text(given, ("admin_state_up", "distributed", "ha"))
            _settle_gateway(given)
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            _refuse_modes(given)
            row = self.row(project, given)
            gateway = given.get("external_gateway_info")
            plan = await plan_gateway(self.core, request, row["id"], gateway) if gateway else None
            wanted.append((row, given, plan))
        made = await self.core.write_and_wake(self.insert, wanted)
        for _, _, plan in wanted:
            if plan is not None:
                remember_addresses(self.core, plan.made)
        return self.answer(request, made)

    def row(self, project: str, given: dict[str, Any]) -> NewRouter:
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
            "availability_zone_hints": zone_hints(given, self.core.settings.availability_zone),
        }

    def insert(
        self, conn: sa.Connection, wanted: Sequence[tuple[NewRouter, dict[str, Any], GatewayPlan | None]]
    ) -> list[Resource]:
        """Insert routers with their gateways and routes."""
        found = []
        for row, given, plan in wanted:
            conn.execute(routers.insert(), row)
            if plan is not None:
                set_gateway(conn, row["id"], plan)
            if given.get("routes"):
                checked = check_routes(conn, row["id"], given["routes"])
                conn.execute(routers.update().where(routers.c.id == row["id"]).values(routes=checked))
            if given.get("tags"):
                set_tags(conn, row["id"], given["tags"])
            found.append(self.reload(conn, row["id"]))
        note(conn, self.core.now(), [ROUTERS_TOPIC])
        charge_all(conn, (row["project_id"] for row, _, _ in wanted), "router", self.core.settings.quotas)
        return found

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a router, including its gateway."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, ("admin_state_up", "distributed", "ha"))
        _settle_gateway(given)
        self.check_fields(request, "update", given, resource.target)
        _refuse_modes(given)
        return await self._update(request, resource, given)

    async def _update(self, request: Request, resource: Resource, given: dict[str, Any]) -> dict[str, Any]:
        gateway, id = given.get("external_gateway_info"), resource.id
        plan = await plan_gateway(self.core, request, id, gateway) if gateway else None
        changed = await self.core.write_and_wake(self._change, id, resource.values["revision_number"], given, plan)
        if plan is not None:
            remember_addresses(self.core, plan.made)
        return {self.singular: self.view(request, changed)}

    def _change(
        self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], plan: GatewayPlan | None
    ) -> Resource:
        plain = ("name", "description", "admin_state_up")
        values: dict[str, Any] = {name: given[name] for name in plain if name in given}
        revisions.update(conn, routers.c.revision, id, revision, values, self.core.now())
        note(conn, self.core.now(), [router_topic(id)])
        if "external_gateway_info" in given:
            row = conn.execute(sa.select(routers).where(routers.c.id == id)).one()
            if plan is None:
                clear_gateway(conn, self.core, row)
            elif plan.network_id == row.external_network_id and not plan.explicit:
                conn.execute(routers.update().where(routers.c.id == id).values(enable_snat=plan.enable_snat))
            else:
                clear_gateway(conn, self.core, row, moving_within=plan.network_id)
                set_gateway(conn, id, plan)
        if "routes" in given:
            checked = check_routes(conn, id, given["routes"] or [])
            conn.execute(routers.update().where(routers.c.id == id).values(routes=checked))
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a router without interfaces."""
        await self.find_to(request, "delete", id)
        await self.core.write_and_wake(self.delete_router, id)

    def delete_router(self, conn: sa.Connection, id: str) -> None:
        """Delete a router; raise Conflict if it has interfaces."""
        row: RouterRow = locked(conn, routers, id)
        if conn.execute(sa.select(router_interfaces.c.port_id).where(router_interfaces.c.router_id == id)).first():
            raise conflict(f"Router {id} still has ports", "RouterInUse")
        clear_gateway(conn, self.core, row)
        conn.execute(topologies.update().where(topologies.c.router_id == id).values(router_id=None))
        delete_row(conn, routers, id)
        note(conn, self.core.now(), [ROUTERS_TOPIC])
        release(conn, row.project_id, "router")

    # --- gateways: a router has one at most ---

    async def add_gateways(self, request: Request, id: str) -> Any:
        """PUT add_external_gateways: set the gateway of a router that has none."""
        resource, asked = await self._gateways(request, id, "add_external_gateways")
        if not asked:
            return {self.singular: self.view(request, resource)}
        if resource.values["external_gateway_info"]:
            raise conflict(
                f"Unable to add extra gateways to router {id}: it has a gateway, and routers have one at most here. "
                "Remove the gateway first, or replace it by update_external_gateways.",
                "UnableToAddExtraGateways",
            )
        return await self._update(request, resource, {"external_gateway_info": asked[0]})

    async def set_gateways(self, request: Request, id: str) -> Any:
        """PUT update_external_gateways: set the gateway of a router, or remove it by an empty list."""
        resource, asked = await self._gateways(request, id, "update_external_gateways")
        if asked is None:
            return {self.singular: self.view(request, resource)}
        return await self._update(request, resource, {"external_gateway_info": asked[0] if asked else None})

    async def remove_gateways(self, request: Request, id: str) -> Any:
        """PUT remove_external_gateways: remove the gateway if it is the one that the request describes."""
        resource, asked = await self._gateways(request, id, "remove_external_gateways")
        if not asked:
            return {self.singular: self.view(request, resource)}
        current = resource.values["external_gateway_info"]
        if current is None:
            raise conflict(
                f"Unable to remove gateways from router {id}: it has no external gateway.", "UnableToRemoveGateways"
            )
        if not _matches(current, asked[0]):
            raise conflict(
                f"Unable to match a requested gateway to the gateway of router {id}: it is on network "
                f"{current['network_id']}.",
                "UnableToMatchGateways",
            )
        return await self._update(request, resource, {"external_gateway_info": None})

    async def _gateways(self, request: Request, id: str, rule: str) -> tuple[Resource, list[dict[str, Any]] | None]:
        """Return the router and the gateways of the request; None if it names none at all."""
        resource = await self.find(request, id, rule)
        check_revision(request, resource)
        [given] = self.given(request)
        if "external_gateways" not in given:
            return resource, None
        self.check_names(request, f"{rule}:", given, resource.target)
        asked: list[dict[str, Any]] = given["external_gateways"] or []
        if len(asked) > 1:
            raise invalid(
                f"Unable to change the gateways of router {id}: routers have one external gateway at most here.",
                "UnableToAddExtraGateways",
            )
        for gateway in asked:
            if not gateway.get("network_id"):
                raise invalid("Invalid input for external_gateways: network_id is required.", "HTTPBadRequest")
            convert_text(gateway, ("enable_snat",))
        return resource, asked

    # --- interfaces and routes ---

    async def add_interface(self, request: Request, id: str) -> Any:
        """PUT add_router_interface: add a subnet or a port."""
        resource = await self.find(request, id, "add_router_interface")
        subnet_id, port_id = _interface(request)
        plan = await plan_interface(self.core, request, resource.values, subnet_id, port_id)
        joined = await self.core.write_and_wake(connect, self.core, id, plan)
        return _joined(resource, joined)

    async def remove_interface(self, request: Request, id: str) -> Any:
        """PUT remove_router_interface: remove a subnet or a port."""
        resource = await self.find(request, id, "remove_router_interface")
        subnet_id, port_id = _interface(request)
        parted = await self.core.write_and_wake(disconnect, self.core, id, subnet_id, port_id)
        return _joined(resource, parted)

    async def change_routes(self, request: Request, id: str) -> Any:
        """PUT add_extraroutes or remove_extraroutes: add or remove routes."""
        rule = request.rule
        resource = await self.find(request, id, rule)
        [given] = self.given(request)
        current = {(r["destination"], r["nexthop"]): r for r in resource.values["routes"]}
        asked = {(r["destination"], r["nexthop"]): r for r in given["routes"]}
        merged = (
            {**current, **asked}
            if rule == "add_extraroutes"
            else {key: route for key, route in current.items() if key not in asked}
        )
        changes = {"routes": list(merged.values())}
        changed = await self.core.write_and_wake(self._change, id, resource.values["revision_number"], changes, None)
        return {self.singular: self.view(request, changed)}


def _values(row: RouterRow, fixed: list[dict[str, str]], tagged: dict[str, list[str]]) -> dict[str, Any]:
    gateway = None
    if row.external_network_id is not None:
        gateway = {
            "network_id": row.external_network_id,
            "enable_snat": row.enable_snat,
            "external_fixed_ips": fixed,
        }
    return {
        **standard_values(row, tagged),
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
    """Check `external_gateway_info`; null, {} and a gateway without a network mean none."""
    gateway = given.get("external_gateway_info")
    if gateway is None:
        return
    if not gateway.get("network_id"):
        if any(value for value in gateway.values()):
            raise invalid("Invalid input for external_gateway_info: network_id is required.", "HTTPBadRequest")
        given["external_gateway_info"] = None
        return
    convert_text(gateway, ("enable_snat",))


def _matches(current: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Return whether a request describes the gateway: its network, and one of its addresses if it names any."""
    if asked["network_id"] != current["network_id"]:
        return False
    wanted = asked.get("external_fixed_ips")
    return not wanted or any(
        all(held[name] == value for name, value in each.items())
        for each in wanted
        for held in current["external_fixed_ips"]
    )


def _refuse_modes(given: dict[str, Any]) -> None:
    if given.get("distributed") or given.get("ha"):
        raise invalid("Distributed and highly available routers are not supported here.", "BadRequest")


def _interface(request: Request) -> tuple[str | None, str | None]:
    subnet_id, port_id = request.body.subnet_id, request.body.port_id
    subnet_id = None if subnet_id is UNSET else subnet_id
    port_id = None if port_id is UNSET else port_id
    if subnet_id is None and port_id is None:
        raise invalid("Bad router request: Either subnet_id or port_id must be specified.", "BadRequest")
    return subnet_id, port_id


def _joined(resource: Resource, port: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": resource.id,
        "project_id": resource.values["project_id"],
        "tenant_id": resource.values["project_id"],
        "port_id": port["port_id"],
        "network_id": port["network_id"],
        "subnet_id": port["subnet_ids"][0],
        "subnet_ids": port["subnet_ids"],
        "tags": resource.values["tags"],
    }
