"""The action `rebuild`: its body, and the response, which shows the server and its new password."""

from typing import Annotated, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.action_routes import ActionRoute, action_routes
from micronova.api.compute.server_inputs import (
    Certificates,
    File,
    Id,
    UserData,
    access_address,
    certificates,
    disk_config,
    hostname,
    injected_files,
    user_data,
)
from micronova.api.compute.server_lookup import authorized_server, server_target
from micronova.api.compute.server_views import REBUILT
from micronova.api.compute.servers import Servers
from micronova.api.links import Links
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.servers.rebuild import RebuildRequest, ServerRebuilder

POLICY = "os_compute_api:servers:rebuild"
ZERO_DISK = "os_compute_api:servers:create:zero_disk_flavor"


class Rebuild(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={
        "image_ref": "imageRef",
        "admin_pass": "adminPass",
        "access_ip_v4": "accessIPv4",
        "access_ip_v6": "accessIPv6",
        "disk_config": "OS-DCF:diskConfig",
    },
):
    """The image, and what else changes; what is left out stays as it is."""

    image_ref: Id
    name: inputs.Text | UnsetType = UNSET
    admin_pass: str | UnsetType = UNSET
    metadata: dict[inputs.Key, Annotated[str, Meta(max_length=255)]] | UnsetType = UNSET
    preserve_ephemeral: inputs.Flag | UnsetType = UNSET
    disk_config: str | UnsetType = UNSET
    access_ip_v4: str | UnsetType = UNSET
    access_ip_v6: str | UnsetType = UNSET
    personality: list[File] | UnsetType = UNSET
    description: Annotated[str, Meta(max_length=255)] | None | UnsetType = UNSET
    key_name: inputs.Text | None | UnsetType = UNSET
    user_data: UserData | None | UnsetType = UNSET
    trusted_image_certificates: Certificates | None | UnsetType = UNSET
    hostname: inputs.Text | UnsetType = UNSET

    versions = {
        "description": since(19),
        "key_name": since(54),
        "personality": until(56),
        "user_data": since(57),
        "trusted_image_certificates": since(63),
        "hostname": since(90),
    }


class RebuildBody(msgspec.Struct, forbid_unknown_fields=True):
    """Rebuild."""

    rebuild: Rebuild


def routes(database: Database, servers: Servers, rebuilder: ServerRebuilder, *, shows_passwords: bool) -> list[Route]:
    """Return the routes of the action."""

    async def rebuild(request: Request, id: str) -> Response:
        """Replace a server's disk by one made from an image."""
        flags = servers.flags(request)
        row = await authorized_server(database, request, id, with_service="host_status" in flags)
        wanted = _rebuild_request(request)
        if "trusted_certs" in wanted.changes:  # null removes them
            request.authorize(server_target(row), f"{POLICY}:trusted_certs")
        rebuilt, password = await rebuilder.rebuild(request.context, row, wanted)
        # The first has the state of the host's service.
        shown = cast(InstanceRow, {**row, **rebuilt, "admin_password": password})
        body = await servers.body(request, shown, REBUILT, flags | {"password"} if shows_passwords else flags)
        return Response(body=body, headers={"location": Links(request).of("servers", id)[0]["href"]})

    return action_routes(
        [
            ActionRoute(
                name="rebuild",
                handler=rebuild,
                policy=POLICY,
                body=RebuildBody,
                answer={"server": REBUILT},
                has_location=True,
            )
        ]
    )


def _rebuild_request(request: Request) -> RebuildRequest:
    """Return the RebuildRequest for a body; raise Invalid where a rule is broken that a type cannot say."""
    asked: Rebuild = request.body.rebuild
    changes: InstanceChanges = {}
    if asked.name is not UNSET:
        changes["display_name"] = inputs.name(asked.name, strip=request.is_v2)
    if asked.metadata is not UNSET:
        changes["metadata"] = asked.metadata
    if asked.disk_config is not UNSET:
        changes["disk_config"] = disk_config(asked.disk_config)
    if asked.access_ip_v4 is not UNSET:
        changes["access_ip_v4"] = access_address("accessIPv4", asked.access_ip_v4, 4)
    if asked.access_ip_v6 is not UNSET:
        changes["access_ip_v6"] = access_address("accessIPv6", asked.access_ip_v6, 6)
    if asked.description is not UNSET:
        changes["display_description"] = inputs.printable(asked.description, "description")
    if asked.key_name is not UNSET:
        changes["key_name"] = asked.key_name
    if asked.user_data is not UNSET:
        changes["user_data"] = None if asked.user_data is None else user_data(asked.user_data)
    if asked.trusted_image_certificates is not UNSET:
        changes["trusted_certs"] = certificates(asked.trusted_image_certificates)
    if asked.hostname is not UNSET:
        changes["hostname"] = hostname(asked.hostname, request.minor)
    return RebuildRequest(
        image_id=asked.image_ref,
        changes=changes,
        injected_files=[] if asked.personality is UNSET else injected_files(asked.personality),
        admin_password=None if asked.admin_pass is UNSET else asked.admin_pass,
        preserve_ephemeral=asked.preserve_ephemeral is not UNSET and inputs.flag(asked.preserve_ephemeral),
        allow_zero_disk=request.allows(rule=ZERO_DISK),
        reimages_volumes=request.minor >= 93,
    )
