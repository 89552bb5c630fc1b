"""The catalog as the owner of a token sees it, with the URLs by which the client reaches this cloud."""

from typing import Any

from micronova.embedded.identity import endpoint_urls
from micronova.embedded.identity.endpoint_urls import OwnURLs
from micronova.embedded.identity.store.kinds import CatalogEntry, EndpointRow
from micronova.http.tokens import Claims


def for_token(entries: list[CatalogEntry], urls: OwnURLs, claims: Claims) -> list[dict[str, Any]]:
    """Return the catalog for a token."""
    return [
        {
            "endpoints": [_endpoint(row, url) for row in endpoints if (url := _url(row, urls, claims))],
            "id": service["id"],
            "type": service["type"],
            "name": service["name"] or "",
        }
        for service, endpoints in entries
    ]


def _endpoint(row: EndpointRow, url: str) -> dict[str, Any]:
    return {
        "id": row["id"],
        "interface": row["interface"],
        "region_id": row["region_id"],
        "region": row["region_id"],
        "url": url,
    }


def _url(row: EndpointRow, urls: OwnURLs, claims: Claims) -> str | None:
    """Fill in a URL's placeholders; None when it needs a project and the token has none."""
    values = {"user_id": claims.user_id}
    if claims.project_id is not None:
        values |= {"project_id": claims.project_id, "tenant_id": claims.project_id}
    elif endpoint_urls.needs_project(row["url"]):
        return None
    return urls.fill(row["url"], row["interface"], values)
