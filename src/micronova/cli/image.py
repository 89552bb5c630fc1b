"""`micronova image`: the test image, made and registered."""

import asyncio
import hashlib
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from micronova.cli.state import StateDirectory, default_directory
from micronova.objects.errors import MicronovaError

log = logging.getLogger(__name__)

IMAGE = "test-image"
BOOTABLE = "bootable"  # the edition of it that real guests start from
PROPERTIES = {"os_type": "linux", "os_distro": "micronova-test", "architecture": "x86_64"}


def default_cache() -> Path:
    """Return where images that were built are kept when nothing else is said."""
    if os.geteuid() == 0:
        return Path("/var/cache/micronova")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "micronova"


async def ensure_test_image(images: Any, driver: str) -> None:
    """Have the image that every cloud begins with: one that boots where guests are real, else a disk of nothing."""
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
        log.warning("there is no %s: %s Try `micronova image build-test` later, or upload another.", IMAGE, error)
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
    """Make a public image with this content, unless there is one; return its id, and whether it is new."""
    import yaml

    from micronova.http.client import HTTPTransport, ServiceClient, raise_for
    from micronova.identity.client import ServiceToken
    from micronova.objects.clock import SystemClock

    auth = yaml.safe_load((place.path / "clouds.yaml").read_text())["clouds"]["micronova"]["auth"]
    root = str(auth["auth_url"]).removesuffix("/identity/v3")
    identity, images = HTTPTransport(f"{root}/identity"), HTTPTransport(f"{root}/image", timeout=600.0)
    token = ServiceToken(
        identity,
        username=auth["username"],
        password=auth["password"],
        project_name=auth["project_name"],
        user_domain_name=auth["user_domain_name"],
        project_domain_name=auth["project_domain_name"],
        now=SystemClock().now,
    )
    client = ServiceClient(images, token.get)
    try:
        digest = hashlib.sha512(content).hexdigest()
        for found in (await client.request("GET", f"/v2/images?name={quote(name, safe='')}&status=active"))["images"]:
            if found["os_hash_value"] == digest:
                return str(found["id"]), False
        body: dict[str, Any] = {"name": name, "disk_format": "qcow2", "container_format": "bare"}
        image = await client.request("POST", "/v2/images", {**body, "visibility": "public", **PROPERTIES})
        headers = {"x-auth-token": await token.get(), "content-type": "application/octet-stream"}
        path = f"/v2/images/{image['id']}/file"
        raise_for(await images.request("PUT", path, headers, content), "PUT", path)
        return str(image["id"]), True
    finally:
        await identity.close()
        await images.close()
