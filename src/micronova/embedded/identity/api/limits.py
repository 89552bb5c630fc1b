"""/v3/registered_limits and /v3/limits: limits that services may ask for. Here they are kept, not enforced."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page, route
from micronova.embedded.identity.attributes import ID, Name, RegionID, given
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import limits
from micronova.embedded.identity.store.kinds import LIMITS, REGISTERED_LIMITS, LimitRow, RegisteredLimitRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid

Amount = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: unlimited
Description = Annotated[str, Meta(max_length=255)]
MODEL = {
    "name": "flat",
    "description": "A limit holds for one project or domain; those above and below it in the tree do not matter.",
}


class RegisteredLimitAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new registered limit."""

    service_id: ID
    resource_name: Name
    default_limit: Amount
    region_id: RegionID | None = None
    description: Description | None = None


class RegisteredLimitsBody(Struct, forbid_unknown_fields=True):
    """A body that holds new registered limits."""

    registered_limits: Annotated[list[RegisteredLimitAttributes], Meta(min_length=1)]


class RegisteredLimitChanges(Struct, forbid_unknown_fields=True):
    """The attributes of a registered limit to change."""

    service_id: ID | UnsetType = UNSET
    resource_name: Name | UnsetType = UNSET
    default_limit: Amount | UnsetType = UNSET
    region_id: RegionID | None | UnsetType = UNSET
    description: Description | None | UnsetType = UNSET


class RegisteredLimitChangesBody(Struct, forbid_unknown_fields=True):
    """A body that holds changes of a registered limit."""

    registered_limit: RegisteredLimitChanges


class LimitAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new limit, either of a project or of a domain."""

    service_id: ID
    resource_name: Name
    resource_limit: Amount
    project_id: ID | None | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    region_id: RegionID | None = None
    description: Description | None = None


class LimitsBody(Struct, forbid_unknown_fields=True):
    """A body that holds new limits."""

    limits: Annotated[list[LimitAttributes], Meta(min_length=1)]


class LimitChanges(Struct, forbid_unknown_fields=True):
    """The attributes of a limit to change."""

    resource_limit: Amount | UnsetType = UNSET
    description: Description | None | UnsetType = UNSET


class LimitChangesBody(Struct, forbid_unknown_fields=True):
    """A body that holds changes of a limit."""

    limit: LimitChanges


class RegisteredLimitsAPI:
    """Registered limits."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/registered_limits", f"{V3}/registered_limits/{{registered_limit_id}}"
        return [
            route("GET", path, self.index, "list_registered_limits"),
            route("POST", path, self.create, "create_registered_limits", status=201, body=RegisteredLimitsBody),
            route("GET", one, self.show, "get_registered_limit"),
            route("PATCH", one, self.update, "update_registered_limit", body=RegisteredLimitChangesBody),
            route("DELETE", one, self.delete, "delete_registered_limit", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List registered limits."""
        listed = await self._core.database.read(limits.list_registered, request.raw_query, page(request))
        return collection(
            request, "registered_limits", [views.registered_limit(request, row) for row in listed.rows], listed
        )

    async def create(self, request: Request) -> dict[str, Any]:
        """Create registered limits."""
        wanted: list[RegisteredLimitAttributes] = request.body.registered_limits
        rows: list[RegisteredLimitRow] = [
            {
                "id": self._core.new_id(),
                "service_id": each.service_id,
                "region_id": each.region_id or "",
                "resource_name": each.resource_name,
                "default_limit": each.default_limit,
                "description": each.description,
                "created_at": self._core.timestamps.next(),
            }
            for each in wanted
        ]
        made = await self._core.write(limits.create_registered, rows)
        return {"registered_limits": [views.registered_limit(request, row) for row in made]}

    async def show(self, request: Request, registered_limit_id: str) -> dict[str, Any]:
        """Show a registered limit."""
        row = await self._core.database.read(REGISTERED_LIMITS.get, registered_limit_id)
        return {"registered_limit": views.registered_limit(request, row)}

    async def update(self, request: Request, registered_limit_id: str) -> dict[str, Any]:
        """Change a registered limit that no project or domain has a limit of."""
        wanted: RegisteredLimitChanges = request.body.registered_limit
        values = given(wanted, "service_id", "resource_name", "default_limit", "region_id", "description")
        if "region_id" in values:
            values["region_id"] = values["region_id"] or ""
        row = await self._core.write(limits.change_registered, registered_limit_id, values)
        return {"registered_limit": views.registered_limit(request, row)}

    async def delete(self, request: Request, registered_limit_id: str) -> None:
        """Delete a registered limit that no project or domain has a limit of."""
        await self._core.write(limits.delete_registered, registered_limit_id)


class LimitsAPI:
    """Limits of projects and domains."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/limits", f"{V3}/limits/{{limit_id}}"
        return [
            route("GET", f"{path}/model", self.model, "get_limit_model"),
            route("GET", path, self.index, "list_limits"),
            route("POST", path, self.create, "create_limits", status=201, body=LimitsBody),
            checked_route("GET", one, self.show, "get_limit"),
            route("PATCH", one, self.update, "update_limit", body=LimitChangesBody),
            route("DELETE", one, self.delete, "delete_limit", status=204),
        ]

    async def model(self, request: Request) -> dict[str, Any]:
        """Show how a service that asks for limits is to enforce them."""
        return {"model": MODEL}

    async def index(self, request: Request) -> dict[str, Any]:
        """List limits: all to services and callers that may see them, else those of the token's project or domain."""
        context = request.context
        sees_all = (
            context.system_scope is not None
            or request.allows({"project_id": None, "domain_id": None}, "identity:get_limit")
            or (context.domain_id is None and request.allows(rule="service_role"))
        )
        project_id = None if sees_all or context.domain_id is not None else context.project_id
        domain_id = None if sees_all else context.domain_id
        listed = await self._core.database.read(
            limits.list_limits, request.raw_query, page(request), project_id, domain_id
        )
        return collection(request, "limits", [views.limit(request, row) for row in listed.rows], listed)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create limits."""
        wanted: list[LimitAttributes] = request.body.limits
        rows: list[LimitRow] = []
        for each in wanted:
            owner = given(each, "project_id", "domain_id")
            if len(owner) != 1 or not all(owner.values()):
                raise Invalid("Invalid input for field/attribute limits: each names either a project or a domain.")
            rows.append(
                {
                    "id": self._core.new_id(),
                    "project_id": owner.get("project_id", ""),
                    "domain_id": owner.get("domain_id", ""),
                    "service_id": each.service_id,
                    "region_id": each.region_id or "",
                    "resource_name": each.resource_name,
                    "resource_limit": each.resource_limit,
                    "description": each.description,
                    "created_at": self._core.timestamps.next(),
                }
            )
        made = await self._core.write(limits.create, rows)
        return {"limits": [views.limit(request, row) for row in made]}

    async def show(self, request: Request, limit_id: str) -> dict[str, Any]:
        """Show a limit."""
        row, domain_id = await self._core.database.read(limits.find, limit_id)
        request.authorize({"project_id": row["project_id"] or None if row else None, "domain_id": domain_id})
        if row is None:
            raise LIMITS.not_found(limit_id)
        return {"limit": views.limit(request, row)}

    async def update(self, request: Request, limit_id: str) -> dict[str, Any]:
        """Change a limit."""
        wanted: LimitChanges = request.body.limit
        row = await self._core.write(limits.change, limit_id, given(wanted, "resource_limit", "description"))
        return {"limit": views.limit(request, row)}

    async def delete(self, request: Request, limit_id: str) -> None:
        """Delete a limit."""
        await self._core.write(limits.delete, limit_id)
