"""Actions that shelve a server and bring it back: shelve, shelveOffload, unshelve."""

from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType

from micronova.api import inputs
from micronova.api.compute.action_routes import ActionRoute, action_routes, bare_body
from micronova.api.compute.server_inputs import given
from micronova.api.compute.server_lookup import authorized_server, server_target
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.servers.shelving import ServerShelving


class UnshelveToZone(msgspec.Struct, forbid_unknown_fields=True):
    """Where to unshelve a server."""

    availability_zone: inputs.Text


class UnshelveToZoneBody(msgspec.Struct, forbid_unknown_fields=True):
    """Unshelve, perhaps in a zone."""

    unshelve: UnshelveToZone | None


class Unshelve(msgspec.Struct, forbid_unknown_fields=True):
    """Where to unshelve a server: without a zone it stays pinned, with null it is pinned no more."""

    availability_zone: inputs.Text | None | UnsetType = UNSET
    host: inputs.Text | UnsetType = UNSET


class UnshelveBody(msgspec.Struct, forbid_unknown_fields=True):
    """Unshelve, perhaps in a zone or on a host."""

    unshelve: Unshelve | None


def routes(database: Database, shelving: ServerShelving) -> list[Route]:
    """Return the routes of the actions."""

    async def shelve(request: Request, id: str) -> None:
        """Shelve a server: its guest is switched off and its disk becomes an image."""
        await shelving.shelve(request.context, await authorized_server(database, request, id))

    async def shelve_offload(request: Request, id: str) -> None:
        """Take a shelved server from its host."""
        await shelving.offload(request.context, await authorized_server(database, request, id))

    async def unshelve(request: Request, id: str) -> None:
        """Unshelve a server."""
        row = await authorized_server(database, request, id)
        asked = request.body.unshelve if isinstance(request.body, UnshelveBody | UnshelveToZoneBody) else None
        host = given(asked.host) if isinstance(asked, Unshelve) else None
        if host is not None:
            request.authorize(server_target(row), "os_compute_api:os-shelve:unshelve_to_host")
        zone = UNSET if asked is None else asked.availability_zone
        if isinstance(asked, UnshelveToZone):
            inputs.name(asked.availability_zone, "availability_zone")
        await shelving.unshelve(request.context, row, zone=zone, host=host)

    rule = "os_compute_api:os-shelve"
    back = ActionRoute(name="unshelve", handler=unshelve, policy=f"{rule}:unshelve", body=UnshelveBody)
    return action_routes(
        [
            ActionRoute(name="shelve", handler=shelve, policy=f"{rule}:shelve", body=bare_body("shelve")),
            ActionRoute(
                name="shelveOffload",
                handler=shelve_offload,
                policy=f"{rule}:shelve_offload",
                body=bare_body("shelveOffload"),
            ),
            replace(back, body=bare_body("unshelve"), versions=until(76)),
            replace(back, body=UnshelveToZoneBody, versions=Range(77, 90)),
            replace(back, versions=since(91)),
        ]
    )
