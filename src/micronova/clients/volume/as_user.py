"""The volume API with a user's token: what the user may not do there, compute does not do for them."""

import urllib.parse
from collections.abc import Mapping
from typing import Any, Protocol

from micronova.objects.errors import NotFound, Unauthorized


class Send(Protocol):
    """Sends a request with a user's token."""

    async def __call__(self, method: str, path: str, body: Any = None, *, token: str | None) -> Any:
        """Return the body of the answer; raise the error that the status stands for."""


class VolumesAsUser:
    """Reads and changes volumes and snapshots as one user; never as the service user."""

    def __init__(self, send: Send, token: str) -> None:
        if not token:
            raise Unauthorized("The volume service is asked with the token of the request, which has none.")
        self._send = send
        self._token = token

    async def list_(self, collection: str, *, offset: int, limit: int) -> list[dict[str, Any]]:
        """Return resources of a collection, `volumes` or `snapshots`, of the user's project."""
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": limit, "offset": offset}
        while True:
            page = await self._ask("GET", f"/{collection}/detail?{urllib.parse.urlencode(query)}")
            found += page[collection]
            # A service may give less than was asked for at once; then it has a link to the rest.
            if len(found) >= limit or not page[collection] or not page.get(f"{collection}_links"):
                return found[:limit]
            query = {"limit": limit - len(found), "marker": found[-1]["id"]}

    async def show(self, collection: str, id: str) -> dict[str, Any]:
        """Return a resource; raise NotFound if it does not exist for the user."""
        return dict((await self._ask("GET", _one(collection, id)))[_noun(collection)])

    async def create(self, collection: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Create a resource, and return it."""
        noun = _noun(collection)
        return dict((await self._ask("POST", f"/{collection}", {noun: values}))[noun])

    async def delete(self, collection: str, id: str) -> None:
        """Delete a resource; raise NotFound if it does not exist for the user."""
        await self._ask("DELETE", _one(collection, id))

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return await self._send(method, path, body, token=self._token)


def _noun(collection: str) -> str:
    return collection.removesuffix("s")


def _one(collection: str, id: str) -> str:
    if id in ("", ".", ".."):  # they would change the path
        raise NotFound(f"{_noun(collection).capitalize()} {id} could not be found.")
    return f"/{collection}/{urllib.parse.quote(id, safe='')}"
