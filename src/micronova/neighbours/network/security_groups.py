"""Security groups: named sets of rules. Every project has a default one, made when it is first needed."""

from collections import Counter
from collections.abc import Sequence
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
from micronova.neighbours.network.core import Changed, Core, again, insert_unless_there
from micronova.neighbours.network.errors import conflict
from micronova.neighbours.network.listing import Attributes, flag
from micronova.neighbours.network.quotas import add, charge, give_back_all
from micronova.neighbours.network.rows import bump, erase, locked, new_row
from micronova.neighbours.network.rules import fingerprint, rule_values
from micronova.neighbours.network.tables import port_security_groups, security_group_rules, security_groups
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
    refuse_nul,
)


class SecurityGroupUpdate(Body, kw_only=True):
    """What may change of a security group."""

    name: Name | Optional = UNSET
    description: Name | Optional = UNSET
    stateful: Flag | Optional = UNSET


class SecurityGroupCreate(SecurityGroupUpdate, kw_only=True):
    """What a new security group may be given."""

    project_id: Project | Optional = UNSET
    tenant_id: Project | Optional = UNSET
    tags: Tags | Optional = UNSET


class SecurityGroups(Collection):
    """The security group API."""

    singular = "security_group"
    plural = "security_groups"
    slug = "security-groups"
    attributes = Attributes.standard(
        security_groups,
        "name",
        "stateful",
        special={"shared": flag(sa.false()), "is_default": flag(security_groups.c.default_of.is_not(None))},
    )
    create_body = one_or_many("security_group", "security_groups", SecurityGroupCreate)
    update_body = one("security_group", SecurityGroupUpdate)

    def things(self, conn: sa.Connection, rows: Sequence[Any]) -> list[Thing]:
        """Security groups with their rules."""
        ids = [row.id for row in rows]
        tagged = tags_of(conn, ids)
        rules: dict[str, list[dict[str, Any]]] = {}
        of_default = {row.id for row in rows if row.default_of is not None}
        for part in chunks(ids):
            r = security_group_rules.c
            statement = sa.select(security_group_rules).where(r.security_group_id.in_(part))
            for rule in conn.execute(statement.order_by(r.created_at, r.id)):
                shown = rule_values(rule, rule.security_group_id in of_default)
                rules.setdefault(rule.security_group_id, []).append(shown)
        return [Thing(_values(row, rules.get(row.id, []), tagged), _target(row)) for row in rows]

    async def index(self, request: Request) -> dict[str, Any]:
        """GET of the collection: a project that looks for its groups finds at least the default one."""
        named = request.raw_query.get("project_id") or request.raw_query.get("tenant_id")
        project = named[0] if named else request.context.project_id
        refuse_nul(project, "project_id")
        if project and request.allows("create_default_security_group", {"project_id": project}):
            await self.default_of(project)
        return await super().index(request)

    async def default_of(self, project: str) -> str:
        """Return a project's default group, made now if need be."""
        found = await self.core.database.read(default_groups, [project])
        if project not in found:
            return await again(ensure_default, self.core, project)
        return found[project]

    async def create_now(self, request: Request) -> Any:
        """Create security groups."""
        wanted = []
        for given in self.given(request):
            convert(given, ("stateful",))
            project = owner(given, request.context, self.may_name_projects(request))
            request.authorize({"project_id": project})
            self.check_fields(request, "create", given, {"project_id": project})
            if given.get("name", "").lower() == "default":
                raise conflict("Default security group already exists.", "SecurityGroupDefaultAlreadyExists")
            await self.default_of(project)
            wanted.append((group_row(self.core, project, given), given.get("tags", [])))
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _insert(self, conn: sa.Connection, wanted: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> Sequence[Thing]:
        for row, tagged in wanted:
            conn.execute(security_groups.insert(), row)
            rules = [rule_row(self.core, row, "egress", ethertype) for ethertype in ("IPv4", "IPv6")]
            conn.execute(security_group_rules.insert(), rules)
            if tagged:
                set_tags(conn, row["id"], tagged)
        for project, count in sorted(Counter(row["project_id"] for row, _ in wanted).items()):
            charge(conn, project, "security_group", self.core.settings.quotas, count)
            charge(conn, project, "security_group_rule", self.core.settings.quotas, 2 * count)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update_now(self, request: Request, id: str) -> Any:
        """Change a security group."""
        thing = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert(given, ("stateful",))
        old = thing.values
        renamed = given.get("name", old["name"]) != old["name"]
        if renamed and old["name"] == "default":
            raise conflict("Updating default security group not allowed.", "SecurityGroupCannotUpdateDefault")
        if renamed and given["name"].lower() == "default":
            raise conflict("Default security group already exists.", "SecurityGroupDefaultAlreadyExists")
        changed = await self.core.database.write(self._change, id, old["revision_number"], given, self.core.now())
        return {self.singular: self.view(request, changed)}

    def _change(
        self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], now: int
    ) -> Thing:
        if "stateful" in given:
            stateful = conn.execute(sa.select(security_groups.c.stateful).where(security_groups.c.id == id)).scalar()
            if stateful != given["stateful"] and _is_used(conn, id):
                raise conflict(f"Security Group {id} in use.", "SecurityGroupInUse")
        bump(conn, security_groups, id, revision, now, given)
        return self.reload(conn, id)

    async def delete_now(self, request: Request, id: str) -> None:
        """Delete a security group that no port has; only admins may delete a default one."""
        thing = await self.find_to(request, "delete", id)
        if thing.values["name"] == "default" and not request.allows("context_is_admin"):
            raise conflict(
                "Insufficient rights for removing default security group.", "SecurityGroupCannotRemoveDefault"
            )
        await self.core.database.write(_delete, id)


