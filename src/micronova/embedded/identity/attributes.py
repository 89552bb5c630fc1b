"""The attributes of identity resources that clients may send, and their validation.

Most identity resources accept attributes that the API does not declare, and show them again (`extra`). So a body is
decoded to a dictionary. The declared attributes are converted to a struct, which checks them; the rest is kept.
"""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from micronova.embedded.identity import endpoint_urls
from micronova.objects.errors import Invalid
from micronova.objects.wrong_values import wrong_value

_VISIBLE = r"\S"
_VISIBLE_WORDS = "a string that is not only white space"

ID = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=255, pattern=_VISIBLE, title=_VISIBLE_WORDS)]
ShortName = Annotated[str, Meta(min_length=1, max_length=64, pattern=_VISIBLE, title=_VISIBLE_WORDS)]
RegionID = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"\A[^/]+\Z", title="a string without slash")]
Tag = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=r"\A[^,/]*\Z", title="a string without comma and slash")
]
MAX_TAGS = 80  # of a project or domain
Tags = Annotated[list[Tag], Meta(max_length=MAX_TAGS)]
URL = Annotated[
    str, Meta(max_length=2048, pattern=endpoint_urls.PATTERN, title="a URL such as http://10.0.0.1:8774/compute/v2.1")
]
Password = Annotated[str, Meta(min_length=1, max_length=4096)]

S = TypeVar("S", bound=Struct)

# Attributes that the service sets; a client cannot set them as extra attributes.
_RESERVED = frozenset({"id", "links", "extra", "created_at", "is_domain", "password_expires_at", "password_hash"})


class ResourceOptions(Struct, forbid_unknown_fields=True):
    """Options of domains, projects and roles; null removes an option."""

    immutable: bool | None | UnsetType = UNSET


class UserOptions(Struct, forbid_unknown_fields=True):
    """Options of users. Those for multi-factor authentication are refused, because they would not be enforced."""

    ignore_lockout_failure_attempts: bool | None | UnsetType = UNSET
    lock_password: bool | None | UnsetType = UNSET
    # Passwords do not expire here, so these options are kept without an effect.
    ignore_change_password_upon_first_use: bool | None | UnsetType = UNSET
    ignore_password_expiry: bool | None | UnsetType = UNSET
    ignore_user_inactivity: bool | None | UnsetType = UNSET


class DomainAttributes(Struct):
    """The attributes of a new domain."""

    name: ShortName
    description: str | None = ""
    enabled: bool = True
    tags: Tags = []
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class DomainChanges(Struct):
    """The attributes of a domain to change."""

    name: ShortName | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class ProjectAttributes(Struct):
    """The attributes of a new project."""

    name: ShortName
    description: str | None = ""
    enabled: bool = True
    domain_id: ID | None = None
    parent_id: ID | None = None
    is_domain: bool = False
    tags: Tags = []
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class ProjectChanges(Struct):
    """The attributes of a project to change."""

    name: ShortName | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    parent_id: ID | None | UnsetType = UNSET
    is_domain: bool | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class UserAttributes(Struct):
    """The attributes of a new user."""

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
    """The attributes of a new group."""

    name: ShortName
    domain_id: ID | None = None
    description: str | None = ""


class GroupChanges(Struct):
    """The attributes of a group to change."""

    name: ShortName | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET


class RoleAttributes(Struct):
    """The attributes of a new role."""

    name: Name
    domain_id: ID | None = None
    description: str | None = None
    options: ResourceOptions = msgspec.field(default_factory=ResourceOptions)


class RoleChanges(Struct):
    """The attributes of a role to change."""

    name: Name | UnsetType = UNSET
    domain_id: ID | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    options: ResourceOptions | UnsetType = UNSET


class RegionAttributes(Struct):
    """The attributes of a new region."""

    id: RegionID | None = None
    description: str | None = ""
    parent_region_id: RegionID | None = None


class RegionChanges(Struct):
    """The attributes of a region to change."""

    id: RegionID | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    parent_region_id: RegionID | None | UnsetType = UNSET


class ServiceAttributes(Struct):
    """The attributes of a new service of the catalog."""

    type: Name
    name: Annotated[str, Meta(max_length=255)] | None = None
    description: str | None = None
    enabled: bool = True


class ServiceChanges(Struct):
    """The attributes of a service to change."""

    type: Name | UnsetType = UNSET
    name: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    description: str | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


INTERFACES = ("public", "internal", "admin")
Interface = Annotated[str, Meta(pattern=rf"\A({'|'.join(INTERFACES)})\Z")]


class EndpointAttributes(Struct):
    """An endpoint to make; `region` is the older name of `region_id`, and creates the region if needed."""

    service_id: ID
    interface: Interface
    url: URL
    region_id: RegionID | None = None
    region: RegionID | None = None
    enabled: bool = True


class EndpointChanges(Struct):
    """The attributes of an endpoint to change."""

    service_id: ID | UnsetType = UNSET
    interface: Interface | UnsetType = UNSET
    url: URL | UnsetType = UNSET
    region_id: RegionID | None | UnsetType = UNSET
    region: RegionID | None | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


def read(sent: dict[str, Any], kind: type[S], noun: str) -> tuple[S, dict[str, Any]]:
    """Return the declared attributes of a body, checked, and the others; raise Invalid."""
    try:
        known = msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, kind)
        where = f"{noun}.{wrong.place}" if wrong.place else noun
        raise Invalid(f"Invalid input for field/attribute {where}: {wrong.problem}.") from None
    declared = _names(kind)
    return known, {key: value for key, value in sent.items() if key not in declared and key not in _RESERVED}


def changes(sent: dict[str, Any], kind: type[S], noun: str) -> tuple[S, dict[str, Any]]:
    """Like `read`, for an update: a body without attributes raises Invalid too."""
    if not sent:
        raise Invalid(f"Invalid input for field/attribute {noun}: name at least one attribute to change.")
    return read(sent, kind, noun)


def given(changed: Struct, *names: str) -> dict[str, Any]:
    """Return the values of those of the named attributes that were sent."""
    found = {name: getattr(changed, name) for name in names}
    return {name: value for name, value in found.items() if value is not UNSET}


def merged_options(old: dict[str, Any], new: Struct | UnsetType) -> dict[str, Any]:
    """Return the old options with the new ones applied; null removes an option."""
    if isinstance(new, UnsetType):
        return old
    merged = {**old, **given(new, *new.__struct_fields__)}
    return {name: value for name, value in merged.items() if value is not None}


def is_tag(text: str) -> bool:
    """Return whether a text may be a tag."""
    try:
        msgspec.convert(text, Tag)
    except msgspec.ValidationError:
        return False
    return True


def unique_tags(tags: Iterable[str]) -> list[str]:
    """Return the tags in order; raise Invalid if one occurs twice."""
    found = list(tags)
    if len(set(found)) != len(found):
        raise Invalid("Invalid input for field/attribute tags: each tag may be named once.")
    return found


@cache
def _names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)
