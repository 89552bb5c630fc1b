"""Fields that several requests about servers have: their types, and functions that check what a type cannot say."""

import base64
import binascii
import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, UnsetType

from micronova.api import inputs
from micronova.objects.errors import Invalid
from micronova.objects.orders import InjectedFile

T = TypeVar("T")

UUID = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}\Z"

Id = Annotated[str, Meta(title="a UUID", pattern=UUID)]
Tag = Annotated[str, Meta(title="a string without comma and slash", min_length=1, max_length=60, pattern=r"^[^/,]*\Z")]
UserData = Annotated[str, Meta(max_length=65535)]
Certificates = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=50)]


class File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file to inject (until 2.56)."""

    path: Annotated[str, Meta(min_length=1)]
    contents: str


class SecurityGroup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A security group by its name or id."""

    name: inputs.Text


_HOSTNAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]{0,61}[a-zA-Z0-9]")
_FQDN = re.compile(r"[a-zA-Z0-9._-]{1,255}")  # since 2.94


def given(value: T | UnsetType) -> T | None:
    """Return a field's value, None if the request leaves it out."""
    return None if isinstance(value, UnsetType) else value


def id_in(reference: str | int) -> str:
    """Return the id in a reference: it is the reference itself, or the last part of a URL."""
    return str(reference).rstrip("/").rpartition("/")[2]


def ip_address(field: str, text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an IP address."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise Invalid(f"Invalid input for field/attribute {field}: {text[:64]!r} is not an IP address.") from None


def access_address(field: str, value: str | UnsetType, version: int) -> str | None:
    """Read an address of this IP version; None if the request leaves it out."""
    if isinstance(value, UnsetType):
        return None
    parsed = ip_address(field, value)
    if parsed.version != version:
        raise Invalid(f"Invalid input for field/attribute {field}: {value} is not an IPv{version} address.")
    return str(parsed)


def disk_config(value: str) -> str:
    """Read how the disk is partitioned."""
    if value not in ("AUTO", "MANUAL"):
        raise Invalid("Invalid input for field/attribute OS-DCF:diskConfig: it is AUTO or MANUAL.")
    return value


def hostname(name: str, minor: int) -> str:
    """Check a host name; since 2.94 it may have a domain, and it has fewer rules."""
    if minor >= 94 and not _FQDN.fullmatch(name):
        raise Invalid("Invalid input for field/attribute hostname: letters, digits, dashes, dots and underscores only.")
    if minor < 94 and not _HOSTNAME.fullmatch(name):
        raise Invalid(
            "Invalid input for field/attribute hostname: it must be 2 to 63 letters, digits and dashes, and neither "
            "begin nor end with a dash."
        )
    return name


def user_data(data: str) -> str:
    """Check that user data is base64."""
    try:
        base64.b64decode(data, validate=False)
        if not re.match(r"^[A-Za-z0-9+/\s]*={0,2}\s*$", data):
            raise binascii.Error
    except (binascii.Error, ValueError):
        raise Invalid("Invalid input for field/attribute user_data: it must be base64.") from None
    return data


def injected_files(items: Iterable[File]) -> list[InjectedFile]:
    """Read files to inject, whose contents are base64."""
    files = []
    for item in items:
        try:
            contents = base64.b64decode(re.sub(r"\s", "", item.contents), validate=True)
        except (binascii.Error, ValueError):
            raise Invalid(f"Personality content for {item.path[:64]} cannot be decoded: it must be base64.") from None
        files.append(InjectedFile(item.path, contents))
    return files


def certificates(ids: list[str] | None) -> list[str] | None:
    """Check that each certificate is named once."""
    if ids is not None and len(set(ids)) != len(ids):
        raise Invalid("Invalid input for field/attribute trusted_image_certificates: each may be named once.")
    return ids
