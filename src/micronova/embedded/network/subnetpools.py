"""The subnet pool API: prefixes from which the ranges of subnets are allocated."""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.common import revisions
from micronova.embedded.network.address_scopes import check_owner, check_scope
from micronova.embedded.network.cidrs import Network, free_prefix
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.errors import invalid, not_found
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import Attributes, Clause
from micronova.embedded.network.quotas import charge, charge_unchecked, release_all
from micronova.embedded.network.request_bodies import (
    Body,
    Flag,
    Identifier,
    Name,
    Number,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    ip_network,
    project_of,
)
from micronova.embedded.network.row_types import SubnetPoolRow
from micronova.embedded.network.rows import NewSubnetPool, SubnetPoolSizes, delete_row, locked, new_row
from micronova.embedded.network.sharing import (
    NOBODY,
    SUBNET_POOL,
    access_of,
    own_or_shared,
    remove_rbac_policies,
)
from micronova.embedded.network.tables import subnetpools, subnets
from micronova.embedded.network.topics import network_topic
from micronova.http.request import Request

Prefixes = Annotated[list[ShortText], Meta(max_length=100)]
_NUMBERS = ("min_prefixlen", "max_prefixlen", "default_prefixlen", "default_quota")


class SubnetPoolUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    name: Name | UnsetType = UNSET
    description: Name | UnsetType = UNSET
    prefixes: Prefixes | UnsetType = UNSET
    min_prefixlen: Number | UnsetType = UNSET
    max_prefixlen: Number | UnsetType = UNSET
    default_prefixlen: Number | UnsetType = UNSET
    default_quota: Number | None | UnsetType = UNSET
    is_default: Flag | UnsetType = UNSET
    address_scope_id: Identifier | None | UnsetType = UNSET


class SubnetPoolCreate(SubnetPoolUpdate, kw_only=True):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    shared: Flag | UnsetType = UNSET


