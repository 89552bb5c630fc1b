"""The password that a server's guest generated and encrypted with the user's key: show it, delete it."""

from typing import Any

from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT, NoQuery
from micronova.db import server_passwords
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route

RULE = "os_compute_api:os-server-password"


class ServerPassword:
    """The handlers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show what the guest posted, "" when it posted nothing."""
        await authorized_server(self._database, request, id)
        return {"password": await self._database.read(server_passwords.get, id)}

    async def clear(self, request: Request, id: str) -> None:
        """Delete the stored password; the guest's own does not change, and the guest may post another."""
        await authorized_server(self._database, request, id)
        await self._database.write(server_passwords.clear, id)


def routes(database: Database) -> list[Route]:
    """Declare the routes."""
    h = ServerPassword(database)
    path = "/servers/{id}/os-server-password"
    return [
        Route(
            method="GET", path=path, handler=h.show, policy=f"{RULE}:show", checks_policy=True, query=NoQuery,
            strict_query=STRICT, answer={"password": str},
        ),
        Route(method="DELETE", path=path, handler=h.clear, policy=f"{RULE}:clear", checks_policy=True, status=204),
    ]  # fmt: skip
