"""Request bodies: the types that attributes share, and what every body goes through."""

import ipaddress
import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.http.context import RequestContext
from micronova.neighbours.network.errors import invalid
from micronova.objects.errors import Invalid

Name = Annotated[str, Meta(max_length=255)]
Project = Annotated[str, Meta(max_length=255)]
Identifier = Annotated[str, Meta(min_length=1, max_length=64)]
# Clients write booleans and numbers as JSON or as text; Neutron takes both.
Flag = bool | Annotated[int, Meta(ge=0, le=1)] | Annotated[str, Meta(pattern=r"^(?i:true|false|1|0)\Z")]
Number = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | Annotated[str, Meta(pattern=r"^-?[0-9]{1,9}\Z")]
Tag = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[^,/]+\Z")]
Tags = Annotated[list[Tag], Meta(max_length=50)]

Optional = UnsetType  # `X | Optional = UNSET`: the caller may leave the attribute out

_MAC = re.compile(r"^([0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\Z")


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body, or an object in one: an attribute that it does not declare is refused."""


def one(singular: str, kind: type[Body]) -> type[msgspec.Struct]:
    """The body of an update: one object under its name."""
    return msgspec.defstruct(f"{kind.__name__}Body", [(singular, kind)], kw_only=True, forbid_unknown_fields=True)


def one_or_many(singular: str, plural: str, kind: type[Body]) -> type[msgspec.Struct]:
    """The body of a create: one object under its name, or a list of them under the collection's."""
    many = Annotated[list[kind], Meta(min_length=1, max_length=500)]  # type: ignore[valid-type]
    return msgspec.defstruct(
        f"{kind.__name__}Body",
        [(singular, kind | Optional, UNSET), (plural, many | Optional, UNSET)],
        kw_only=True,
        forbid_unknown_fields=True,
    )


def objects(body: msgspec.Struct, singular: str, plural: str = "") -> list[dict[str, Any]]:
    """Return the objects of a body as dictionaries of what was given, by their names on the wire."""
    given = msgspec.to_builtins(body)
    if len(given) != 1:
        raise Invalid(f"The body must have exactly one key: '{singular}' or '{plural}'.")
    found = [given[singular]] if singular in given else given[plural]
    for each in found:
        refuse_nul(each)
    return found


def refuse_nul(value: Any, name: str = "") -> None:
    """Refuse text with NUL characters, which PostgreSQL cannot keep."""
    if isinstance(value, str):
        if "\0" in value:
            raise Invalid(f"Invalid input for {name or 'body'}: NUL characters are not allowed.")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_nul(key, name)
            refuse_nul(item, name or str(key))
    elif isinstance(value, list):
        for item in value:
            refuse_nul(item, name)


def owner(given: dict[str, Any], context: RequestContext, may_name: bool) -> str:
    """Take project_id and tenant_id out of the given attributes and say whose the thing will be."""
    project, tenant = given.pop("project_id", None), given.pop("tenant_id", None)
    if project is not None and tenant is not None and project != tenant:
        raise Invalid("'project_id' and 'tenant_id' do not match.")
    named = project if project is not None else tenant
    if named is None:
        if not context.project_id:
            raise Invalid("The token has no project: name one in project_id.")
        return context.project_id
    if named != context.project_id and not may_name:
        raise Invalid(
            "Specifying 'project_id' other than the authenticated project in request is not allowed for this user."
        )
    return str(named)


def truth(value: bool | int | str) -> bool:
    """Return a `Flag` as a boolean."""
    return value in (True, 1) or str(value).lower() in ("true", "1")


def convert(given: dict[str, Any], flags: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Bring flags and numbers that came as text into their own types."""
    for name in flags:
        if given.get(name) is not None:
            given[name] = truth(given[name])
    for name in numbers:
        if given.get(name) is not None:
            given[name] = int(given[name])


def ip_address(text: str, name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address or say which attribute is not one."""
    try:
        if "%" in text:
            raise ValueError
        return ipaddress.ip_address(text)
    except ValueError:
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid IP address.", "HTTPBadRequest") from None


def ip_network(text: str, name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse a CIDR (host bits are dropped, as clients expect) or say which attribute is not one."""
    try:
        if "%" in text:
            raise ValueError
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid IP subnet.", "HTTPBadRequest") from None


def mac_address(text: str, name: str = "mac_address") -> str:
    """Return a unicast MAC address in its usual form."""
    if not _MAC.match(text):
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid MAC address.", "HTTPBadRequest")
    mac = text.lower().replace("-", ":")
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise invalid(f"Invalid input for {name}: '{mac}' is not a unicast MAC address.", "HTTPBadRequest")
    return mac
