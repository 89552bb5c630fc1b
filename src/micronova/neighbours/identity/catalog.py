"""The catalog as a token's owner sees it: URLs that lead back to where the request came from."""

from typing import Any

from micronova.http.tokens import Claims
from micronova.neighbours.identity.store.rows import Row

# Stands for scheme, host and port of this cloud as the client sees them: one database serves clients that reach it
# by different names.
PUBLIC_URL = "$(public_url)s"


def resolve(url: str, public_url: str) -> str:
    """Return an endpoint's URL for a client that reaches us at `public_url`."""
    return url.replace(PUBLIC_URL, public_url)


def view(entries: list[tuple[Row, list[Row]]], public_url: str, claims: Claims) -> list[dict[str, Any]]:
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


def _endpoint(row: Row, url: str) -> dict[str, Any]:
    return {
        "id": row["id"],
        "interface": row["interface"],
        "region_id": row["region_id"],
        "region": row["region_id"],
        "url": url,
    }


def _url(row: Row, public_url: str, claims: Claims) -> str | None:
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
