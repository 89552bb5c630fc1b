"""The security group API. Every project has a default security group, created when it is first needed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.db.locking import in_order
from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import Changed, retry
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
from micronova.embedded.network.default_security_group_rules import rules_for_new_group
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import Attributes, flags
from micronova.embedded.network.quotas import charge, charge_unchecked, release_all
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
from micronova.embedded.network.row_types import DefaultSecurityGroupRuleRow, SecurityGroupRow
from micronova.embedded.network.rows import NewSecurityGroup, NewSecurityGroupRule, delete_row, locked, new_row
from micronova.embedded.network.security_group_rules import fingerprint, security_group_rule_values
from micronova.embedded.network.sharing import NOBODY, SECURITY_GROUP, remove_rbac_policies
from micronova.embedded.network.tables import port_security_groups, security_group_rules, security_groups
from micronova.embedded.network.topics import rules_topic
from micronova.http.request import Request


class SecurityGroupUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    stateful: Flag | UnsetType = UNSET


class SecurityGroupCreate(SecurityGroupUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET


class SecurityGroups(Creatable[SecurityGroupRow], Updatable[SecurityGroupRow], Deletable[SecurityGroupRow]):
    """The security group API."""

    singular = "security_group"
    plural = "security_groups"
    slug = "security-groups"
    attributes = Attributes.standard(
        security_groups,
        "name",
        "stateful",
        special=flags(is_default=security_groups.c.default_of.is_not(None)),
    )
    create_body = body_of_one_or_many("security_group", "security_groups", SecurityGroupCreate)
    update_body = body_of_one("security_group", SecurityGroupUpdate)
    object_type = SECURITY_GROUP

    def resources(self, conn: sa.Connection, rows: Sequence[SecurityGroupRow]) -> list[Resource]:
        """Return security groups with their rules."""
        ids = [row.id for row in rows]
        tagged, access = tags_of(conn, ids), self.access_to(conn, rows)
        rules: dict[str, list[dict[str, Any]]] = {}
        of_default = {row.id for row in rows if row.default_of is not None}
        for part in chunks(ids):
            r = security_group_rules.c
            statement = sa.select(security_group_rules).where(r.security_group_id.in_(part))
            for rule in conn.execute(statement.order_by(r.created_at, r.id)):
                shown = security_group_rule_values(rule, rule.security_group_id in of_default)
                rules.setdefault(rule.security_group_id, []).append(shown)
        return [
            Resource(_values(row, rules.get(row.id, []), tagged), _target(row), access.get(row.id, NOBODY))
            for row in rows
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List security groups; the project's default one is created first, if it is missing."""
        named = request.raw_query.get("project_id") or request.raw_query.get("tenant_id")
        project = named[0] if named else request.context.project_id
        if project and request.allows({"project_id": project}, "create_default_security_group"):
            await self.default_group_of(project)
        return await super().index(request)

    async def default_group_of(self, project: str) -> str:
        """Return a project's default security group; create it if it is missing."""
        found = await self.core.database.read(default_groups, [project])
        if project not in found:
            return await retry(ensure_default_group, self.core, project)
        return found[project]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create security groups."""
        wanted = []
        for given in self.given(request):
            convert_text(given, ("stateful",))
            project = project_of(given, request.context, self.crosses_projects(request))
            request.authorize({"project_id": project})
            self.check_fields(request, "create", given, {"project_id": project})
            if given.get("name", "").lower() == "default":
                raise conflict("Default security group already exists.", "SecurityGroupDefaultAlreadyExists")
            await self.default_group_of(project)
            wanted.append((group_row(self.core, project, given), given.get("tags", [])))
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _insert(
        self, conn: sa.Connection, wanted: Sequence[tuple[NewSecurityGroup, Sequence[str]]]
    ) -> Sequence[Resource]:
        first: Counter[str] = Counter()
        for row, tagged in wanted:
            conn.execute(security_groups.insert(), row)
            first[row["project_id"]] += _insert_default_rules(conn, self.core, row)
            if tagged:
                set_tags(conn, row["id"], tagged)
        for project, count in sorted(Counter(row["project_id"] for row, _ in wanted).items()):
            charge(conn, project, "security_group", self.core.settings.quotas, count)
            charge(conn, project, "security_group_rule", self.core.settings.quotas, first[project])
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a security group."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, ("stateful",))
        old = resource.values
        renamed = given.get("name", old["name"]) != old["name"]
        if renamed and old["name"] == "default":
            raise conflict("Updating default security group not allowed.", "SecurityGroupCannotUpdateDefault")
        if renamed and given["name"].lower() == "default":
            raise conflict("Default security group already exists.", "SecurityGroupDefaultAlreadyExists")
        changed = await self.core.write_and_wake(self._change, id, old["revision_number"], given, self.core.now())
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], now: int) -> Resource:
        if "stateful" in given:
            stateful = conn.execute(sa.select(security_groups.c.stateful).where(security_groups.c.id == id)).scalar()
            if stateful != given["stateful"] and _is_used(conn, id):
                raise conflict(f"Security Group {id} in use.", "SecurityGroupInUse")
        revisions.update(conn, security_groups.c.revision, id, revision, given, now)
        note(conn, now, [rules_topic(id)])
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a security group that no port uses; only admins may delete a default one."""
        resource = await self.find_to(request, "delete", id)
        if resource.values["name"] == "default" and not request.context.is_admin:
            raise conflict(
                "Insufficient rights for removing default security group.", "SecurityGroupCannotRemoveDefault"
            )
        await self.core.write_and_wake(_delete, id, self.core.now())


