"""Limits: a project's quota and usage, with the names of the first API."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.api.inputs import Query
from micronova.api.view import Field, View
from micronova.db import quotas
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, until

_ALWAYS = Range()


def _limit(name: str, resource: str, versions: Range = _ALWAYS) -> Field:
    return Field(name, lambda limits, used: limits.get(resource, -1), versions, type=int)


def _used(name: str, resource: str, versions: Range = _ALWAYS) -> Field:
    return Field(name, lambda limits, used: used.get(resource, 0), versions, type=int)


VIEW = View(
    _limit("maxTotalInstances", "instances"),
    _limit("maxTotalCores", "cores"),
    _limit("maxTotalRAMSize", "ram"),
    _limit("maxTotalKeypairs", "key_pairs"),
    _limit("maxServerMeta", "metadata_items"),
    _limit("maxImageMeta", "metadata_items", until(38)),
    _limit("maxPersonality", "injected_files", until(56)),
    _limit("maxPersonalitySize", "injected_file_content_bytes", until(56)),
    _limit("maxServerGroups", "server_groups"),
    _limit("maxServerGroupMembers", "server_group_members"),
    _limit("maxTotalFloatingIps", "floating_ips", until(35)),
    _limit("maxSecurityGroups", "security_groups", until(35)),
    _limit("maxSecurityGroupRules", "security_group_rules", until(35)),
    _used("totalInstancesUsed", "instances"),
    _used("totalCoresUsed", "cores"),
    _used("totalRAMUsed", "ram"),
    _used("totalServerGroupsUsed", "server_groups"),
    _used("totalFloatingIpsUsed", "floating_ips", until(35)),
    _used("totalSecurityGroupsUsed", "security_groups", until(35)),
)


class LimitsQuery(Query):
    """The project, if it is not the caller's own."""

    tenant_id: str | UnsetType = UNSET


class LimitsOfProject:
    """The handler."""

    def __init__(self, database: Database, defaults: Mapping[str, int]) -> None:
        self._database = database
        self._defaults = defaults

    async def index(self, request: Request) -> dict[str, Any]:
        """Show limits and usage."""
        project = request.context.project_id
        asked = request.query.tenant_id
        if not isinstance(asked, UnsetType):
            request.authorize({"project_id": asked}, rule="os_compute_api:limits:other_project")
            project = asked
        limits, used = await self._database.read(self._read, project)
        return {"limits": {"rate": [], "absolute": VIEW.at(request.minor)(limits, used)}}

    def _read(self, conn: sa.Connection, project: str) -> tuple[dict[str, int], dict[str, int]]:
        return quotas.limits_for(conn, project, self._defaults), quotas.usage(conn, project)


def routes(database: Database, quota_defaults: Mapping[str, int]) -> list[Route]:
    """Declare the route of limits."""
    handlers = LimitsOfProject(database, quota_defaults)
    return [
        Route(
            method="GET", path="/limits", handler=handlers.index, policy="os_compute_api:limits",
            query=LimitsQuery, strict_query=Range(75), answer={"limits": {"rate": list[str], "absolute": VIEW}},
        )
    ]  # fmt: skip
