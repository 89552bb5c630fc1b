"""The address scope API. Subnet pools in one scope do not overlap, and their subnets are routed without translation.

Routers pass nothing between networks of different scopes but what is translated (`agent/plan.py`). Networks without a
scope are in one scope together.
"""

import bisect
import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network.collection import Creatable, Deletable, Resource, Updatable
from micronova.embedded.network.errors import conflict, invalid, not_found
from micronova.embedded.network.listing import Attributes
from micronova.embedded.network.quotas import charge_unchecked, release_all
from micronova.embedded.network.request_bodies import (
    Body,
    Flag,
    Name,
    Number,
    Project,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    project_of,
)
from micronova.embedded.network.row_types import AddressScopeRow
from micronova.embedded.network.rows import NewAddressScope, locked
from micronova.embedded.network.sharing import ADDRESS_SCOPE, NOBODY, access_of, remove_rbac_policies
from micronova.embedded.network.tables import address_scopes, subnetpools, subnets
from micronova.http.request import Request


class AddressScopeUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    shared: Flag | UnsetType = UNSET


class AddressScopeCreate(AddressScopeUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    ip_version: Number


class AddressScopes(Creatable[AddressScopeRow], Updatable[AddressScopeRow], Deletable[AddressScopeRow]):
    """The address scope API."""

    singular = "address_scope"
    plural = "address_scopes"
    slug = "address-scopes"
    attributes = Attributes(
        address_scopes, {name: address_scopes.c[name] for name in ("id", "project_id", "name", "ip_version")}
    )
    create_body = body_of_one_or_many("address_scope", "address_scopes", AddressScopeCreate)
    update_body = body_of_one("address_scope", AddressScopeUpdate)
    defaults = {"shared": False}
    object_type = ADDRESS_SCOPE

    def resources(self, conn: sa.Connection, rows: Sequence[AddressScopeRow]) -> list[Resource]:
        """Return address scopes."""
        access = access_of(conn, ADDRESS_SCOPE, [row.id for row in rows])
        return [
            Resource(_values(row), {"project_id": row.project_id, "shared": False}, access.get(row.id, NOBODY))
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create address scopes."""
        wanted: list[tuple[NewAddressScope, bool]] = []
        for given in self.given(request):
            convert_text(given, ("shared",), ("ip_version",))
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project, "shared": given.get("shared", False)}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            if given["ip_version"] not in (4, 6):
                raise invalid("Invalid input for ip_version: it is 4 or 6.", "HTTPBadRequest")
            row: NewAddressScope = {
                "id": self.core.new_id(),
                "project_id": project,
                "name": given.get("name", ""),
                "ip_version": given["ip_version"],
            }
            wanted.append((row, given.get("shared", False)))
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _insert(self, conn: sa.Connection, wanted: Sequence[tuple[NewAddressScope, bool]]) -> list[Resource]:
        new_rbac_policies: Counter[str] = Counter()
        for row, shared in wanted:
            conn.execute(address_scopes.insert(), row)
            if shared:
                new_rbac_policies[row["project_id"]] += self.share(conn, row["id"], row["project_id"])
        for project, count in sorted(new_rbac_policies.items()):
            charge_unchecked(conn, project, "rbac_policy", count)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update an address scope; what is shared with all stays so."""
        resource = await self.find(request, id, "update_address_scope")
        [given] = self.given(request)
        convert_text(given, ("shared",))
        self.check_fields(request, "update", given, resource.target)
        if given.get("shared") is False and resource.access is not None and resource.access.is_shared(None):
            raise invalid(
                f"Unable to update address scope {id} : Shared address scope can't be unshared.",
                "AddressScopeUpdateError",
            )
        changed = await self.core.database.write(self._change, id, given)
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, id: str, given: dict[str, Any]) -> Resource:
        row: AddressScopeRow = locked(conn, address_scopes, id)
        if "name" in given:
            conn.execute(address_scopes.update().where(address_scopes.c.id == id).values(name=given["name"]))
        if given.get("shared"):
            charge_unchecked(conn, row.project_id, "rbac_policy", self.share(conn, id, row.project_id))
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete an address scope that no subnet pool is in."""
        await self.find(request, id, "delete_address_scope")
        await self.core.database.write(_delete, id)


def _delete(conn: sa.Connection, id: str) -> None:
    locked(conn, address_scopes, id)
    used = sa.select(subnetpools.c.id).where(subnetpools.c.address_scope_id == id).limit(1)
    if conn.execute(used).first() is not None:
        raise conflict(
            f"Unable to complete operation on address scope {id}. There are one or more subnet pools in use on the "
            "address scope.",
            "AddressScopeInUse",
        )
    conn.execute(address_scopes.delete().where(address_scopes.c.id == id))
    release_all(conn, remove_rbac_policies(conn, ADDRESS_SCOPE, id))


def _values(row: AddressScopeRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "project_id": row.project_id,
        "tenant_id": row.project_id,
        "ip_version": row.ip_version,
        "shared": False,  # `collection.seen_by` sets it: whether it is shared with the caller's project
    }


# --- what is in a scope ---


def check_scope(
    conn: sa.Connection,
    request: Request,
    pool_id: str,
    before: str | None,
    scope_id: str | None,
    version: int,
    prefixes: Sequence[str],
) -> None:
    """Raise an error unless the pool may be in the scope, with these prefixes; lock the scope.

    A pool changes its scope only if all subnets of its networks are of this pool.
    """
    if scope_id is None:
        if before is not None:
            _check_affinity(conn, pool_id, version)
        return
    row = conn.execute(sa.select(address_scopes).where(address_scopes.c.id == scope_id).with_for_update()).first()
    mine = request.context.project_id
    access = access_of(conn, ADDRESS_SCOPE, [scope_id], [mine]).get(scope_id, NOBODY)
    if row is None or not (request.context.is_admin or row.project_id == mine or access.is_shared(mine)):
        raise not_found("address_scope", scope_id)
    if row.ip_version != version:
        raise invalid(
            f"Illegal subnetpool association: subnetpool {pool_id} cannot associate with address scope {scope_id} "
            f"because subnetpool ip_version is not {row.ip_version}.",
            "IllegalSubnetPoolIpVersionAssociationToAddressScope",
        )
    if before != scope_id:
        _check_affinity(conn, pool_id, version)
    own = sorted(map(_range, prefixes))  # apart from each other, as rows have the prefixes of a pool
    firsts = [first for first, _ in own]
    p = subnetpools.c
    for held in conn.execute(sa.select(p.prefixes).where(p.address_scope_id == scope_id, p.id != pool_id)).scalars():
        for first, last in map(_range, held):
            # Of those that begin before the end, the last one ends last.
            number = bisect.bisect_right(firsts, last) - 1
            if number >= 0 and own[number][1] >= first:
                raise invalid(
                    "Failed to associate address scope: subnetpools within an address scope must have unique prefixes.",
                    "AddressScopePrefixConflict",
                )


def _range(prefix: str) -> tuple[int, int]:
    """Return the first and the last address of a prefix, as numbers."""
    network = ipaddress.ip_network(prefix)
    return int(network.network_address), int(network.broadcast_address)


def check_owner(conn: sa.Connection, request: Request, pool_id: str, scope_id: str | None) -> None:
    """Raise Invalid if a pool is in a scope that another project shares: such a pool is not changed."""
    if scope_id is None or request.context.is_admin:
        return
    owner = conn.execute(sa.select(address_scopes.c.project_id).where(address_scopes.c.id == scope_id)).scalar()
    if owner != request.context.project_id:
        raise invalid(
            f"Illegal subnetpool update : subnetpool {pool_id} cannot be updated when associated with shared address "
            f"scope {scope_id}.",
            "IllegalSubnetPoolUpdate",
        )


def _check_affinity(conn: sa.Connection, pool_id: str, version: int) -> None:
    """Raise Invalid if a network would have subnets inside and outside of the scope of a pool."""
    mine = sa.select(subnets.c.network_id).where(subnets.c.subnetpool_id == pool_id).scalar_subquery()
    other = sa.or_(subnets.c.subnetpool_id.is_(None), subnets.c.subnetpool_id != pool_id)
    mixed = sa.select(subnets.c.id).where(subnets.c.network_id.in_(mine), subnets.c.ip_version == version, other)
    if conn.execute(mixed.limit(1)).first() is not None:
        raise affinity_error()


def check_subnet(conn: sa.Connection, network_id: str, version: int, pool_id: str | None) -> None:
    """Raise Invalid if a new subnet would be in another scope than those of its network and IP version."""
    wanted = None
    if pool_id is not None:
        wanted = conn.execute(sa.select(subnetpools.c.address_scope_id).where(subnetpools.c.id == pool_id)).scalar()
    s = subnets.c
    below = sa.select(subnetpools.c.address_scope_id).select_from(
        subnets.outerjoin(subnetpools, subnetpools.c.id == s.subnetpool_id)
    )
    if any(
        held != wanted
        for held in conn.execute(below.where(s.network_id == network_id, s.ip_version == version)).scalars()
    ):
        raise affinity_error()


def affinity_error() -> Exception:
    """Return the error for a network whose subnets would be in several scopes."""
    return invalid(
        "Subnets of the same address family hosted on the same network must all be in the same address scope.",
        "NetworkAddressScopeAffinityError",
    )


def scopes_of(conn: sa.Connection, network_ids: Sequence[str]) -> dict[str, Mapping[int, str]]:
    """Return the address scopes of networks, by IP version; those without one are missing."""
    found: dict[str, dict[int, str]] = {}
    s, p = subnets.c, subnetpools.c
    statement = sa.select(s.network_id, p.ip_version, p.address_scope_id).join(subnetpools, p.id == s.subnetpool_id)
    for part in chunks(network_ids):
        chosen = statement.where(s.network_id.in_(part), p.address_scope_id.is_not(None)).distinct()
        for row in conn.execute(chosen):
            found.setdefault(row.network_id, {})[row.ip_version] = row.address_scope_id
    return dict(found)
