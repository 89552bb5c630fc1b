"""The catalog as the owner of a token sees it, with the URLs by which the client reaches this cloud."""

from typing import Any

from micronova.embedded.identity.store.kinds import CatalogEntry, EndpointRow
from micronova.http.tokens import Claims

# The placeholder for scheme, host and port of this cloud as the client sees them. Clients may reach the same cloud by
# different names.
PUBLIC_URL = "$(public_url)s"


def resolve(url: str, public_url: str) -> str:
    """Return an endpoint's URL for a client that reaches this cloud at `public_url`."""
    return url.replace(PUBLIC_URL, public_url)


def view(entries: list[CatalogEntry], public_url: str, claims: Claims) -> list[dict[str, Any]]:
    """Return the catalog for a token."""
    return [
        {
            "endpoints": [_endpoint(row, url) for row in endpoints if (url := _url(row, public_url, claims))],
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


def _url(row: EndpointRow, public_url: str, claims: Claims) -> str | None:
    """Fill in a URL's placeholders; None when it needs a project and the token has none."""
    url = resolve(row["url"], public_url)
    for sign in "$%":
        for name in ("project_id", "tenant_id"):
            placeholder = f"{sign}({name})s"
            if placeholder in url:
                if claims.project_id is None:
                    return None
                url = url.replace(placeholder, claims.project_id)
        url = url.replace(f"{sign}(user_id)s", claims.user_id)
    return url
