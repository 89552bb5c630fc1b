"""The network API with a user's token: what the user may not do there, compute does not do for them."""

import urllib.parse
from collections.abc import Mapping
from typing import Any

from micronova.clients.network.calls import Calls
from micronova.objects.errors import NotFound, Unauthorized


class AsUser:
    """Reads and changes resources as one user; never as the service user."""

    def __init__(self, calls: Calls, token: str) -> None:
        if not token:
            raise Unauthorized("The network service is asked with the token of the request, which has none.")
        self._calls = calls
        self._token = token

    async def list_(self, collection: str, *query: tuple[str, str]) -> list[dict[str, Any]]:
        """Return the resources of a collection, e.g. `security_groups`, that match a query."""
        return await self._calls.all_of(collection, *query, token=self._token)

    async def show(self, collection: str, id: str) -> dict[str, Any]:
        """Return a resource; raise NotFound if it does not exist for the user."""
        return await self._send("GET", collection, id)

    async def create(self, collection: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Create a resource and return it."""
        return await self._send("POST", collection, values=values)

    async def update(self, collection: str, id: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change a resource and return it."""
        return await self._send("PUT", collection, id, values)

    async def delete(self, collection: str, id: str) -> None:
        """Delete a resource; raise NotFound if it does not exist for the user."""
        await self._send("DELETE", collection, id)

    async def _send(
        self, method: str, collection: str, id: str | None = None, values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        path, noun = f"/{collection.replace('_', '-')}", collection.removesuffix("s")
        if id in ("", ".", ".."):  # they would change the path
            raise NotFound(f"There is no {noun} '{id}'.")
        if id is not None:
            path += f"/{urllib.parse.quote(id, safe='')}"
        answer = await self._calls.send(method, path, None if values is None else {noun: values}, token=self._token)
        return dict(answer[noun]) if answer else {}
