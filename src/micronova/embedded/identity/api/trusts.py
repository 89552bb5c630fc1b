"""/v3/OS-TRUST/trusts: a user lets another act in a project with some of its roles.

A trust without a project delegates no roles.
"""

from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import Meta, Struct

from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page
from micronova.embedded.identity.api.delegation import (
    RoleRefs,
    expiry,
    is_delegated,
    named_roles,
    refuse_restricted,
)
from micronova.embedded.identity.attributes import ID
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import grants, roles, trusts
from micronova.embedded.identity.store.kinds import PROJECTS, ROLES, TRUSTS, USERS, RoleRow, TrustRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Forbidden, Invalid, NotFound


class TrustAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new trust."""

    trustor_user_id: ID
    trustee_user_id: ID
    impersonation: bool
    project_id: ID | None = None
    roles: RoleRefs = []
    expires_at: str | None = None
    remaining_uses: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    allow_redelegation: bool | None = None
    redelegation_count: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class TrustBody(Struct):
    """A body that holds a trust."""

    trust: TrustAttributes


class TrustsAPI:
    """Trusts."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{V3}/OS-TRUST/trusts"
        one = f"{path}/{{trust_id}}"
        return [
            checked_route("GET", path, self.index, "list_trusts"),
            checked_route("POST", path, self.create, "create_trust", status=201, body=TrustBody),
            checked_route("GET", one, self.show, "get_trust"),
            checked_route("DELETE", one, self.delete, "delete_trust", status=204),
            checked_route("GET", f"{one}/roles", self.roles, "list_roles_for_trust"),
            checked_route("GET", f"{one}/roles/{{role_id}}", self.role, "get_role_for_trust"),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List trusts: all, or those that a user gives or has been given."""
        named = False
        for party in ("trustor", "trustee"):
            if found := request.raw_query.get(f"{party}_user_id"):
                request.authorize({"user_id": found[-1]}, f"identity:list_trusts_for_{party}")
                named = True
        if not named:
            request.authorize()
        now = self._core.now()
        listed = await self._core.database.read(trusts.listing, request.raw_query, page(request), now)
        return collection(request, "trusts", [views.trust(request, row) for row in listed.rows], listed)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a trust. Its trustor is the caller."""
        wanted: TrustAttributes = request.body.trust
        request.authorize({"user_id": wanted.trustor_user_id})
        claims = self._core.claims(request)
        origin = claims.trust_id
        if origin is None:
            refuse_restricted(claims)
        _check_redelegation(wanted)
        expires_at = expiry(wanted.expires_at, self._core.now(), "trust")
        # A token of an application credential or a trust delegates only what it has itself, even if the user has more.
        most = None
        if is_delegated(claims):
            if (wanted.project_id or "") != request.context.project_id:
                raise Forbidden(
                    "A token of an application credential or of a trust can delegate only roles on its own project."
                )
            most = frozenset(request.context.roles)
        row, held = await self._core.write(
            _create, self._core.new_id(), wanted, most, expires_at, origin, self._core.now()
        )
        return {"trust": views.trust_with_roles(request, row, held)}

    async def show(self, request: Request, trust_id: str) -> dict[str, Any]:
        """Show a trust."""
        row, held = await self._authorize(request, trust_id)
        return {"trust": views.trust_with_roles(request, row, held)}

    async def delete(self, request: Request, trust_id: str) -> None:
        """Delete a trust and revoke the tokens that were issued for it."""
        row, _ = await self._authorize(request, trust_id, "identity:get_trust")
        request.authorize({"user_id": row["trustor_user_id"]})
        refuse_restricted(self._core.claims(request))
        await self._core.write_revoking(trusts.delete, trust_id)

    async def roles(self, request: Request, trust_id: str) -> dict[str, Any]:
        """List the roles of a trust."""
        _, held = await self._authorize(request, trust_id)
        return collection(request, "roles", [views.role(request, each) for each in held])

    async def role(self, request: Request, trust_id: str, role_id: str) -> dict[str, Any]:
        """Show a role of a trust."""
        _, held = await self._authorize(request, trust_id)
        for each in held:
            if each["id"] == role_id:
                return {"role": views.role(request, each)}
        raise ROLES.not_found(role_id)

    async def _authorize(
        self, request: Request, trust_id: str, rule: str | None = None
    ) -> tuple[TrustRow, list[RoleRow]]:
        """Return a trust to one of its parties, or to a caller that may see all trusts; to others it is not there."""
        row, held = await self._core.database.read(_get, trust_id, self._core.now())
        caller = request.context.user_id
        is_party = caller in (row["trustor_user_id"], row["trustee_user_id"])
        try:
            request.authorize({"user_id": caller if is_party else None}, rule)
        except Forbidden:
            raise TRUSTS.not_found(trust_id) from None
        return row, held


def _check_redelegation(wanted: TrustAttributes) -> None:
    """Raise an error if a trust cannot be redelegated as often as is wanted."""
    if wanted.allow_redelegation and wanted.redelegation_count != 0:
        if (wanted.redelegation_count or 0) > trusts.MAX_REDELEGATIONS:
            raise Forbidden(f"A trust can be redelegated at most {trusts.MAX_REDELEGATIONS} times.")
        if wanted.remaining_uses is not None:
            raise Invalid(
                "Invalid input for field/attribute trust.remaining_uses: a trust that can be redelegated has none."
            )


def _redelegated(wanted: TrustAttributes, origin: TrustRow, expires_at: int | None) -> tuple[int | None, int]:
    """Return when a redelegated trust expires, and how often it can be redelegated in turn; raise Forbidden."""
    left = origin["redelegation_count"] - 1
    if left < 0:
        raise Forbidden("The trust cannot be redelegated: its redelegation_count is 0.")
    if wanted.remaining_uses is not None:
        raise Forbidden("A redelegated trust has no remaining_uses.")
    if wanted.impersonation and not origin["impersonation"]:
        raise Forbidden("A trust without impersonation cannot be redelegated with it.")
    if origin["expires_at"] is not None and (expires_at or 0) > origin["expires_at"]:
        raise Forbidden("A redelegated trust cannot expire after the trust that it is made from.")
    if not wanted.allow_redelegation or wanted.redelegation_count == 0:
        left = 0
    elif wanted.redelegation_count is not None and wanted.redelegation_count != left:
        raise Forbidden(f"The redelegation_count of this redelegated trust is {left}: leave it out.")
    return origin["expires_at"] if expires_at is None else expires_at, left


def _create(
    conn: sa.Connection,
    trust_id: str,
    wanted: TrustAttributes,
    most: frozenset[str] | None,
    expires_at: int | None,
    origin_id: str | None,
    now: int,
) -> tuple[TrustRow, list[RoleRow]]:
    """Create a trust with roles that the trustor has, and of these at most the ones named in `most`, if that is given.

    A redelegated one has roles of the trust that it is made from, which the trustor of the first trust has. Without a
    project there are none.
    """
    USERS.get(conn, wanted.trustee_user_id)
    project = None if wanted.project_id is None else PROJECTS.get(conn, wanted.project_id)
    if project is not None and not wanted.roles:
        raise Forbidden("At least one role must be named: a trust delegates roles of the trustor.")
    first_trustor = wanted.trustor_user_id
    redelegations = 0
    if wanted.allow_redelegation:
        redelegations = trusts.MAX_REDELEGATIONS if wanted.redelegation_count is None else wanted.redelegation_count
    origin = None
    if origin_id is not None:
        origin = trusts.get(conn, origin_id, now)
        expires_at, redelegations = _redelegated(wanted, origin, expires_at)
        first_trustor = [origin, *trusts.origins(conn, origin, now)][-1]["trustor_user_id"]
    held = [] if project is None else grants.effective_roles(conn, first_trustor, project["id"], project)
    chosen: dict[str, RoleRow] = {}
    for ref in wanted.roles:
        found = named_roles(held, ref, "trust")
        if not found:
            raise NotFound(f"Could not find role: {ref.id or ref.name}. The trustor has no such role on the project.")
        chosen |= {row["id"]: row for row in found}
    if most is not None and not most.issuperset(row["name"] for row in chosen.values()):
        raise Forbidden("A token of an application credential or of a trust can delegate only roles that it has.")
    if origin is not None and not set(origin["role_ids"]).issuperset(chosen):
        raise Forbidden("A redelegated trust has no roles that the trust that it is made from does not have.")
    row: TrustRow = {
        "id": trust_id,
        "trustor_user_id": wanted.trustor_user_id,
        "trustee_user_id": wanted.trustee_user_id,
        "project_id": wanted.project_id,
        "impersonation": wanted.impersonation,
        "role_ids": list(chosen),
        "expires_at": expires_at,
        "remaining_uses": wanted.remaining_uses,
        "created_at": now,
        "redelegation_count": redelegations,
        "redelegated_trust_id": origin_id,
    }
    return trusts.create(conn, row, now), list(chosen.values())


def _get(conn: sa.Connection, trust_id: str, now: int) -> tuple[TrustRow, list[RoleRow]]:
    row = trusts.get(conn, trust_id, now)
    return row, roles.by_ids(conn, row["role_ids"])
