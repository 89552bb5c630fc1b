"""What trusts, application credentials and credentials share: delegated roles, expiry, and who may make them."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from micronova.embedded.identity.attributes import ID, Name
from micronova.embedded.identity.store.kinds import RoleRow
from micronova.http.paging import parse_iso
from micronova.http.tokens import Claims
from micronova.objects.errors import Forbidden, Invalid


class RoleRef(Struct, forbid_unknown_fields=True):
    """A role, by id or by name."""

    id: ID | None = None
    name: Name | None = None


RoleRefs: TypeAlias = Annotated[list[RoleRef], Meta(max_length=200)]


def named_roles(held: Sequence[RoleRow], ref: RoleRef, noun: str) -> list[RoleRow]:
    """Return those of the roles that a reference names; `noun` is the resource of the body."""
    if ref.id is None and ref.name is None:
        raise Invalid(f"Invalid input for field/attribute {noun}.roles: name each by id or by name.")
    return [row for row in held if (row["id"] == ref.id if ref.id is not None else row["name"] == ref.name)]


def expiry(text: str | None, now: int, noun: str) -> int | None:
    """Return the time at which a resource expires, None if it does not; `noun` is the resource of the body."""
    if text is None:
        return None
    try:
        expires_at = parse_iso(text)
    except ValueError:
        raise Invalid(
            f"Invalid input for field/attribute {noun}.expires_at: write a time like 2030-01-31T12:00:00.000000Z."
        ) from None
    if expires_at <= now:
        raise Invalid(f"Invalid input for field/attribute {noun}.expires_at: it must be in the future.")
    return expires_at


def is_delegated(claims: Claims) -> bool:
    """Return whether a token is one of an application credential or of a trust."""
    return claims.application_credential_id is not None or claims.trust_id is not None


def refuse_delegated(claims: Claims) -> None:
    """Raise Forbidden for a token of an application credential or a trust.

    A secret is good for all that its user may do, and an application credential or a trust for less.
    """
    if is_delegated(claims):
        raise Forbidden("A token of an application credential or of a trust gives no access to credentials.")


def refuse_restricted(claims: Claims) -> None:
    """Raise Forbidden for a token that may not be the source of further rights.

    That is one of an application credential that is restricted or has access rules, or of a trust.
    """
    refuse_trust(claims)
    if claims.restricted or claims.access_rules is not None:
        raise Forbidden(
            "An application credential that is restricted or has access rules may not make or delete application "
            "credentials and trusts, nor delete access rules."
        )


def refuse_trust(claims: Claims) -> None:
    """Raise Forbidden for a token of a trust: the trustor delegates roles on a project, not its secrets."""
    if claims.trust_id is not None:
        raise Forbidden(
            "A token for a trust cannot read or change application credentials and access rules, nor delete trusts."
        )