def _values(row: Any, rules: Sequence[dict[str, Any]], tagged: dict[str, Any]) -> dict[str, Any]:
    return {
        **standard(row, tagged),
        "name": row.name,
        "stateful": row.stateful,
        "shared": False,
        "is_default": row.default_of is not None,
        "security_group_rules": rules,
    }


def _target(row: Any) -> dict[str, Any]:
    return {"project_id": row.project_id, "shared": False, "security_group:project_id": row.project_id}


def default_groups(conn: sa.Connection, projects: Sequence[str]) -> dict[str, str]:
    """Return the default groups of those of the projects that have one."""
    rows = conn.execute(_DEFAULTS, {"projects": projects})
    return {row.default_of: row.id for row in rows}


_DEFAULTS = sa.select(security_groups.c.id, security_groups.c.default_of).where(
    security_groups.c.default_of.in_(sa.bindparam("projects", expanding=True))
)


async def ensure_default(core: Core, project: str) -> str:
    """Make a project's default group with its usual rules: all out, in from its own members."""
    row = group_row(core, project, {"name": "default", "description": "Default security group"})
    row["default_of"] = project
    rules = [
        *(rule_row(core, row, "egress", ethertype) for ethertype in ("IPv4", "IPv6")),
        *(rule_row(core, row, "ingress", ethertype, row["id"]) for ethertype in ("IPv4", "IPv6")),
    ]
    return await core.database.write(_insert_default, row, rules)


def _insert_default(conn: sa.Connection, row: dict[str, Any], rules: list[dict[str, Any]]) -> str:
    project = row["project_id"]
    if not insert_unless_there(conn, security_groups, row):
        found = default_groups(conn, [project])
        if project not in found:
            raise Changed
        return found[project]
    conn.execute(security_group_rules.insert(), rules)
    add(conn, project, "security_group", 1)
    add(conn, project, "security_group_rule", len(rules))
    return str(row["id"])


def group_row(core: Core, project: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a new group."""
    return {
        **new_row(core, project, given, revision=1),
        "name": given.get("name", ""),
        "stateful": given.get("stateful", True),
        "default_of": None,
    }


def rule_row(
    core: Core, group: dict[str, Any], direction: str, ethertype: str, remote_group: str | None = None
) -> dict[str, Any]:
    """Return the row of a rule for everything in one direction."""
    row = {
        "id": core.new_id(),
        "project_id": group["project_id"],
        "description": "",
        "created_at": group["created_at"],
        "updated_at": group["created_at"],
        "revision": 0,
        "security_group_id": group["id"],
        "direction": direction,
        "ethertype": ethertype,
        "protocol": None,
        "port_range_min": None,
        "port_range_max": None,
        "remote_ip_prefix": None,
        "remote_group_id": remote_group,
    }
    row["fingerprint"] = fingerprint(row)
    return row


def _is_used(conn: sa.Connection, id: str) -> bool:
    used = sa.select(port_security_groups.c.port_id).where(port_security_groups.c.security_group_id == id)
    return conn.execute(used.limit(1)).first() is not None


def _delete(conn: sa.Connection, id: str) -> None:
    row = locked(conn, security_groups, id)
    if _is_used(conn, id):
        raise conflict(f"Security Group {id} in use.", "SecurityGroupInUse")
    r = security_group_rules.c
    gone = conn.execute(
        security_group_rules.delete()
        .where(sa.or_(r.security_group_id == id, r.remote_group_id == id))
        .returning(r.project_id)
    ).scalars()
    freed = [(row.project_id, "security_group"), *((project, "security_group_rule") for project in gone)]
    erase(conn, security_groups, id)
    give_back_all(conn, freed)
