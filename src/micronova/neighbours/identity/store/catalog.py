"""The service catalog: regions, services, and the endpoints at which services answer."""

import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import (
    EndpointAttributes,
    EndpointChanges,
    RegionAttributes,
    RegionChanges,
    ServiceAttributes,
    ServiceChanges,
    given,
)
from micronova.neighbours.identity.store import rows
from micronova.neighbours.identity.store.rows import Listed, Page, Row
from micronova.neighbours.identity.tables import endpoints, regions, services
from micronova.objects.errors import Forbidden, Invalid, NotFound

# What the URL of an endpoint may leave to be filled in, as $(NAME)s or %(NAME)s.
PLACEHOLDERS = frozenset({"public_url", "project_id", "tenant_id", "user_id"})


def entries(conn: sa.Connection) -> list[tuple[Row, list[Row]]]:
    """Return every enabled service with its enabled endpoints: what a token's catalog shows."""
    listed = services.select().where(services.c.enabled.is_(True)).order_by(services.c.created_at, services.c.id)
    everything = conn.execute(listed).mappings().all()
    by_service: dict[str, list[Row]] = {row["id"]: [] for row in everything}
    shown = endpoints.select().where(endpoints.c.enabled.is_(True)).order_by(endpoints.c.created_at, endpoints.c.id)
    for row in conn.execute(shown).mappings():
        if row["service_id"] in by_service:
            by_service[row["service_id"]].append(row)
    return [(row, by_service[row["id"]]) for row in everything]


# --- regions ---


def region(conn: sa.Connection, region_id: str) -> Row:
    """Return a region."""
    return rows.get(conn, regions, "region", region_id)


def list_regions(conn: sa.Connection, query: Mapping[str, list[str]], page: Page) -> Listed:
    """Return regions."""
    return rows.listed(conn, regions, rows.filters(regions, query, ("parent_region_id",)), page)


def create_region(
    conn: sa.Connection, region_id: str, wanted: RegionAttributes, extra: Mapping[str, Any], now: int
) -> Row:
    """Make a region."""
    if wanted.parent_region_id is not None:
        region(conn, wanted.parent_region_id)
    row = {
        "id": region_id,
        "description": wanted.description or "",
        "parent_region_id": wanted.parent_region_id,
        "extra": dict(extra),
        "created_at": now,
    }
    with rows.unique(f"There is a region {region_id} already."):
        conn.execute(regions.insert().values(row))
    return row


def change_region(conn: sa.Connection, region_id: str, wanted: RegionChanges, extra: Mapping[str, Any]) -> Row:
    """Change a region."""
    row = region(conn, region_id)
    values = given(wanted, "description", "parent_region_id")
    if "description" in values:
        values["description"] = values["description"] or ""
    parent = values.get("parent_region_id")
    while parent is not None:
        if parent == region_id:
            raise Invalid("Invalid input for field/attribute region.parent_region_id: regions cannot go in a circle.")
        parent = region(conn, parent)["parent_region_id"]
    values["extra"] = {**row["extra"], **extra}
    return rows.update(conn, regions, row, values, "")


def delete_region(conn: sa.Connection, region_id: str) -> None:
    """Delete a region that nothing is in."""
    region(conn, region_id)
    used = conn.execute(sa.select(endpoints.c.id).where(endpoints.c.region_id == region_id).limit(1)).first()
    below = conn.execute(sa.select(regions.c.id).where(regions.c.parent_region_id == region_id).limit(1)).first()
    if used or below:
        raise Forbidden(f"Cannot delete the region {region_id}: it has endpoints, or regions below it.")
    conn.execute(regions.delete().where(regions.c.id == region_id))


# --- services ---


def service(conn: sa.Connection, service_id: str) -> Row:
    """Return a service."""
    return rows.get(conn, services, "service", service_id)


def list_services(conn: sa.Connection, query: Mapping[str, list[str]], page: Page) -> Listed:
    """Return services."""
    return rows.listed(conn, services, rows.filters(services, query, ("type", "name", "enabled")), page)


