"""The QoS policy API: named sets of rules. A project may have a default policy."""

import itertools
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
from micronova.embedded.network.listing import Attributes, flags
from micronova.embedded.network.qos_use import default_qos_policy, qos_policy_target
from micronova.embedded.network.quotas import charge_unchecked, release_all
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
from micronova.embedded.network.row_types import BandwidthLimitRow, DscpMarkingRow, MinimumBandwidthRow, QosPolicyRow
from micronova.embedded.network.rows import NewQosPolicy, delete_row, locked, new_row
from micronova.embedded.network.sharing import (
    ALL,
    NOBODY,
    QOS_POLICY,
    SHARED,
    dependent_projects,
    remove_rbac_policies,
    stop_sharing_with_all,
)
from micronova.embedded.network.tables import (
    bandwidth_limit_rules,
    dscp_marking_rules,
    minimum_bandwidth_rules,
    networks,
    ports,
    qos_policies,
)
from micronova.http.request import Request

# The tables of rules, and the columns that the API shows, by type.
QOS_RULE_TABLES: Mapping[str, tuple[sa.Table, tuple[str, ...]]] = {
    "bandwidth_limit": (bandwidth_limit_rules, ("id", "max_kbps", "max_burst_kbps", "direction")),
    "dscp_marking": (dscp_marking_rules, ("id", "dscp_mark")),
    "minimum_bandwidth": (minimum_bandwidth_rules, ("id", "min_kbps", "direction")),
}
_FLAGS = ("shared", "is_default")


class QosPolicyUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    shared: Flag | UnsetType = UNSET
    is_default: Flag | UnsetType = UNSET


class QosPolicyCreate(QosPolicyUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET


class QosPolicies(Creatable[QosPolicyRow], Updatable[QosPolicyRow], Deletable[QosPolicyRow]):
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
    create_body = body_of_one_or_many("policy", "policies", QosPolicyCreate)
    update_body = body_of_one("policy", QosPolicyUpdate)
    object_type = QOS_POLICY

    def resources(self, conn: sa.Connection, rows: Sequence[QosPolicyRow]) -> list[Resource]:
        """Return policies with their rules."""
        ids = [row.id for row in rows]
        tagged, access = tags_of(conn, ids), self.access_to(conn, rows)
        rules: dict[str, list[dict[str, Any]]] = {}
        for (kind, (table, _)), part in itertools.product(QOS_RULE_TABLES.items(), chunks(ids)):
            r = table.c
            for rule in conn.execute(sa.select(table).where(r.policy_id.in_(part)).order_by(r.id)):
                shown = {**qos_rule_values(kind, rule), "qos_policy_id": rule.policy_id, "type": kind}
                rules.setdefault(rule.policy_id, []).append(shown)
        return [
            Resource(_values(row, rules.get(row.id, []), tagged), qos_policy_target(row), access.get(row.id, NOBODY))
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
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

    def _row(self, project: str, given: Mapping[str, Any]) -> NewQosPolicy:
        return {
            **new_row(self.core, project, given),
            "name": given.get("name", ""),
            "shared": given.get("shared", False),
            "default_of": project if given.get("is_default") else None,
        }

    def _insert(self, conn: sa.Connection, wanted: Sequence[tuple[NewQosPolicy, Sequence[str]]]) -> list[Resource]:
        new_rbac_policies: Counter[str] = Counter()
        for row, tagged in wanted:
            if not insert_if_absent(conn, qos_policies, row):
                raise _default_exists(row["project_id"])
            if tagged:
                set_tags(conn, row["id"], tagged)
            if row["shared"]:
                new_rbac_policies[row["project_id"]] += self.share(conn, row["id"], row["project_id"])
        for project, count in sorted(new_rbac_policies.items()):
            charge_unchecked(conn, project, "rbac_policy", count)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
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
            if given["is_default"] and default_qos_policy(conn, project) not in (None, resource.id):
                raise _default_exists(project)
        if given.get("shared") is False:
            locked(conn, qos_policies, resource.id)
            _check_unshared(conn, resource.id, project)
        revisions.update(conn, qos_policies.c.revision, resource.id, resource.values["revision_number"], values, now)
        if given.get("shared"):
            charge_unchecked(conn, project, "rbac_policy", self.share(conn, resource.id, project))
        elif given.get("shared") is False:
            release_all(conn, stop_sharing_with_all(conn, QOS_POLICY, resource.id))
        return self.reload(conn, resource.id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a policy that nothing uses."""
        await self.find_to(request, "delete", id)
        await self.core.database.write(self._delete, id)

    def _delete(self, conn: sa.Connection, id: str) -> None:
        """Delete a policy that nothing uses."""
        locked(conn, qos_policies, id)
        _check_unused(conn, id)
        delete_row(conn, qos_policies, id)  # the database deletes its rules, too
        release_all(conn, remove_rbac_policies(conn, QOS_POLICY, id))


def qos_rule_values(rule_type: str, row: BandwidthLimitRow | DscpMarkingRow | MinimumBandwidthRow) -> dict[str, Any]:
    """Return a rule of a type as the API shows it."""
    return {name: getattr(row, name) for name in QOS_RULE_TABLES[rule_type][1]}


def _values(row: QosPolicyRow, rules: Sequence[dict[str, Any]], tagged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "shared": False,  # `collection.seen_by` sets it: whether it is shared with the caller's project
        "is_default": row.default_of is not None,
        "rules": rules,
    }


def _default_exists(project: str) -> Exception:
    return conflict(f"A default QoS policy exists for project {project}.", "QoSPolicyDefaultAlreadyExists")


def _check_unshared(conn: sa.Connection, id: str, owner: str) -> None:
    if using := dependent_projects(conn, QOS_POLICY, id, owner, SHARED, ALL):
        raise conflict(f"QoS Policy {id} is used by project {using[0]}.", "QosPolicyInUse")


def _check_unused(conn: sa.Connection, id: str) -> None:
    for kind, table in (("network", networks), ("port", ports)):
        used = sa.select(table.c.id).where(table.c.qos_policy_id == id)
        found = conn.execute(used.limit(1)).scalar()
        if found is not None:
            raise conflict(f"QoS Policy {id} is used by {kind} {found}.", "QosPolicyInUse")
