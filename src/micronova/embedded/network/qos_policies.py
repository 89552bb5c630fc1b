"""The QoS policy API: named sets of bandwidth limits. A project may have a default policy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.listing import Attributes, Clause, flags
from micronova.embedded.network.qos_use import default_policy, policy_target
from micronova.embedded.network.request_bodies import (
    Body,
    Flag,
    Name,
    Project,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    project_of,
)
from micronova.embedded.network.row_types import BandwidthLimitRow, PolicyRow
from micronova.embedded.network.rows import NewPolicy, erase, locked, new_row
from micronova.embedded.network.tables import bandwidth_limit_rules, networks, ports, qos_policies
from micronova.http.request import Request

RULE_TYPE = "bandwidth_limit"
_FLAGS = ("shared", "is_default")


class PolicyUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    shared: Flag | UnsetType = UNSET
    is_default: Flag | UnsetType = UNSET


class PolicyCreate(PolicyUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET


class QosPolicies(Creatable[PolicyRow], Updatable[PolicyRow], Deletable[PolicyRow]):
    """The QoS policy API."""

    singular = "policy"
    plural = "policies"
    slug = "qos/policies"
    attributes = Attributes.standard(
        qos_policies,
        "name",
        "shared",
        special=flags(is_default=qos_policies.c.default_of.is_not(None)),
    )
    create_body = body_of_one_or_many("policy", "policies", PolicyCreate)
    update_body = body_of_one("policy", PolicyUpdate)

    def scope(self, request: Request) -> Clause | None:
        """Limit callers to their own and shared policies."""
        if self.crosses_projects(request):
            return None
        return sa.or_(qos_policies.c.project_id == request.context.project_id, qos_policies.c.shared)

    def resources(self, conn: sa.Connection, rows: Sequence[PolicyRow]) -> list[Resource]:
        """Return policies with their rules."""
        ids = [row.id for row in rows]
        tagged = tags_of(conn, ids)
        rules: dict[str, list[dict[str, Any]]] = {}
        r = bandwidth_limit_rules.c
        for part in chunks(ids):
            for rule in conn.execute(sa.select(bandwidth_limit_rules).where(r.policy_id.in_(part)).order_by(r.id)):
                shown = {**rule_values(rule), "qos_policy_id": rule.policy_id, "type": RULE_TYPE}
                rules.setdefault(rule.policy_id, []).append(shown)
        return [Resource(_values(row, rules.get(row.id, []), tagged), policy_target(row)) for row in rows]

    async def try_create(self, request: Request) -> dict[str, Any]:
        """Create policies."""
        wanted = []
        for given in self.given(request):
            convert_text(given, _FLAGS)
            project = project_of(given, request.context, self.crosses_projects(request))
            request.authorize({"project_id": project, "shared": given.get("shared", False)})
            self.check_fields(request, "create", given, {"project_id": project})
            wanted.append((self._row(project, given), given.get("tags", [])))
        for default_of, count in Counter(row["default_of"] for row, _ in wanted).items():
            if default_of is not None and count > 1:
                raise _default_exists(default_of)
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _row(self, project: str, given: Mapping[str, Any]) -> NewPolicy:
        return {
            **new_row(self.core, project, given),
            "name": given.get("name", ""),
            "shared": given.get("shared", False),
            "default_of": project if given.get("is_default") else None,
        }

    def _insert(self, conn: sa.Connection, wanted: Sequence[tuple[NewPolicy, Sequence[str]]]) -> list[Resource]:
        for row, tagged in wanted:
            if not insert_if_absent(conn, qos_policies, row):
                raise _default_exists(row["project_id"])
            if tagged:
                set_tags(conn, row["id"], tagged)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def try_update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a policy."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, _FLAGS)
        changed = await self.core.database.write(self._change, resource, given, self.core.now())
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, resource: Resource, given: dict[str, Any], now: int) -> Resource:
        project = resource.values["project_id"]
        values = {name: value for name, value in given.items() if name != "is_default"}
        if "is_default" in given:
            values["default_of"] = project if given["is_default"] else None
            if given["is_default"] and default_policy(conn, project) not in (None, resource.id):
                raise _default_exists(project)
        if resource.values["shared"] and given.get("shared") is False:
            _check_unused(conn, resource.id, project)
        revisions.update(conn, qos_policies.c.revision, resource.id, resource.values["revision_number"], values, now)
        return self.reload(conn, resource.id)

    async def try_delete(self, request: Request, id: str) -> None:
        """Delete a policy that nothing uses."""
        await self.find_to(request, "delete", id)
        await self.core.database.write(self.remove, id)

    def remove(self, conn: sa.Connection, id: str) -> None:
        """Delete a policy that nothing uses."""
        locked(conn, qos_policies, id)
        _check_unused(conn, id)
        erase(conn, qos_policies, id)  # the database deletes its rules, too


def rule_values(row: BandwidthLimitRow) -> dict[str, Any]:
    """Return a rule as the API shows it."""
    return {
        "id": row.id,
        "max_kbps": row.max_kbps,
        "max_burst_kbps": row.max_burst_kbps,
        "direction": row.direction,
    }


def _values(row: PolicyRow, rules: Sequence[dict[str, Any]], tagged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "shared": row.shared,
        "is_default": row.default_of is not None,
        "rules": rules,
    }


def _default_exists(project: str) -> Exception:
    return conflict(f"A default QoS policy exists for project {project}.", "QoSPolicyDefaultAlreadyExists")


def _check_unused(conn: sa.Connection, id: str, except_by: str | None = None) -> None:
    for kind, table in (("network", networks), ("port", ports)):
        used = sa.select(table.c.id).where(table.c.qos_policy_id == id)
        if except_by is not None:
            used = used.where(table.c.project_id != except_by)
        found = conn.execute(used.limit(1)).scalar()
        if found is not None:
            raise conflict(f"QoS Policy {id} is used by {kind} {found}.", "QosPolicyInUse")
