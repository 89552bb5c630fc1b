"""The attributes of identity resources as clients may send them, and the reading of them.

Most identity resources take attributes that nobody declared and give them back (`extra`). So a body is a dictionary
first: the declared attributes are converted to a struct, which checks them, and the rest is kept as it is.
"""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from micronova.objects.errors import Invalid

_VISIBLE = r"\S"  # something that is not white space

ID = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=255, pattern=_VISIBLE)]
ShortName = Annotated[str, Meta(min_length=1, max_length=64, pattern=_VISIBLE)]
RegionID = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"\A[^/]+\Z")]
Tag = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"\A[^,/]*\Z")]
Tags = Annotated[list[Tag], Meta(max_length=80)]
URL = Annotated[str, Meta(max_length=2048, pattern=r"\A(\$\(public_url\)s|[a-zA-Z0-9+.-]+:)\S*\Z")]
Password = Annotated[str, Meta(min_length=1, max_length=4096)]

S = TypeVar("S", bound=Struct)

# What the service says about a resource; a client cannot set it by sending it as an extra attribute.
_RESERVED = frozenset({"id", "links", "extra", "created_at", "is_domain", "password_expires_at", "password_hash"})


class ResourceOptions(Struct, forbid_unknown_fields=True):
    """Options of domains, projects and roles; null takes an option away."""

    immutable: bool | None | UnsetType = UNSET


class UserOptions(Struct, forbid_unknown_fields=True):
    """Options of users. Those about several factors are refused rather than accepted and not enforced."""

    ignore_lockout_failure_attempts: bool | None | UnsetType = UNSET
    lock_password: bool | None | UnsetType = UNSET
    # About expiries that this service does not have: kept, without an effect.
    ignore_change_password_upon_first_use: bool | None | UnsetType = UNSET
    ignore_password_expiry: bool | None | UnsetType = UNSET
    ignore_user_inactivity: bool | None | UnsetType = UNSET


class DomainAttributes(Struct):
    """A domain to make."""

    name: ShortName
    description: str | None = ""
    enabled: bool = True
    tags: Tags = []
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class DomainChanges(Struct):
    """What may change in a domain."""

    name: ShortName | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class ProjectAttributes(Struct):
    """A project to make."""

    name: ShortName
    description: str | None = ""
    enabled: bool = True
    domain_id: ID | None = None
    parent_id: ID | None = None
    is_domain: bool = False
    tags: Tags = []
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class ProjectChanges(Struct):
    """What may change in a project."""

    name: ShortName | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    parent_id: ID | None | UnsetType = UNSET
    is_domain: bool | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class UserAttributes(Struct):
    """A user to make."""

    name: Name
    domain_id: ID | None = None
    enabled: bool = True
    default_project_id: ID | None = None
    password: Password | None = None
    options: UserOptions = msgspec.field(default_factory=UserOptions)


class UserChanges(Struct):
    """What an administrator may change in a user."""

    name: Name | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    default_project_id: ID | None | UnsetType = UNSET
    password: Password | None | UnsetType = UNSET
    options: UserOptions | UnsetType = UNSET


class GroupAttributes(Struct):
    """A group to make."""

    name: ShortName
    domain_id: ID | None = None
    description: str | None = ""


class GroupChanges(Struct):
    """What may change in a group."""

    name: ShortName | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET


class RoleAttributes(Struct):
    """A role to make."""

    name: Name
    domain_id: ID | None = None
    description: str | None = None
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class RoleChanges(Struct):
    """What may change in a role."""

    name: Name | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class RegionAttributes(Struct):
    """A region to make."""

    id: RegionID | None = None
    description: str | None = ""
    parent_region_id: RegionID | None = None


class RegionChanges(Struct):
    """What may change in a region."""

    id: RegionID | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    parent_region_id: RegionID | None | UnsetType = UNSET


class ServiceAttributes(Struct):
    """A service of the catalog to make."""

    type: Name
    name: Annotated[str, Meta(max_length=255)] | None = None
    description: str | None = None
    enabled: bool = True


class ServiceChanges(Struct):
    """What may change in a service."""

    type: Name | UnsetType = UNSET
    name: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


Interface = Annotated[str, Meta(pattern=r"\A(public|internal|admin)\Z")]


class EndpointAttributes(Struct):
    """An endpoint to make; `region` is the older name of `region_id`, and makes the region."""

    service_id: ID
    interface: Interface
    url: URL
    region_id: RegionID | None = None
    region: RegionID | None = None
    enabled: bool = True


class EndpointChanges(Struct):
    """What may change in an endpoint."""

    service_id: ID | UnsetType = UNSET
    interface: Interface | UnsetType = UNSET
    url: URL | UnsetType = UNSET
    region_id: RegionID | None | UnsetType = UNSET
    region: RegionID | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


def read(sent: dict[str, Any], kind: type[S], noun: str) -> tuple[S, dict[str, Any]]:
    """Check the declared attributes of a body; return them, and those that nobody declared."""
    try:
        known = msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `")
        where = noun + where.rstrip("`").removeprefix("$")
        raise Invalid(f"Invalid input for field/attribute {where}: {text}.") from None
    declared = _names(kind)
    return known, {key: value for key, value in sent.items() if key not in declared and key not in _RESERVED}


def changes(sent: dict[str, Any], kind: type[S], noun: str) -> tuple[S, dict[str, Any]]:
    """Like `read`, for a change: one without any attribute is refused."""
    if not sent:
        raise Invalid(f"Invalid input for field/attribute {noun}: name at least one attribute to change.")
    return read(sent, kind, noun)


def given(changed: Struct, *names: str) -> dict[str, Any]:
    """Return those of the attributes that were sent."""
    found = {name: getattr(changed, name) for name in names}
    return {name: value for name, value in found.items() if value is not UNSET}


def merged_options(old: dict[str, Any], new: Struct | UnsetType) -> dict[str, Any]:
    """Return options with changes applied; null takes one away."""
    if isinstance(new, UnsetType):
        return old
    merged = {**old, **given(new, *new.__struct_fields__)}
    return {name: value for name, value in merged.items() if value is not None}


def unique_tags(tags: Iterable[str]) -> list[str]:
    """Return the tags in order; refuse one that is named twice."""
    found = list(tags)
    if len(set(found)) != len(found):
        raise Invalid("Invalid input for field/attribute tags: each tag may be named once.")
    return found


@cache
def _names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)
