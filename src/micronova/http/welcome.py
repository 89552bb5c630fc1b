"""The page that a browser shows at `/`: which APIs are here, and how to start to use them.

It is the same for everybody who can reach the port, so it names no file, user or address of this cloud. It loads
nothing from elsewhere and needs no JavaScript; its headers forbid both.
"""

import base64
import functools
import hashlib
import html
import importlib.resources
import re
from collections.abc import Iterable

from micronova.http.asgi import Scope, Send, header

# What is mounted at a path -> its name, and what it is for.
_SERVICES = {
    "/identity": ("Identity", "tokens, users, projects, and the catalog of all services"),
    "/compute": ("Compute", "servers, flavors, key pairs, quotas, hosts"),
    "/image": ("Image", "the disks that servers boot from"),
    "/network": ("Network", "networks, subnets, ports, routers, floating IPs, security groups"),
    "/volume": ("Block storage", "volumes, their types, snapshots and attachments"),
    "/placement": ("Placement", "what resource providers have, and who holds it"),
    "/healthcheck": ("Health", "whether this process answers; /healthcheck/ready: whether it has what it needs"),
    "/metadata": ("Metadata", "what a server reads about itself while it boots"),
    "/console": ("Consoles", "screens and serial ports of servers, by a link from the compute API"),
}
_WITHOUT_INDEX = ("/console",)  # nothing to see without a console's token

_ICON_HEADERS = [(b"content-type", b"image/svg+xml"), (b"cache-control", b"max-age=86400")]


def is_wanted(scope: Scope) -> bool:
    """Return whether a request is a browser's for the page or for its icon; programs ask for JSON or for anything."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    if scope["path"] == "/favicon.ico":
        return True
    accept = header(scope, b"accept")
    return scope["path"] == "/" and "text/html" in accept and "json" not in accept


async def answer(scope: Scope, send: Send, mounts: Iterable[str]) -> None:
    """Send the page, or the icon."""
    if scope["path"] == "/favicon.ico":
        headers, body = _ICON_HEADERS, _file("icon.svg")
    else:
        headers, body = _page(tuple(sorted(mounts)))
    headers = [*headers, (b"content-length", str(len(body)).encode()), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


@functools.cache
def _page(mounts: tuple[str, ...]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    text = _file("welcome.html").decode()
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
        (b"vary", b"Accept"),
    ]
    return headers, text.replace("SERVICES", "\n    ".join(_row(mount) for mount in mounts)).encode()


def _row(mount: str) -> str:
    name, purpose = _SERVICES.get(mount, (mount.lstrip("/").capitalize(), ""))
    path = f"<code>{html.escape(mount)}</code>"
    link = path if mount in _WITHOUT_INDEX else f'<a href="{html.escape(mount)}/">{path}</a>'
    return f"<tr><td>{link}</td><td>{html.escape(name)}</td><td>{html.escape(purpose)}</td></tr>"


@functools.cache
def _file(name: str) -> bytes:
    return (importlib.resources.files("micronova.http") / "pages" / name).read_bytes()
