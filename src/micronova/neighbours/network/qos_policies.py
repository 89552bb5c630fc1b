"""Quality-of-service policies: named sets of rules for how fast ports may be. A project may have a default one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET

from micronova.http.request import Request
from micronova.neighbours.network.collection import (
    Collection,
    Thing,
    chunks,
    set_tags,
    standard,
    tags_of,
)
from micronova.neighbours.network.core import insert_unless_there
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.listing import Attributes, Clause, flag
from micronova.neighbours.network.qos_use import default_policy, target
from micronova.neighbours.network.rows import bump, erase, locked, new_row
from micronova.neighbours.network.tables import bandwidth_limit_rules, networks, ports, qos_policies
from micronova.neighbours.network.wire import (
    Body,
    Flag,
    Name,
    Optional,
    Project,
    Tags,
    convert,
    one,
    one_or_many,
    owner,
)

RULE_TYPE = "bandwidth_limit"
_FLAGS = ("shared", "is_default")


class PolicyUpdate(Body, kw_only=True):
    """What may change of a policy."""

    name: Name | Optional = UNSET
    description: Name | Optional = UNSET
    shared: Flag | Optional = UNSET
    is_default: Flag | Optional = UNSET


class PolicyCreate(PolicyUpdate, kw_only=True):
    """What a new policy may be given."""

    project_id: Project | Optional = UNSET
    tenant_id: Project | Optional = UNSET
    tags: Tags | Optional = UNSET


class Policies(Collection):
    """The API of quality-of-service policies."""

    singular = "policy"
    plural = "policies"
    slug = "qos/policies"
    attributes = Attributes.standard(
        qos_policies, "name", "shared", special={"is_default": flag(qos_policies.c.default_of.is_not(None))}
    )
    create_body = one_or_many("policy", "policies", PolicyCreate)
    update_body = one("policy", PolicyUpdate)

    def scope(self, request: Request) -> Clause | None:
        """Own policies, and shared ones."""
        if self.may_name_projects(request):
            return None
        return sa.or_(qos_policies.c.project_id == request.context.project_id, qos_policies.c.shared)

    def things(self, conn: sa.Connection, rows: Sequence[Any]) -> list[Thing]:
        """Policies with their rules."""
        ids = [row.id for row in rows]
        tagged = tags_of(conn, ids)
        rules: dict[str, list[dict[str, Any]]] = {}
        r = bandwidth_limit_rules.c
        for part in chunks(ids):
            for rule in conn.execute(sa.select(bandwidth_limit_rules).where(r.policy_id.in_(part)).order_by(r.id)):
                shown = {**rule_values(rule), "qos_policy_id": rule.policy_id, "type": RULE_TYPE}
                rules.setdefault(rule.policy_id, []).append(shown)
        return [Thing(_values(row, rules.get(row.id, []), tagged), target(row)) for row in rows]

    async def create_now(self, request: Request) -> Any:
        """Create policies."""
        wanted = []
        for given in self.given(request):
            convert(given, _FLAGS)
            project = owner(given, request.context, self.may_name_projects(request))
            request.authorize({"project_id": project, "shared": given.get("shared", False)})
            self.check_fields(request, "create", given, {"project_id": project})
            wanted.append((self._row(project, given), given.get("tags", [])))
        for project, count in Counter(row["default_of"] for row, _ in wanted).items():
            if project is not None and count > 1:
                raise _default_exists(project)
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _row(self, project: str, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **new_row(self.core, project, given),
            "name": given.get("name", ""),
            "shared": given.get("shared", False),
            "default_of": project if given.get("is_default") else None,
        }

    def _insert(self, conn: sa.Connection, wanted: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> list[Thing]:
        for row, tagged in wanted:
            if not insert_unless_there(conn, qos_policies, row):
                raise _default_exists(row["project_id"])
            if tagged:
                set_tags(conn, row["id"], tagged)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update_now(self, request: Request, id: str) -> Any:
        """Change a policy."""
        thing = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert(given, _FLAGS)
        changed = await self.core.database.write(self._change, thing, given, self.core.now())
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, thing: Thing, given: dict[str, Any], now: int) -> Thing:
        project = thing.values["project_id"]
        values = {name: value for name, value in given.items() if name != "is_default"}
        if "is_default" in given:
            values["default_of"] = project if given["is_default"] else None
            if given["is_default"] and default_policy(conn, project) not in (None, thing.id):
                raise _default_exists(project)
        if thing.values["shared"] and given.get("shared") is False:
            _check_unused(conn, thing.id, project)
        bump(conn, qos_policies, thing.id, thing.values["revision_number"], now, values)
        return self.reload(conn, thing.id)

    def remove(self, conn: sa.Connection, id: str) -> None:
        """Delete a policy that nothing uses."""
        locked(conn, qos_policies, id)
        _check_unused(conn, id)
        erase(conn, qos_policies, id)  # its rules go with it


def rule_values(row: Any) -> dict[str, Any]:
    """Return a rule as clients see it."""
    return {
        "id": row.id,
        "max_kbps": row.max_kbps,
        "max_burst_kbps": row.max_burst_kbps,
        "direction": row.direction,
    }


def _values(row: Any, rules: Sequence[dict[str, Any]], tagged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        **standard(row, tagged),
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