def _values(row: SecurityGroupRow, rules: Sequence[dict[str, Any]], tagged: dict[str, Any]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "stateful": row.stateful,
        "shared": False,  # `collection.seen_by` sets it: whether it is shared with the caller's project
        "is_default": row.default_of is not None,
        "security_group_rules": rules,
    }


def _target(row: SecurityGroupRow) -> dict[str, Any]:
    return {"project_id": row.project_id, "shared": False, "security_group:project_id": row.project_id}


def default_groups(conn: sa.Connection, projects: Sequence[str]) -> dict[str, str]:
    """Return the default security groups of the projects that have one."""
    rows = conn.execute(_DEFAULTS, {"projects": projects})
    return {row.default_of: row.id for row in rows}


_DEFAULTS = sa.select(security_groups.c.id, security_groups.c.default_of).where(
    security_groups.c.default_of.in_(sa.bindparam("projects", expanding=True))
)


async def ensure_default_group(core: Core, project: str) -> str:
    """Return a project's default security group; create it if it is missing."""
    row = group_row(core, project, {"name": "default", "description": "Default security group"})
    row["default_of"] = project
    return await core.database.write(_insert_default, core, row)


def _insert_default(conn: sa.Connection, core: Core, row: NewSecurityGroup) -> str:
    project = row["project_id"]
    if not insert_if_absent(conn, security_groups, row):
        found = default_groups(conn, [project])
        if project not in found:
            raise Changed
        return found[project]
    first = _insert_default_rules(conn, core, row)
    charge_unchecked(conn, project, "security_group", 1)
    charge_unchecked(conn, project, "security_group_rule", first)
    return row["id"]


def _insert_default_rules(conn: sa.Connection, core: Core, group: NewSecurityGroup) -> int:
    """Insert the rules that a new security group gets; return their number."""
    defaults = rules_for_new_group(conn, group["default_of"] is not None)
    if defaults:
        conn.execute(security_group_rules.insert(), [rule_row(core, group, default) for default in defaults])
    return len(defaults)


def group_row(core: Core, project: str, given: dict[str, Any]) -> NewSecurityGroup:
    """Return the row of a new security group."""
    return {
        **new_row(core, project, given, revision=1),
        "name": given.get("name", ""),
        "stateful": given.get("stateful", True),
        "default_of": None,
    }


def rule_row(core: Core, group: NewSecurityGroup, default: DefaultSecurityGroupRuleRow) -> NewSecurityGroupRule:
    """Return the row of a new group's rule from a default rule."""
    row: NewSecurityGroupRule = {
        "id": core.new_id(),
        "project_id": group["project_id"],
        "description": default.description,
        "created_at": group["created_at"],
        "updated_at": group["created_at"],
        "revision": 0,
        "security_group_id": group["id"],
        "direction": default.direction,
        "ethertype": default.ethertype,
        "protocol": default.protocol,
        "port_range_min": default.port_range_min,
        "port_range_max": default.port_range_max,
        "remote_ip_prefix": default.remote_ip_prefix,
        "remote_group_id": group["id"] if default.remote_is_parent else default.remote_group_id,
        "fingerprint": "",
    }
    row["fingerprint"] = fingerprint(row)
    return row


def _is_used(conn: sa.Connection, id: str) -> bool:
    used = sa.select(port_security_groups.c.port_id).where(port_security_groups.c.security_group_id == id)
    return conn.execute(used.limit(1)).first() is not None


def _delete(conn: sa.Connection, id: str, now: int) -> None:
    """Delete a group with its rules, and the rules of others that name it as remote: these groups change, too."""
    r, s = security_group_rules.c, security_groups.c
    others = sa.select(r.security_group_id).where(r.remote_group_id == id, r.security_group_id != id)
    changed = {id, *conn.execute(others).scalars()}
    # All groups are locked in order, and before their rules, as when a rule is made or deleted.
    revisions.touch(conn, s.revision, in_order(s.id, s.id.in_(changed)), now=now)
    row: SecurityGroupRow = locked(conn, security_groups, id)
    if _is_used(conn, id):
        raise conflict(f"Security Group {id} in use.", "SecurityGroupInUse")
    gone = conn.execute(
        security_group_rules.delete()
        .where(in_order(r.id, sa.or_(r.security_group_id == id, r.remote_group_id == id)))
        .returning(r.project_id, r.security_group_id)
    ).all()
    if any(each.security_group_id not in changed for each in gone):  # such a rule was made meanwhile
        raise Changed
    note(conn, now, [rules_topic(each.security_group_id) for each in gone])
    freed = [(row.project_id, "security_group"), *((each.project_id, "security_group_rule") for each in gone)]
    freed += remove_rbac_policies(conn, SECURITY_GROUP, id)
    delete_row(conn, security_groups, id)
    release_all(conn, freed)