def create_service(
    conn: sa.Connection, service_id: str, wanted: ServiceAttributes, extra: Mapping[str, Any], now: int
) -> Row:
    """Make a service."""
    row = {
        "id": service_id,
        "type": wanted.type,
        "name": wanted.name,
        "description": wanted.description,
        "enabled": wanted.enabled,
        "extra": dict(extra),
        "created_at": now,
    }
    conn.execute(services.insert().values(row))
    return row


def change_service(conn: sa.Connection, service_id: str, wanted: ServiceChanges, extra: Mapping[str, Any]) -> Row:
    """Change a service."""
    row = service(conn, service_id)
    values = given(wanted, "type", "name", "description", "enabled")
    values["extra"] = {**row["extra"], **extra}
    return rows.update(conn, services, row, values, "")


def delete_service(conn: sa.Connection, service_id: str) -> None:
    """Delete a service with its endpoints."""
    service(conn, service_id)
    conn.execute(endpoints.delete().where(endpoints.c.service_id == service_id))
    conn.execute(services.delete().where(services.c.id == service_id))


# --- endpoints ---


def endpoint(conn: sa.Connection, endpoint_id: str) -> Row:
    """Return an endpoint."""
    return rows.get(conn, endpoints, "endpoint", endpoint_id)


def list_endpoints(conn: sa.Connection, query: Mapping[str, list[str]], page: Page) -> Listed:
    """Return endpoints."""
    names = ("service_id", "region_id", "interface", "enabled")
    return rows.listed(conn, endpoints, rows.filters(endpoints, query, names), page)


def create_endpoint(
    conn: sa.Connection, endpoint_id: str, wanted: EndpointAttributes, extra: Mapping[str, Any], now: int
) -> Row:
    """Make an endpoint."""
    row = {
        "id": endpoint_id,
        "service_id": _known_service(conn, wanted.service_id),
        "region_id": _known_region(conn, wanted.region_id, wanted.region, now),
        "interface": wanted.interface,
        "url": _known_placeholders(wanted.url),
        "enabled": wanted.enabled,
        "extra": dict(extra),
        "created_at": now,
    }
    conn.execute(endpoints.insert().values(row))
    return row


def change_endpoint(
    conn: sa.Connection, endpoint_id: str, wanted: EndpointChanges, extra: Mapping[str, Any], now: int
) -> Row:
    """Change an endpoint."""
    row = endpoint(conn, endpoint_id)
    values = given(wanted, "service_id", "interface", "url", "enabled")
    _known_placeholders(values.get("url", ""))
    if "service_id" in values:
        _known_service(conn, values["service_id"])
    region_names = given(wanted, "region_id", "region")
    if region_names:
        values["region_id"] = _known_region(conn, region_names.get("region_id"), region_names.get("region"), now)
    values["extra"] = {**row["extra"], **extra}
    return rows.update(conn, endpoints, row, values, "")


def delete_endpoint(conn: sa.Connection, endpoint_id: str) -> None:
    """Delete an endpoint."""
    endpoint(conn, endpoint_id)
    conn.execute(endpoints.delete().where(endpoints.c.id == endpoint_id))


def _known_placeholders(url: str) -> str:
    """Refuse a URL that could never be filled in."""
    unknown = set(re.findall(r"[$%]\((\w*)\)s?", url)) - PLACEHOLDERS
    if unknown:
        raise Invalid(
            f"Invalid input for field/attribute endpoint.url: there is no {', '.join(sorted(unknown))} to fill in; "
            f"there are {', '.join(sorted(PLACEHOLDERS))}."
        )
    return url


def _known_service(conn: sa.Connection, service_id: str) -> str:
    try:
        service(conn, service_id)
    except NotFound:
        message = f"Invalid input for field/attribute endpoint.service_id: there is no service {service_id}."
        raise Invalid(message) from None
    return service_id


def _known_region(conn: sa.Connection, region_id: str | None, region_name: str | None, now: int) -> str | None:
    """Return the region named; the older attribute `region` makes a region that does not exist yet."""
    if region_id is not None:
        if rows.find(conn, regions, region_id) is None:
            raise Invalid(f"Invalid input for field/attribute endpoint.region_id: there is no region {region_id}.")
        return region_id
    if region_name is not None and rows.find(conn, regions, region_name) is None:
        create_region(conn, region_name, RegionAttributes(), {}, now)
    return region_name
