"""Who may use what belongs to another project: RBAC policies.

An RBAC policy shares an object with one project, or with all (`ALL`). `shared` of an object is a view of its RBAC
policies: what it says depends on the caller's project. The columns `shared` repeat whether there is an RBAC policy for
all projects; only lists that are sorted by `shared` read them, and versions up to 0.2.0.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.tables import (
    address_scopes,
    networks,
    port_security_groups,
    ports,
    qos_policies,
    rbac_policies,
    routers,
    security_groups,
    subnetpools,
    subnets,
)

P = ParamSpec("P")
T = TypeVar("T")

ALL = "*"
SHARED, EXTERNAL = "access_as_shared", "access_as_external"
NETWORK, QOS_POLICY, SECURITY_GROUP, SUBNET_POOL = "network", "qos_policy", "security_group", "subnetpool"
ADDRESS_SCOPE = "address_scope"

TABLES: Mapping[str, sa.Table] = {
    ADDRESS_SCOPE: address_scopes,
    NETWORK: networks,
    QOS_POLICY: qos_policies,
    SECURITY_GROUP: security_groups,
    SUBNET_POOL: subnetpools,
}
"""The tables of the objects that projects can share, by object type."""


class Access(NamedTuple):
    """The projects that an object is shared with; `ALL` stands for all."""

    shared_with: frozenset[str] = frozenset()
    external_to: frozenset[str] = frozenset()

    def is_shared(self, project: str | None) -> bool:
        """Return whether a project may use the object."""
        return ALL in self.shared_with or project in self.shared_with

    def is_external(self, project: str | None) -> bool:
        """Return whether a project may use the network as an external one."""
        return ALL in self.external_to or project in self.external_to


NOBODY = Access()


class Use(NamedTuple):
    """The use of an object by a project to which it does not belong, and the action of the RBAC policy that allows it.

    A write that relies on it calls `check_still_shared` in its transaction.
    """

    object_type: str
    id: str
    project: str
    action: str = SHARED


def uses(object_type: str, id: str, owner: str, project: str | None, access: Access, action: str = SHARED) -> list[Use]:
    """Return the use of an object, if the project may use it only because of an RBAC policy."""
    allowed = access.is_external(project) if action == EXTERNAL else access.is_shared(project)
    return [Use(object_type, id, project, action)] if project and project != owner and allowed else []


def check_still_shared(conn: sa.Connection, relied_on: Iterable[Use]) -> None:
    """Raise Changed if no RBAC policy allows a use any more; called after the rows are written that use the object.

    Their foreign keys wait for a transaction that removes the RBAC policy, and keep the object locked against others:
    such a transaction locks the object before it looks for uses.
    """
    wanted = dict.fromkeys(relied_on)
    for object_type in dict.fromkeys(use.object_type for use in wanted):
        of_type = [use for use in wanted if use.object_type == object_type]
        ids = list(dict.fromkeys(use.id for use in of_type))
        found = access_of(conn, object_type, ids, {use.project for use in of_type})
        for use in of_type:
            if not uses(object_type, use.id, "", use.project, found.get(use.id, NOBODY), use.action):
                raise Changed


def access_of(
    conn: sa.Connection, object_type: str, ids: Sequence[str], projects: Collection[str | None] | None = None
) -> dict[str, Access]:
    """Return who may use objects, by id; an object that nobody may use is missing.

    Only RBAC policies for `projects` are read. Without them, those for the projects of `reading_for`, which the caller
    of this transaction named; outside of `reading_for`, all. An object may be shared with thousands of projects.
    """
    asking = conn.info.get(_PROJECTS) if projects is None else projects
    statement, values = _OF_OBJECTS, {}
    if asking is not None:
        statement, values = _OF_OBJECTS_FOR, {"targets": [ALL, *(project for project in asking if project)]}
    found: dict[str, tuple[set[str], set[str]]] = {}
    for part in chunks(ids):
        for row in conn.execute(statement, {"type": object_type, "ids": part, **values}):
            found.setdefault(row.object_id, (set(), set()))[row.action == EXTERNAL].add(row.target)
    return {id: Access(frozenset(shared), frozenset(external)) for id, (shared, external) in found.items()}


_PROJECTS = "micronova.network.projects"  # in `info` of a connection


def reading_for(
    projects: Collection[str | None], read: Callable[Concatenate[sa.Connection, P], T]
) -> Callable[Concatenate[sa.Connection, P], T]:
    """Return a function that reads as `read` does, but of what is shared only what concerns these projects.

    They are passed in `info` of the connection, because `resources` of all collections ask.
    """

    def reading(conn: sa.Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        info = conn.info  # it stays, even if the connection is lost
        info[_PROJECTS] = projects
        try:
            return read(conn, *args, **kwargs)
        finally:
            del info[_PROJECTS]

    reading.__qualname__ = read.__qualname__  # statistics count by name
    return reading


_r = rbac_policies.c
_OF_OBJECTS = sa.select(_r.object_id, _r.action, _r.target).where(
    _r.object_type == sa.bindparam("type"), _r.object_id.in_(sa.bindparam("ids", expanding=True))
)
# With the actions, because the index has them before the targets.
_OF_OBJECTS_FOR = _OF_OBJECTS.where(
    _r.action.in_((SHARED, EXTERNAL)), _r.target.in_(sa.bindparam("targets", expanding=True))
)


def shared_with(
    object_type: str, id: sa.Column[str], project: str | None, actions: Iterable[str] = (SHARED,)
) -> sa.ColumnElement[bool]:
    """Return the condition that an object is shared with a project."""
    return id.in_(_shared_ids(object_type, project, actions))


def own_or_shared(object_type: str, project: str | None, actions: Iterable[str] = (SHARED,)) -> sa.ColumnElement[bool]:
    """Return the condition that an object belongs to a project or is shared with it.

    It is one list of ids and no alternative of conditions, so that indexes serve it.
    """
    c = TABLES[object_type].c
    mine = sa.select(c.id).where(c.project_id == project)
    return c.id.in_(sa.union_all(mine.correlate(None), _shared_ids(object_type, project, actions)))


def of_own_networks(table: sa.Table, project: str | None, actions: Iterable[str] = ()) -> sa.ColumnElement[bool]:
    """Return the condition that a row belongs to a project, or is on a network of it or one that is shared with it.

    `actions` are those of the RBAC policies that count; without them only own networks do. It is one list of ids, as in
    `own_or_shared`.
    """
    c = table.c
    usable = sa.select(networks.c.id).where(networks.c.project_id == project).correlate(None)
    chosen = tuple(actions)
    parts = [sa.select(c.id).where(c.project_id == project), sa.select(c.id).where(c.network_id.in_(usable))]
    if chosen:
        parts.append(sa.select(c.id).where(c.network_id.in_(_shared_ids(NETWORK, project, chosen))))
    return c.id.in_(sa.union_all(*(part.correlate(None) for part in parts)))


def _shared_ids(object_type: str, project: str | None, actions: Iterable[str]) -> sa.Select[tuple[str]]:
    return sa.select(_r.object_id).where(
        _r.object_type == object_type, _r.action.in_(tuple(actions)), _r.target.in_((ALL, project or ALL))
    )


def share_with_all(
    conn: sa.Connection, new_id: Callable[[], str], object_type: str, id: str, owner: str, action: str = SHARED
) -> int:
    """Add the RBAC policy for all projects, owned by the object's project; return how many are new, for the quota."""
    row = {
        "id": new_id(),
        "project_id": owner,
        "object_type": object_type,
        "object_id": id,
        "action": action,
        "target": ALL,
    }
    return int(insert_if_absent(conn, rbac_policies, row))


