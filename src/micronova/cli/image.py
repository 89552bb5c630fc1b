"""`micronova image`: the test image, made and registered."""

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from micronova.cli.state import StateDirectory, default_directory
from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from micronova.embedded.image.service import ImageService

log = logging.getLogger(__name__)

IMAGE = "test-image"
BOOTABLE = "bootable"  # the edition that real guests boot
PROPERTIES = {"os_type": "linux", "os_distro": "micronova-test", "architecture": "x86_64"}


def default_cache() -> Path:
    """Return the default directory of built images."""
    if os.geteuid() == 0:
        return Path("/var/cache/micronova")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "micronova"


async def ensure_test_image(images: "ImageService", driver: str) -> None:
    """Make sure that test-image exists: one that boots if guests are real, else an empty disk."""
    if driver != "libvirt":
        await images.ensure_image(
            IMAGE, bytes(512 * 1024), owner="", properties={"os_distro": "none"}, instead_of=(BOOTABLE,)
        )
        return
    if await images.has_image(IMAGE, owner="", edition=BOOTABLE):
        return
    from micronova.testimage.builder import build

    click.echo("Building the test image (once; some seconds)", err=True)
    cache = default_cache()
    try:
        made = await asyncio.to_thread(build, cache / "testimage.qcow2", cache)
    except (MicronovaError, OSError) as error:
        # build-test uses another name: two images named test-image would be ambiguous after the next start.
        log.warning(
            "there is no %s: %s The next start tries again; until then, use the image of `micronova image build-test`, "
            "which is named micronova-test.",
            IMAGE,
            error,
        )
        return
    await images.ensure_image(
        IMAGE,
        await asyncio.to_thread(made.read_bytes),
        owner="",
        disk_format="qcow2",
        properties=PROPERTIES,
        edition=BOOTABLE,
        instead_of=("",),
    )


def build_test(output: Path | None, cache: Path | None, directory: Path | None, name: str) -> None:
    """Build the test image; write it to a file, or register it with the cloud that runs in DIR."""
    from micronova.testimage.builder import build

    place = StateDirectory((directory or default_directory()).absolute())
    if output is None and place.running_pid() is None:
        raise MicronovaError(
            f"No cloud runs in {place.path} to register the image with: name one with --dir, or a file with --output."
        )
    kept = (cache or default_cache()).absolute()
    if output is not None:
        build(output.absolute(), kept)
        click.echo(f"{output} ({output.stat().st_size >> 20} MiB, qcow2)")
        return
    made = build(kept / "testimage.qcow2", kept)
    image_id, fresh = asyncio.run(_register(place, made.read_bytes(), name))
    click.echo(f"{name} {image_id} {'registered' if fresh else 'was registered before'}")


async def _register(place: StateDirectory, content: bytes, name: str) -> tuple[str, bool]:
    """Make a public image with this content unless there is one; return its id, and whether it is new."""
    from micronova.cli.user_session import open_session
    from micronova.http.client import raise_for

    async with open_session(place.path / "clouds.yaml", "micronova") as session:
        digest = hashlib.sha512(content).hexdigest()
        query = f"/v2/images?name={quote(name, safe='')}&status=active"
        for found in (await session.request("image", "GET", query))["images"]:
            if found["os_hash_value"] == digest:
                return str(found["id"]), False
        body: dict[str, Any] = {"name": name, "disk_format": "qcow2", "container_format": "bare"}
        image = await session.request("image", "POST", "/v2/images", {**body, "visibility": "public", **PROPERTIES})
        headers = {"x-auth-token": await session.token(), "content-type": "application/octet-stream"}
        path = f"/v2/images/{image['id']}/file"
        raise_for(await session.transport("image").request("PUT", path, headers, content), "PUT", path)
        return str(image["id"]), True
