"""Fields that several requests about servers have: their types, and functions that check what a type cannot say."""

import ipaddress
import re
from typing import Annotated, Any

from msgspec import UNSET, Meta

from micronova.objects.errors import Invalid

UUID = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}\Z"

Id = Annotated[str, Meta(pattern=UUID)]
Tag = Annotated[str, Meta(min_length=1, max_length=60, pattern=r"^[^/,]*\Z")]

_HOSTNAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-]{0,61}[a-zA-Z0-9]")
_FQDN = re.compile(r"[a-zA-Z0-9._-]{1,255}")  # since 2.94


def given(value: Any) -> Any:
    """Return a field's value, None if the request leaves it out."""
    return None if value is UNSET else value


def ip_address(field: str, text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an IP address."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise Invalid(f"Invalid input for field/attribute {field}: {text[:64]!r} is not an IP address.") from None


def access_address(field: str, value: Any, version: int) -> str | None:
    """Read an address of this IP version; None if the request leaves it out."""
    if value is UNSET:
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
        raise Invalid("Invalid input for field/attribute hostname: 2 to 63 letters, digits and dashes within.")
    return name