def remove_rbac_policies(conn: sa.Connection, object_type: str, id: str, *conditions: Any) -> list[tuple[str, str]]:
    """Delete the RBAC policies of an object, or some of them; return what `quotas.release_all` releases."""
    gone = conn.execute(
        rbac_policies.delete()
        .where(_r.object_type == object_type, _r.object_id == id, *conditions)
        .returning(_r.project_id)
    )
    return [(project, "rbac_policy") for project in gone.scalars()]


def stop_sharing_with_all(conn: sa.Connection, object_type: str, id: str) -> list[tuple[str, str]]:
    """Delete the RBAC policy that shares an object with all projects; return what `quotas.release_all` releases."""
    return remove_rbac_policies(conn, object_type, id, _r.action == SHARED, _r.target == ALL)


def repeat_in_column(conn: sa.Connection, object_type: str, id: str) -> None:
    """Write whether an object is shared with all projects to its column, if its table has one."""
    table = TABLES[object_type]
    if "shared" in table.c:
        everybody = sa.exists().where(
            _r.object_type == object_type, _r.object_id == id, _r.action == SHARED, _r.target == ALL
        )
        conn.execute(table.update().where(table.c.id == id).values(shared=sa.select(everybody).scalar_subquery()))


def dependent_projects(
    conn: sa.Connection, object_type: str, id: str, owner: str, action: str, target: str, instead: str | None = None
) -> list[str]:
    """Return the projects that use an object only because of one RBAC policy; `instead` is its new target, if any."""
    others = set(
        conn.execute(
            sa.select(_r.target).where(
                _r.object_type == object_type, _r.object_id == id, _r.action == action, _r.target != target
            )
        ).scalars()
    )
    if instead is not None:
        others.add(instead)
    if ALL in others:
        return []
    using = {project for select in _USERS[object_type, action](id) for project in conn.execute(select).scalars()}
    using -= {owner, "", *others}
    return sorted(using if target == ALL else using & {target})


def _port_users(id: str) -> list[sa.Select[Any]]:
    return [sa.select(ports.c.project_id).distinct().where(ports.c.network_id == id)]


def _gateway_users(id: str) -> list[sa.Select[Any]]:
    return [sa.select(routers.c.project_id).distinct().where(routers.c.external_network_id == id)]


def _policy_users(id: str) -> list[sa.Select[Any]]:
    return [sa.select(each.c.project_id).distinct().where(each.c.qos_policy_id == id) for each in (networks, ports)]


def _group_users(id: str) -> list[sa.Select[Any]]:
    of_port = sa.select(ports.c.project_id).distinct()
    joined = of_port.join(port_security_groups, port_security_groups.c.port_id == ports.c.id)
    return [joined.where(port_security_groups.c.security_group_id == id)]


def _subnet_pool_users(id: str) -> list[sa.Select[Any]]:
    return [sa.select(subnets.c.project_id).distinct().where(subnets.c.subnetpool_id == id)]


def _scope_users(id: str) -> list[sa.Select[Any]]:
    return [sa.select(subnetpools.c.project_id).distinct().where(subnetpools.c.address_scope_id == id)]


_USERS: Mapping[tuple[str, str], Callable[[str], list[sa.Select[Any]]]] = {
    (NETWORK, SHARED): _port_users,
    (NETWORK, EXTERNAL): _gateway_users,
    (QOS_POLICY, SHARED): _policy_users,
    (SECURITY_GROUP, SHARED): _group_users,
    (SUBNET_POOL, SHARED): _subnet_pool_users,
    (ADDRESS_SCOPE, SHARED): _scope_users,
}
"""Which projects use an object, by object type and action: all combinations that there are."""

ACTIONS: Mapping[str, tuple[str, ...]] = {
    each: tuple(action for kind, action in _USERS if kind == each) for each in TABLES
}
"""The actions of RBAC policies, by object type."""
