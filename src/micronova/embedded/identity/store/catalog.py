"""The service catalog: regions, services and endpoints."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.query import Query
from micronova.embedded.identity import endpoint_urls
from micronova.embedded.identity.attributes import (
    EndpointAttributes,
    EndpointChanges,
    RegionAttributes,
    RegionChanges,
    ServiceAttributes,
    ServiceChanges,
    given,
)
from micronova.embedded.identity.store.kinds import (
    ENDPOINTS,
    REGIONS,
    SERVICES,
    CatalogEntry,
    EndpointRow,
    RegionRow,
    ServiceRow,
)
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import endpoints, regions, registered_limits, services
from micronova.objects.errors import Forbidden, Invalid, NotFound


def entries(conn: sa.Connection) -> list[CatalogEntry]:
    """Return every enabled service with its enabled endpoints, for the catalog of a token."""
    by_service: dict[str, list[EndpointRow]] = {}
    for row in ENDPOINTS.all(conn, endpoints.c.enabled.is_(True)):
        by_service.setdefault(row["service_id"], []).append(row)
    return [(row, by_service.get(row["id"], [])) for row in SERVICES.all(conn, services.c.enabled.is_(True))]


# --- regions ---


def list_regions(conn: sa.Connection, query: Query, page: Page) -> Listed[RegionRow]:
    """Return a page of regions."""
    return REGIONS.page(conn, REGIONS.filters(query, ("parent_region_id",)), page)


def create_region(
    conn: sa.Connection, region_id: str, wanted: RegionAttributes, extra: Mapping[str, Any], now: int
) -> RegionRow:
    """Create a region."""
    if wanted.parent_region_id is not None:
        REGIONS.get(conn, wanted.parent_region_id)
    row: RegionRow = {
        "id": region_id,
        "description": wanted.description or "",
        "parent_region_id": wanted.parent_region_id,
        "extra": dict(extra),
        "created_at": now,
    }
    return REGIONS.insert(conn, row, f"There is a region {region_id} already.")


def change_region(conn: sa.Connection, region_id: str, wanted: RegionChanges, extra: Mapping[str, Any]) -> RegionRow:
    """Change a region."""
    row = REGIONS.get(conn, region_id)
    values = given(wanted, "description", "parent_region_id")
    if "description" in values:
        values["description"] = values["description"] or ""
    parent = values.get("parent_region_id")
    while parent is not None:
        if parent == region_id:
            raise Invalid("Invalid input for field/attribute region.parent_region_id: regions cannot go in a circle.")
        parent = REGIONS.get(conn, parent)["parent_region_id"]
    values["extra"] = {**row["extra"], **extra}
    return REGIONS.update(conn, row, values)


def delete_region(conn: sa.Connection, region_id: str) -> None:
    """Delete an empty region; raise Forbidden if it has endpoints, regions or limits."""
    REGIONS.get(conn, region_id)
    used = conn.execute(sa.select(endpoints.c.id).where(endpoints.c.region_id == region_id).limit(1)).first()
    below = conn.execute(sa.select(regions.c.id).where(regions.c.parent_region_id == region_id).limit(1)).first()
    if used or below:
        raise Forbidden(f"Cannot delete the region {region_id}: it has endpoints, or regions below it.")
    _refuse_limits(conn, registered_limits.c.region_id == region_id, f"region {region_id}")
    conn.execute(regions.delete().where(regions.c.id == region_id))


# --- services ---


def list_services(conn: sa.Connection, query: Query, page: Page) -> Listed[ServiceRow]:
    """Return a page of services."""
    return SERVICES.page(conn, SERVICES.filters(query, ("type", "name", "enabled")), page)


def create_service(
    conn: sa.Connection, service_id: str, wanted: ServiceAttributes, extra: Mapping[str, Any], now: int
) -> ServiceRow:
    """Create a service."""
    row: ServiceRow = {
        "id": service_id,
        "type": wanted.type,
        "name": wanted.name,
        "description": wanted.description,
        "enabled": wanted.enabled,
        "extra": dict(extra),
        "created_at": now,
    }
    return SERVICES.insert(conn, row)


def change_service(
    conn: sa.Connection, service_id: str, wanted: ServiceChanges, extra: Mapping[str, Any]
) -> ServiceRow:
    """Change a service."""
    row = SERVICES.get(conn, service_id)
    values = given(wanted, "type", "name", "description", "enabled")
    values["extra"] = {**row["extra"], **extra}
    return SERVICES.update(conn, row, values)


def delete_service(conn: sa.Connection, service_id: str) -> None:
    """Delete a service with its endpoints; raise Forbidden if it has limits."""
    SERVICES.get(conn, service_id)
    _refuse_limits(conn, registered_limits.c.service_id == service_id, f"service {service_id}")
    conn.execute(endpoints.delete().where(endpoints.c.service_id == service_id))
    conn.execute(services.delete().where(services.c.id == service_id))


# --- endpoints ---


def list_endpoints(conn: sa.Connection, query: Query, page: Page) -> Listed[EndpointRow]:
    """Return a page of endpoints."""
    names = ("service_id", "region_id", "interface", "enabled")
    return ENDPOINTS.page(conn, ENDPOINTS.filters(query, names), page)


def create_endpoint(
    conn: sa.Connection, endpoint_id: str, wanted: EndpointAttributes, extra: Mapping[str, Any], now: int
) -> EndpointRow:
    """Create an endpoint."""
    row: EndpointRow = {
        "id": endpoint_id,
        "service_id": _known_service(conn, wanted.service_id),
        "region_id": _known_region(conn, wanted.region_id, wanted.region, now),
        "interface": wanted.interface,
        "url": endpoint_urls.check(wanted.url),
        "enabled": wanted.enabled,
        "extra": dict(extra),
        "created_at": now,
    }
    return ENDPOINTS.insert(conn, row)


def change_endpoint(
    conn: sa.Connection, endpoint_id: str, wanted: EndpointChanges, extra: Mapping[str, Any], now: int
) -> EndpointRow:
    """Change an endpoint."""
    row = ENDPOINTS.get(conn, endpoint_id)
    values = given(wanted, "service_id", "interface", "url", "enabled")
    endpoint_urls.check(values.get("url", ""))
    if "service_id" in values:
        _known_service(conn, values["service_id"])
    region_names = given(wanted, "region_id", "region")
    if region_names:
        values["region_id"] = _known_region(conn, region_names.get("region_id"), region_names.get("region"), now)
    values["extra"] = {**row["extra"], **extra}
    return ENDPOINTS.update(conn, row, values)


def delete_endpoint(conn: sa.Connection, endpoint_id: str) -> None:
    """Delete an endpoint."""
    ENDPOINTS.get(conn, endpoint_id)
    conn.execute(endpoints.delete().where(endpoints.c.id == endpoint_id))


def _refuse_limits(conn: sa.Connection, condition: sa.ColumnElement[bool], what: str) -> None:
    if conn.execute(sa.select(registered_limits.c.id).where(condition).limit(1)).first():
        raise Forbidden(f"Cannot delete the {what}: delete its registered limits first.")


def _known_service(conn: sa.Connection, service_id: str) -> str:
    try:
        SERVICES.get(conn, service_id)
    except NotFound:
        message = f"Invalid input for field/attribute endpoint.service_id: there is no service {service_id}."
        raise Invalid(message) from None
    return service_id


def _known_region(conn: sa.Connection, region_id: str | None, region_name: str | None, now: int) -> str | None:
    """Return the id of the region; the older attribute `region` creates a region that does not exist."""
    if region_id is not None:
        if REGIONS.find(conn, region_id) is None:
            raise Invalid(f"Invalid input for field/attribute endpoint.region_id: there is no region {region_id}.")
        return region_id
    if region_name is not None and REGIONS.find(conn, region_name) is None:
        create_region(conn, region_name, RegionAttributes(), {}, now)
    return region_name
