"""The RBAC policy API: an RBAC policy shares what a project owns with another project, or with all."""

from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.address_scopes import AddressScopes
from micronova.embedded.network.collection import Collection, Creatable, Deletable, Resource, Updatable
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import Attributes
from micronova.embedded.network.networks import Networks
from micronova.embedded.network.qos_policies import QosPolicies
from micronova.embedded.network.quotas import charge_all, release
from micronova.embedded.network.request_bodies import (
    Body,
    Identifier,
    Project,
    ShortText,
    body_of_one,
    body_of_one_or_many,
    project_of,
)
from micronova.embedded.network.row_types import RbacPolicyRow
from micronova.embedded.network.rows import NewRbacPolicy, locked
from micronova.embedded.network.security_groups import SecurityGroups
from micronova.embedded.network.sharing import (
    ACTIONS,
    ALL,
    EXTERNAL,
    NETWORK,
    TABLES,
    dependent_projects,
    repeat_in_column,
)
from micronova.embedded.network.subnetpools import SubnetPools
from micronova.embedded.network.tables import networks, rbac_policies
from micronova.embedded.network.topics import network_topic
from micronova.http.request import Request

Target = Annotated[str, Meta(min_length=1, max_length=255)]
SHAREABLE: tuple[type[Collection[Any]], ...] = (Networks, QosPolicies, SecurityGroups, SubnetPools, AddressScopes)


class RbacPolicyUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    target_tenant: Target | UnsetType = UNSET