class SubnetPools(Creatable[SubnetPoolRow], Updatable[SubnetPoolRow], Deletable[SubnetPoolRow]):
    """The subnet pool API."""

    singular = "subnetpool"
    plural = "subnetpools"
    slug = "subnetpools"
    attributes = Attributes.standard(
        subnetpools,
        *("name", "ip_version", "shared", "is_default", "address_scope_id", *_NUMBERS),
    )
    create_body = body_of_one_or_many("subnetpool", "subnetpools", SubnetPoolCreate)
    update_body = body_of_one("subnetpool", SubnetPoolUpdate)
    defaults = {"shared": False, "is_default": False}
    object_type = SUBNET_POOL

    def visible_rows(self, request: Request) -> Clause | None:
        """Limit callers to their own and shared pools; service users, too, see no others."""
        if request.context.is_admin:
            return None
        return own_or_shared(SUBNET_POOL, request.context.project_id)

    def resources(self, conn: sa.Connection, rows: Sequence[SubnetPoolRow]) -> list[Resource]:
        """Return subnet pools."""
        tagged, access = tags_of(conn, [row.id for row in rows]), self.access_to(conn, rows)
        return [
            Resource(
                _values(row, tagged),
                {"project_id": row.project_id, "shared": False},
                access.get(row.id, NOBODY),
            )
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create subnet pools."""
        wanted = []
        for given in self.given(request):
            convert_text(given, ("shared", "is_default"), _NUMBERS)
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {"project_id": project, "shared": given.get("shared", False)}
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            if not given.get("name"):
                raise invalid("Invalid input for name: a subnet pool needs a name.", "HTTPBadRequest")
            row: NewSubnetPool = {
                **new_row(self.core, project, given),
                "name": given["name"],
                "shared": given.get("shared", False),
                "is_default": given.get("is_default", False),
                "default_quota": given.get("default_quota"),
                "address_scope_id": given.get("address_scope_id"),
                **_sizes(given),
            }
            wanted.append((row, given.get("tags", [])))
        return self.answer(request, await self.core.database.write(self._insert, request, wanted))

    def _insert(
        self, conn: sa.Connection, request: Request, wanted: list[tuple[NewSubnetPool, list[str]]]
    ) -> list[Resource]:
        new_rbac_policies: Counter[str] = Counter()
        for row, tagged in wanted:
            if row["is_default"]:
                _check_only_default(conn, row["ip_version"], row["id"])
            check_scope(conn, request, row["id"], None, row["address_scope_id"], row["ip_version"], row["prefixes"])
            conn.execute(subnetpools.insert(), row)
            if tagged:
                set_tags(conn, row["id"], tagged)
            if row["shared"]:
                new_rbac_policies[row["project_id"]] += self.share(conn, row["id"], row["project_id"])
        for project, count in sorted(Counter(row["project_id"] for row, _ in wanted).items()):
            charge_unchecked(conn, project, "rbac_policy", new_rbac_policies[project])
            charge(conn, project, "subnetpool", self.core.settings.quotas, count)
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a subnet pool; prefixes can only be added."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, ("is_default",), _NUMBERS)
        self.check_fields(request, "update", given, resource.target)
        old = resource.values
        sizes = _sizes({**{name: old[name] for name in ("prefixes", *_NUMBERS[:3])}, **given})
        if sizes["ip_version"] != old["ip_version"]:
            raise invalid("Cannot mix IPv4 and IPv6 prefixes in a subnet pool.", "PrefixVersionMismatch")
        for prefix in old["prefixes"]:
            inner = ipaddress.ip_network(prefix)
            if not any(inner.subnet_of(ipaddress.ip_network(p)) for p in sizes["prefixes"]):  # type: ignore[arg-type]
                raise invalid(
                    "Illegal update to prefixes: Existing prefixes must be a subset of the new prefixes.",
                    "IllegalSubnetPoolPrefixUpdate",
                )
        changed = await self.core.write_and_wake(self._change, request, resource, {**given, **sizes})
        return {self.singular: self.view(request, changed)}

    def _change(self, conn: sa.Connection, request: Request, resource: Resource, values: dict[str, Any]) -> Resource:
        id, before, now = resource.id, resource.values["address_scope_id"], self.core.now()
        after = values.get("address_scope_id", before)
        check_owner(conn, request, id, before)
        check_scope(conn, request, id, before, after, values["ip_version"], values["prefixes"])
        if before != after:
            below = sa.select(subnets.c.network_id).where(subnets.c.subnetpool_id == id).distinct()
            note(conn, now, map(network_topic, conn.execute(below).scalars()))
        if values.get("is_default"):
            _check_only_default(conn, values["ip_version"], id)
        revisions.update(conn, subnetpools.c.revision, id, resource.values["revision_number"], values, now)
        return self.reload(conn, id)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a subnet pool that no subnet uses."""
        await self.find_to(request, "delete", id)
        await self.core.database.write(self._delete, id)

    def _delete(self, conn: sa.Connection, id: str) -> None:
        """Delete a subnet pool; raise Conflict if a subnet uses it."""
        row: SubnetPoolRow = locked(conn, subnetpools, id)
        if conn.execute(sa.select(subnets.c.id).where(subnets.c.subnetpool_id == id).limit(1)).first() is not None:
            raise invalid(
                "Unable to delete subnet pool: Subnet pool has existing allocations.", "SubnetPoolDeleteError"
            )
        delete_row(conn, subnetpools, id)
        release_all(conn, [(row.project_id, "subnetpool"), *remove_rbac_policies(conn, SUBNET_POOL, id)])


def take_prefix(
    conn: sa.Connection, given: dict[str, Any], version: int, caller: str, any_pool: bool
) -> tuple[str, Network]:
    """Allocate the range of a new subnet from its pool; concurrent allocations wait for the lock."""
    pool = _choose(conn, given, version, caller, any_pool)
    held = list(conn.execute(sa.select(subnets.c.cidr).where(subnets.c.subnetpool_id == pool.id)).scalars())
    taken = [ipaddress.ip_network(cidr) for cidr in held]
    if given.get("cidr"):
        cidr = ip_network(given["cidr"], "cidr")
        inside = any(
            cidr.version == pool.ip_version and cidr.subnet_of(ipaddress.ip_network(prefix))  # type: ignore[arg-type]
            for prefix in pool.prefixes
        )
        if not inside or any(each.overlaps(cidr) for each in taken):
            raise invalid(
                "Failed to allocate subnet: Cannot allocate requested subnet from the available set of prefixes.",
                "SubnetAllocationError",
            )
        length = cidr.prefixlen
    else:
        length = given.get("prefixlen", pool.default_prefixlen)
        cidr = None
    if length < pool.min_prefixlen:
        raise invalid(
            f"Unable to allocate subnet with prefix length {length}, minimum allowed prefix is {pool.min_prefixlen}.",
            "MinPrefixSubnetAllocationError",
        )
    if length > pool.max_prefixlen:
        raise invalid(
            f"Unable to allocate subnet with prefix length {length}, maximum allowed prefix is {pool.max_prefixlen}.",
            "MaxPrefixSubnetAllocationError",
        )
    found = cidr or free_prefix(pool.prefixes, taken, length)
    if found is None:
        raise invalid(
            f"Failed to allocate subnet: Insufficient prefix space to allocate subnet size /{length}.",
            "SubnetAllocationError",
        )
    return pool.id, found


def _choose(conn: sa.Connection, given: dict[str, Any], version: int, caller: str, any_pool: bool) -> Any:
    statement = sa.select(subnetpools).with_for_update()
    if given.get("subnetpool_id"):
        pool = conn.execute(statement.where(subnetpools.c.id == given["subnetpool_id"])).first()
        access = access_of(conn, SUBNET_POOL, [given["subnetpool_id"]], [caller]).get(given["subnetpool_id"], NOBODY)
        if pool is None or not (any_pool or access.is_shared(caller) or pool.project_id == caller):
            raise not_found("subnetpool", given["subnetpool_id"])
    else:
        default = statement.where(subnetpools.c.is_default, subnetpools.c.ip_version == version)
        pool = conn.execute(default).first()
        if pool is None:
            raise invalid(f"No default subnetpool found for IPv{version}.")
    if "ip_version" in given and pool.ip_version != version:
        raise invalid(f"Cannot allocate IPv{version} subnet from an IPv{pool.ip_version} subnet pool.", "BadRequest")
    return pool


def _values(row: SubnetPoolRow, tagged: dict[str, list[str]]) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "prefixes": row.prefixes,
        "ip_version": row.ip_version,
        "min_prefixlen": row.min_prefixlen,
        "max_prefixlen": row.max_prefixlen,
        "default_prefixlen": row.default_prefixlen,
        "default_quota": row.default_quota,
        "shared": False,  # `collection.seen_by` sets it: whether it is shared with the caller's project
        "is_default": row.is_default,
        "address_scope_id": row.address_scope_id,
    }


