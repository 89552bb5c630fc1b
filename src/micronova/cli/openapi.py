"""`micronova openapi`: prints the OpenAPI document of the compute API."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from micronova.cli.names import COMPUTE_ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import Settings, load
from micronova.http.service import Route

if TYPE_CHECKING:
    from micronova.api.installed_extensions import Extensions


def openapi(microversion: str, config: Path | None) -> None:
    """Print the document of a microversion, with the routes that the settings switch on and those of extensions."""
    from micronova.api.compute.api_document import document, minor_of
    from micronova.api.compute.extensions import load_extensions

    minor = minor_of(microversion)
    found = document(asyncio.run(composed_routes(load(config), load_extensions())), minor)
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


async def composed_routes(settings: Settings, extensions: "Extensions") -> list[Route]:
    """Return the routes of an API with these settings, which is composed over an empty cloud and never started."""
    from micronova.cli.roles.api import declared_routes

    apart = {
        "database": msgspec.structs.replace(settings.database, connection=""),
        "default": msgspec.structs.replace(settings.default, transport_url="local://", control_users=()),
    }
    with tempfile.TemporaryDirectory(prefix="micronova-openapi-") as place:
        process = Process(msgspec.structs.replace(settings, **apart), COMPUTE_ROLES, StateDirectory(Path(place)))
        process.directory.create()
        process.keys = process.directory.keys()
        process.cloud_id = process.keys.cloud_id
        try:
            await process.connect(upgrade=True)
            return declared_routes(process, extensions)
        finally:
            await process.stop()
