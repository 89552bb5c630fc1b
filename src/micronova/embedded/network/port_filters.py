"""Filters of the port list on other tables than `ports`."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from micronova.embedded.network.listing import Clause, Filter
from micronova.embedded.network.tables import addresses, port_security_groups, ports
from micronova.http.paging import check_filter
from micronova.objects.errors import Invalid


def _fixed_ips(values: Sequence[str]) -> Clause:
    """Parse `fixed_ips=ip_address=10.0.0.3`, `fixed_ips=subnet_id=…` and `fixed_ips=ip_address_substr=10.`."""
    wanted: dict[str, list[str]] = {}
    for value in values:
        for part in value.split(","):
            name, separator, text = part.partition("=")
            if not separator:
                raise Invalid(f"Invalid input for fixed_ips: '{value[:64]}' is not ip_address=… or subnet_id=….")
            wanted.setdefault(name, []).append(text)
    a = addresses.c
    clauses: list[Clause] = []
    for name, texts in wanted.items():
        if name == "ip_address":
            clauses.append(a.address.in_(texts))
        elif name in ("subnet_id", "subnet"):
            clauses.append(a.subnet_id.in_(texts))
        elif name == "ip_address_substr":
            check_filter("fixed_ips", texts)
            clauses.append(sa.or_(*(a.address.contains(text, autoescape=True) for text in texts)))
        else:
            raise Invalid(f"Invalid input for fixed_ips: '{name[:64]}' is not ip_address or subnet_id.")
    return ports.c.id.in_(sa.select(a.port_id).where(*clauses))


def _security_groups(values: Sequence[str]) -> Clause:
    g = port_security_groups.c
    ids = [each for value in values for each in value.split(",")]
    return ports.c.id.in_(sa.select(g.port_id).where(g.security_group_id.in_(ids)))


FILTERS: Mapping[str, Filter] = {
    "fixed_ips": _fixed_ips,
    "ip_address": lambda values: _fixed_ips([f"ip_address={value}" for value in values]),
    "subnet_id": lambda values: _fixed_ips([f"subnet_id={value}" for value in values]),
    "security_groups": _security_groups,
}
