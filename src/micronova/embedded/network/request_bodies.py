"""Request bodies: shared types of attributes, and conversion."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.embedded.network.errors import invalid
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound

Name = Annotated[str, Meta(max_length=255)]
# A whole name of a domain, or "".
Domain = Annotated[
    str,
    Meta(title="a domain with a dot at its end", max_length=255, pattern=r"^(?:(?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)*\Z"),
]
Project = Annotated[str, Meta(max_length=255)]
ShortText = Annotated[str, Meta(max_length=64)]
Identifier = Annotated[str, Meta(min_length=1, max_length=64)]
# Clients send booleans and numbers as JSON or as text; Neutron accepts both.
Flag = (
    bool
    | Annotated[int, Meta(title="true or false", ge=0, le=1)]
    | Annotated[str, Meta(title="true or false", pattern=r"^(?i:true|false|1|0)\Z")]
)
Number = (
    Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    | Annotated[str, Meta(title="a whole number", pattern=r"^-?[0-9]{1,9}\Z")]
)
Tag = Annotated[str, Meta(title="a string without comma and slash", min_length=1, max_length=255, pattern=r"^[^,/]+\Z")]
Tags = Annotated[list[Tag], Meta(max_length=50)]

_MAC = re.compile(r"^([0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\Z")


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body, or an object in one; unknown attributes are refused."""


def body_of_one(singular: str, kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of an update's body: one object under its name."""
    return msgspec.defstruct(f"{kind.__name__}Body", [(singular, kind)], kw_only=True, forbid_unknown_fields=True)


def body_of_one_or_many(singular: str, plural: str, kind: type[Body]) -> type[msgspec.Struct]:
    """Return the type of a create's body: one object under its name, or a list under the collection's."""
    many = Annotated[list[kind], Meta(min_length=1, max_length=500)]  # type: ignore[valid-type]
    return msgspec.defstruct(
        f"{kind.__name__}Body",
        [(singular, kind | UnsetType, UNSET), (plural, many | UnsetType, UNSET)],
        kw_only=True,
        forbid_unknown_fields=True,
    )


def objects(body: msgspec.Struct, singular: str, plural: str = "") -> list[dict[str, Any]]:
    """Return the objects of a body as dictionaries of the given attributes, by their names in the API."""
    given = msgspec.to_builtins(body)
    if len(given) != 1:
        raise Invalid(f"The body must have exactly one key: '{singular}' or '{plural}'.")
    return [given[singular]] if singular in given else given[plural]


def project_of(given: dict[str, Any], context: RequestContext, crosses_projects: bool) -> str:
    """Remove project_id and tenant_id from the given attributes, and return the project of the new resource."""
    project, tenant = given.pop("project_id", None), given.pop("tenant_id", None)
    if project is not None and tenant is not None and project != tenant:
        raise Invalid("'project_id' and 'tenant_id' do not match.")
    named = project if project is not None else tenant
    if named is None:
        if not context.project_id:
            raise Invalid("The token has no project: name one in project_id.")
        return context.project_id
    if named != context.project_id and not crosses_projects:
        raise Invalid(
            "Specifying 'project_id' other than the authenticated project in request is not allowed for this user."
        )
    return str(named)


def truth(value: bool | int | str) -> bool:
    """Return a `Flag` as a boolean."""
    return value in (True, 1) or str(value).lower() in ("true", "1")


def convert_text(given: dict[str, Any], flags: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Convert flags and numbers that came as text."""
    for name in flags:
        if given.get(name) is not None:
            given[name] = truth(given[name])
    for name in numbers:
        if given.get(name) is not None:
            given[name] = int(given[name])


def ip_address(text: str, name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; raise Invalid with the name of the attribute."""
    try:
        if "%" in text:
            raise ValueError
        return ipaddress.ip_address(text)
    except ValueError:
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid IP address.", "HTTPBadRequest") from None


def ip_network(text: str, name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse a CIDR without its host bits; raise Invalid with the name of the attribute."""
    try:
        if "%" in text:
            raise ValueError
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid IP subnet.", "HTTPBadRequest") from None


def zone_hints(given: Mapping[str, Any], zone: str) -> list[str]:
    """Return the requested availability zones; raise NotFound unless each is the service's one."""
    hints: list[str] = given.get("availability_zone_hints", [])
    for hint in hints:
        if hint != zone:
            raise NotFound(f"AvailabilityZone {hint[:64]} could not be found.", type="AvailabilityZoneNotFound")
    return hints


def mac_address(text: str, name: str = "mac_address") -> str:
    """Return a unicast MAC address in canonical form."""
    if not _MAC.match(text):
        raise invalid(f"Invalid input for {name}: '{text[:64]}' is not a valid MAC address.", "HTTPBadRequest")
    mac = text.lower().replace("-", ":")
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise invalid(f"Invalid input for {name}: '{mac}' is not a unicast MAC address.", "HTTPBadRequest")
    return mac