class RbacPolicyCreate(Body, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    object_type: ShortText
    object_id: Identifier
    action: ShortText
    target_tenant: Target


class RbacPolicies(Creatable[RbacPolicyRow], Updatable[RbacPolicyRow], Deletable[RbacPolicyRow]):
    """The RBAC policy API."""

    singular = "rbac_policy"
    plural = "rbac_policies"
    slug = "rbac-policies"
    attributes = Attributes(
        rbac_policies,
        {
            **{name: rbac_policies.c[name] for name in ("id", "project_id", "object_type", "object_id", "action")},
            "target_tenant": rbac_policies.c.target,
        },
    )
    create_body = body_of_one_or_many("rbac_policy", "rbac_policies", RbacPolicyCreate)
    update_body = body_of_one("rbac_policy", RbacPolicyUpdate)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._objects = {kind.object_type: kind(core) for kind in SHAREABLE}

    def resources(self, conn: sa.Connection, rows: Sequence[RbacPolicyRow]) -> list[Resource]:
        """Return RBAC policies."""
        return [Resource(_values(row), _target(row.project_id, row.target)) for row in rows]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create RBAC policies for objects of the caller's project, or of any project for admins."""
        wanted: list[tuple[NewRbacPolicy, bool]] = []
        for given in self.given(request):
            project = project_of(given, request.context, self.crosses_projects(request))
            target = _target(project, given["target_tenant"])
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            _check_action(given["object_type"], given["action"])
            may_make_external = await self._check_object(request, given)
            row: NewRbacPolicy = {
                "id": self.core.new_id(),
                "project_id": project,
                "object_type": given["object_type"],
                "object_id": given["object_id"],
                "action": given["action"],
                "target": given["target_tenant"],
            }
            wanted.append((row, may_make_external))
        return self.answer(request, await self.core.write_and_wake(self._insert, wanted))

    async def _check_object(self, request: Request, given: dict[str, Any]) -> bool:
        """Raise an error unless the caller may share the object; return whether it may make the network external."""
        found = await self._objects[given["object_type"]].find(request, given["object_id"])
        _check_owner(request, found.values["project_id"])
        if given["action"] != EXTERNAL or found.values["router:external"]:
            return False
        request.authorize(found.target, "update_network:router:external")
        return True

    def _insert(self, conn: sa.Connection, wanted: list[tuple[NewRbacPolicy, bool]]) -> list[Resource]:
        for row, may_make_external in sorted(wanted, key=lambda each: (each[0]["object_type"], each[0]["object_id"])):
            # The lock keeps the object from being deleted meanwhile, which would leave the RBAC policy behind.
            owned = locked(conn, TABLES[row["object_type"]], row["object_id"])
            if row["action"] == EXTERNAL and not owned.external:
                if not may_make_external:
                    raise Changed
                _make_external(conn, row["object_id"], self.core.now())
            if not insert_if_absent(conn, rbac_policies, row):
                raise _duplicate()
            repeat_in_column(conn, row["object_type"], row["object_id"])
        charge_all(conn, (row["project_id"] for row, _ in wanted), "rbac_policy", self.core.settings.quotas)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Change the project that an RBAC policy is for."""
        resource = await self.find(request, id, "update_rbac_policy")
        [given] = self.given(request)
        if "target_tenant" in given:
            target = _target(resource.values["project_id"], given["target_tenant"])
            self.check_fields(request, "update", given, target)
            resource = await self.core.database.write(self._change, request, id, given["target_tenant"])
        return {self.singular: self.view(request, resource)}

    def _change(self, conn: sa.Connection, request: Request, id: str, target: str) -> Resource:
        row, owned = _locked(conn, id)
        _check_owner(request, owned.project_id)
        r = rbac_policies.c
        same = sa.select(r.id).where(
            r.object_type == row.object_type, r.object_id == row.object_id, r.action == row.action, r.target == target
        )
        if target != row.target:
            if conn.execute(same).first() is not None:
                raise _duplicate()
            _check_unused(conn, row, owned, target)
            conn.execute(rbac_policies.update().where(r.id == id).values(target=target))
            repeat_in_column(conn, row.object_type, row.object_id)
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete an RBAC policy; raise Conflict if a project uses the object because of it."""
        await self.find(request, id, "delete_rbac_policy")
        await self.core.database.write(_delete, request, id)


def _values(row: RbacPolicyRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "project_id": row.project_id,
        "tenant_id": row.project_id,
        "object_type": row.object_type,
        "object_id": row.object_id,
        "action": row.action,
        "target_tenant": row.target,
    }


def _target(project: str, target: str) -> dict[str, Any]:
    """Return what policy rules compare of an RBAC policy; of its target, they need to know whether it is for all."""
    return {"project_id": project, "target_tenant": ALL if target == ALL else "a project"}


def _check_owner(request: Request, owner: str) -> None:
    """Raise Invalid unless the caller's project owns the object, or the caller is an admin.

    An RBAC policy can belong to another project than its object: that of the admin who made it.
    """
    if owner != request.context.project_id and not request.context.is_admin:
        raise invalid("Invalid input for operation: Only admins can manipulate policies on objects they do not own.")


def _check_action(object_type: str, action: str) -> None:
    if object_type not in ACTIONS:
        raise invalid(
            f"Invalid input for operation: '{object_type}' is not a valid RBAC object type. "
            f"Valid types: {', '.join(sorted(ACTIONS))}."
        )
    if action not in ACTIONS[object_type]:
        raise invalid(
            f"Invalid input for operation: Invalid action '{action}' for object type '{object_type}'. "
            f"Valid actions: {', '.join(ACTIONS[object_type])}."
        )


def _make_external(conn: sa.Connection, id: str, now: int) -> None:
    revisions.touch(conn, networks.c.revision, networks.c.id == id, now=now, external=True)
    note(conn, now, [network_topic(id)])


def _delete(conn: sa.Connection, request: Request, id: str) -> None:
    row, owned = _locked(conn, id)
    _check_owner(request, owned.project_id)
    _check_unused(conn, row, owned)
    conn.execute(rbac_policies.delete().where(rbac_policies.c.id == id))
    repeat_in_column(conn, row.object_type, row.object_id)
    release(conn, row.project_id, "rbac_policy")


def _locked(conn: sa.Connection, id: str) -> tuple[RbacPolicyRow, Any]:
    """Lock the object of an RBAC policy and then the policy, in the order in which a delete of the object locks them.

    Return the policy and the object; raise Changed if one is gone.
    """
    row = conn.execute(sa.select(rbac_policies).where(rbac_policies.c.id == id)).first()
    if row is None:
        raise Changed
    owned = locked(conn, TABLES[row.object_type], row.object_id)
    return locked(conn, rbac_policies, id), owned


def _check_unused(conn: sa.Connection, row: RbacPolicyRow, owned: Any, instead: str | None = None) -> None:
    """Raise Conflict if a project needs the RBAC policy, which is deleted or gets another target."""
    details = ""
    if row.action == EXTERNAL and row.target == ALL and owned.is_default:
        details = "It makes the default external network visible to all projects."
    elif using := dependent_projects(
        conn, row.object_type, row.object_id, owned.project_id, row.action, row.target, instead
    ):
        what = "routers" if (row.object_type, row.action) == (NETWORK, EXTERNAL) else "resources"
        details = f"Projects have {what} that need it: {', '.join(using[:5])}."
    if details:
        raise conflict(
            f"RBAC policy on object {row.object_id} cannot be removed because other objects depend on it.\n"
            f"Details: {details}",
            "RbacPolicyInUse",
        )


def _duplicate() -> Exception:
    return conflict("An RBAC policy already exists with those values.", "DuplicateRbacPolicy")
