"""Actions that make an image of a server: createImage, createBackup."""

from dataclasses import replace

import msgspec
from msgspec import field

from micronova.api import inputs
from micronova.api.compute.action_routes import ActionRoute, action_routes
from micronova.api.compute.server_lookup import authorized_server, server_target
from micronova.api.compute.server_metadata import Items
from micronova.api.links import Links
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.objects.errors import Invalid
from micronova.servers.images import ServerImages


class CreateImage(msgspec.Struct, forbid_unknown_fields=True):
    """The image to make of a server."""

    name: inputs.Text
    metadata: Items = {}


class CreateImageBody(msgspec.Struct, forbid_unknown_fields=True):
    """Make an image of a server."""

    value: CreateImage = field(name="createImage")


class CreateBackup(msgspec.Struct, forbid_unknown_fields=True):
    """The backup to make of a server, and how many of its type are kept."""

    name: inputs.Text
    backup_type: str
    rotation: inputs.Whole
    metadata: Items = {}


class CreateBackupBody(msgspec.Struct, forbid_unknown_fields=True):
    """Make a backup of a server."""

    value: CreateBackup = field(name="createBackup")


def routes(database: Database, images: ServerImages) -> list[Route]:
    """Return the routes of the actions."""

    async def create_image(request: Request, id: str) -> Response:
        """Make an image of a server."""
        row = await authorized_server(database, request, id)
        wanted: CreateImage = request.body.value
        name = inputs.name(wanted.name, strip=request.is_v2)
        await _check_metadata(images, request, wanted.metadata)
        if await images.is_volume_backed(row):
            request.authorize(server_target(row), "os_compute_api:servers:create_image:allow_volume_backed")
            return _answer(request, await images.of_volumes(request.context, row, name, wanted.metadata))
        return _answer(request, await images.snapshot(request.context, row, name, wanted.metadata))

    async def create_backup(request: Request, id: str) -> Response:
        """Make a backup of a server, and delete its oldest ones."""
        row = await authorized_server(database, request, id)
        wanted: CreateBackup = request.body.value
        name = inputs.name(wanted.name, strip=request.is_v2)
        rotation = inputs.whole(wanted.rotation, "rotation")
        await _check_metadata(images, request, wanted.metadata)
        if await images.is_volume_backed(row):
            raise Invalid("Backup is not supported for volume-backed instances.")
        image = await images.backup(
            request.context, row, name, wanted.metadata, backup_type=wanted.backup_type, rotation=rotation
        )
        return _answer(request, image, kept=rotation > 0)

    made = [
        ActionRoute(
            name="createImage",
            handler=create_image,
            policy="os_compute_api:servers:create_image",
            body=CreateImageBody,
        ),
        ActionRoute(
            name="createBackup", handler=create_backup, policy="os_compute_api:os-create-backup", body=CreateBackupBody
        ),
    ]
    return action_routes(
        [
            *(replace(action, versions=until(44)) for action in made),
            *(replace(action, versions=since(45), answer={"image_id": str}) for action in made),
        ]
    )


async def _check_metadata(images: ServerImages, request: Request, metadata: dict[str, str]) -> None:
    if request.minor < 39:
        await images.check_metadata_quota(request.context, metadata)


def _answer(request: Request, image: str, *, kept: bool = True) -> Response:
    """Return the answer that names a new image: in its body since 2.45; before in a header, if the image is kept."""
    if request.minor >= 45:
        return Response(body={"image_id": image})
    return Response(headers={"location": Links(request).of("images", image)[0]["href"]} if kept else {})
