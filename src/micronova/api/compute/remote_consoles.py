"""Remote consoles of servers: links to them, and the host and port behind a link's token.

Until 2.5 each kind of console is an action; since 2.6 there is one resource with a protocol and a type.
"""

from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import field

from micronova.api.compute.action_routes import ActionRoute, action_routes
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import NoQuery
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import Range, since, until
from micronova.objects.errors import Invalid
from micronova.servers.consoles import PROTOCOLS, ConsoleLinks

RULE = "os_compute_api:os-remote-consoles"
TOKEN_RULE = "os_compute_api:os-console-auth-tokens"

TLS_PORT = 99
"""The minor version since which the answer about a token of the type spice-direct has the console's port with TLS."""

_CONSOLE = {"instance_uuid": str, "host": str, "port": int, "internal_access_path": str | None}

_LATER = {"mks": 8, "webmks": 8, "spice-direct": 99}
"""Protocols and types that came after 2.6, with their first minor version."""


class VncType(msgspec.Struct, forbid_unknown_fields=True):
    """Which kind of VNC console."""

    type: Literal["novnc", "xvpvnc"]


class VncBody(msgspec.Struct, forbid_unknown_fields=True):
    """A VNC console, as an action."""

    value: VncType = field(name="os-getVNCConsole")


class SpiceType(msgspec.Struct, forbid_unknown_fields=True):
    """Which kind of SPICE console."""

    type: Literal["spice-html5"]


class SpiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """A SPICE console, as an action."""

    value: SpiceType = field(name="os-getSPICEConsole")


class SerialType(msgspec.Struct, forbid_unknown_fields=True):
    """Which kind of serial console."""

    type: Literal["serial"]


class SerialBody(msgspec.Struct, forbid_unknown_fields=True):
    """A serial console, as an action."""

    value: SerialType = field(name="os-getSerialConsole")


class RemoteConsole(msgspec.Struct, forbid_unknown_fields=True):
    """Which console."""

    protocol: Literal["vnc", "spice", "serial", "rdp", "mks"]
    type: Literal["novnc", "xvpvnc", "spice-html5", "spice-direct", "serial", "rdp-html5", "webmks"]


class RemoteConsoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """The console to create a link to."""

    remote_console: RemoteConsole


class RemoteConsoles:
    """The handlers."""

    def __init__(self, database: Database, links: ConsoleLinks) -> None:
        self._database = database
        self._links = links

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Make a link to a console."""
        row = await authorized_server(self._database, request, id)
        wanted: RemoteConsole = request.body.remote_console
        for name in ("protocol", "type"):
            value = getattr(wanted, name)
            if request.minor < _LATER.get(value, 0):
                raise Invalid(f"Invalid input for field/attribute {name}: {value} exists since 2.{_LATER[value]}.")
        if PROTOCOLS[wanted.type] != wanted.protocol:
            raise Invalid(
                f"Invalid input for field/attribute type: {wanted.type} is a console of the protocol "
                f"{PROTOCOLS[wanted.type]}, not {wanted.protocol}."
            )
        url = await self._links.create(request.context, row, wanted.type, _root(request))
        return {"remote_console": {"protocol": wanted.protocol, "type": wanted.type, "url": url}}

    async def act(self, request: Request, id: str) -> dict[str, Any]:
        """Make a link to a console by an action (until 2.5)."""
        row = await authorized_server(self._database, request, id)
        kind = request.body.value.type
        url = await self._links.create(request.context, row, kind, _root(request))
        return {"console": {"type": kind, "url": url}}

    async def show_token(self, request: Request, token: str) -> dict[str, Any]:
        """Show the host and port of a token; until 2.30 only tokens of RDP consoles, which no longer exist."""
        if request.minor < 31:
            raise Invalid("Before 2.31 only tokens of RDP consoles could be shown, and there are none.")
        uuid, host, endpoint, direct = await self._links.show(request.context, token)
        console = {
            "instance_uuid": uuid,
            "host": endpoint.host or host,
            "port": endpoint.port,
            "internal_access_path": endpoint.path or None,
        }
        if direct and request.minor >= TLS_PORT:
            console["tls_port"] = None  # consoles here have no port with TLS
        return {"console": console}


def _root(request: Request) -> str:
    """Return scheme://host:port as the caller sees this cloud."""
    service = request.service
    return request.base_url.removesuffix(service.mount + service.prefix)


def routes(database: Database, links: ConsoleLinks) -> list[Route]:
    """Declare the routes of consoles."""
    handlers = RemoteConsoles(database, links)
    actions: list[tuple[str, Any]] = [
        ("os-getVNCConsole", VncBody),
        ("os-getSPICEConsole", SpiceBody),
        ("os-getSerialConsole", SerialBody),
    ]
    token = partial(
        Route, method="GET", path="/os-console-auth-tokens/{token}", handler=handlers.show_token, policy=TOKEN_RULE,
        query=NoQuery, strict_query=since(99),
    )  # fmt: skip
    return [
        Route(
            method="POST", path="/servers/{id}/remote-consoles", handler=handlers.create, policy=RULE,
            versions=since(6), body=RemoteConsoleBody, checks_policy=True, errors=(501,),
            answer={"remote_console": {"protocol": str, "type": str, "url": str}},
        ),
        *action_routes(
            ActionRoute(
                name=action, handler=handlers.act, policy=RULE, body=body, status=200, versions=Range(0, 5),
                answer={"console": {"type": str, "url": str}},
            )
            for action, body in actions
        ),
        token(versions=until(TLS_PORT - 1), answer={"console": _CONSOLE}),
        token(versions=since(TLS_PORT), answer={"console": {**_CONSOLE, "tls_port?": int | None}}),
    ]  # fmt: skip