def _sizes(given: dict[str, Any]) -> SubnetPoolSizes:
    """Check the prefixes of a pool, and the minimum and maximum length of its ranges."""
    prefixes = [ip_network(text, "prefixes") for text in given.get("prefixes", ())]
    if not prefixes:
        raise invalid("Empty subnet pool prefix list.", "EmptySubnetPoolPrefixList")
    version = prefixes[0].version
    if any(prefix.version != version for prefix in prefixes):
        raise invalid("Cannot mix IPv4 and IPv6 prefixes in a subnet pool.", "PrefixVersionMismatch")
    most = 32 if version == 4 else 128
    least = given.get("min_prefixlen", 8 if version == 4 else 64)
    largest = given.get("max_prefixlen", most)
    default = given.get("default_prefixlen", least)
    if not 0 < least <= largest <= most or not least <= default <= largest:
        raise invalid(
            f"Illegal prefix bounds: min_prefixlen={least}, default_prefixlen={default}, max_prefixlen={largest}.",
            "IllegalSubnetPoolPrefixBounds",
        )
    return {
        "prefixes": [str(prefix) for prefix in ipaddress.collapse_addresses(prefixes)],  # type: ignore[type-var]
        "ip_version": version,
        "min_prefixlen": least,
        "max_prefixlen": largest,
        "default_prefixlen": default,
    }


def _check_only_default(conn: sa.Connection, version: int, id: str) -> None:
    other = sa.select(subnetpools.c.id).where(
        subnetpools.c.is_default, subnetpools.c.ip_version == version, subnetpools.c.id != id
    )
    found = conn.execute(other).scalar()
    if found:
        raise invalid(f"A default subnetpool for this IP family has already been set: {found}.")
