"""Console links: the API creates them for users, and shows to admins what a token stands for.

A link has a token, of which only the digest is kept; it is good for one console of one server, for a while.
"""

import random
import urllib.parse

import msgspec
import sqlalchemy as sa

from micronova.db import console_tokens, instances
from micronova.db.engine import Database
from micronova.objects import states
from micronova.objects.clock import Clock, micros
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol, token_digest
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceRow
from micronova.servers.guest_queries import GuestQueries

PROTOCOLS: dict[str, str] = {
    "novnc": "vnc",
    "xvpvnc": "vnc",
    "spice-html5": "spice",
    "spice-direct": "spice",
    "rdp-html5": "rdp",
    "serial": "serial",
    "webmks": "mks",
}
"""The protocol of each console type of the API."""

SERVED: dict[str, ConsoleProtocol] = {
    "novnc": "vnc", "spice-html5": "spice", "spice-direct": "spice", "serial": "serial",
}  # fmt: skip
"""The console types that clouds may offer."""


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The base URLs of links, and how long links are valid."""

    token_ttl: float
    vnc_base_url: str = ""  # empty: the address at which the API was reached
    spice_base_url: str = ""
    spice_direct_base_url: str = ""  # empty: this cloud has no consoles of the type spice-direct
    serial_base_url: str = ""


class ConsoleLinks:
    """Creates and finds console links."""

    def __init__(
        self, guests: GuestQueries, database: Database, clock: Clock, random: random.Random, settings: LinkSettings
    ) -> None:
        self._guests = guests
        self._database = database
        self._clock = clock
        self._random = random
        self._settings = settings

    async def create(self, context: RequestContext, row: InstanceRow, kind: str, root_url: str) -> str:
        """Return a link to a server's console; `root_url` is scheme://host:port of the API as the user reaches it."""
        protocol = SERVED.get(kind)
        direct = kind == "spice-direct"
        if protocol is None or (direct and not self._settings.spice_direct_base_url):
            raise Invalid(f"Unavailable console type {kind}: this cloud has {self._offered()}.")
        if row["task_state"] == states.DELETING:
            raise Conflict(f"Instance {row['uuid']} is being deleted.")
        found = await self._guests.console_endpoint(context, row, protocol)  # the host refuses if there is none
        if direct and (not found.port or found.secret):
            raise Invalid(
                f"Unavailable console type {kind}: the host of instance {row['uuid']} lets only the cloud's own "
                "console proxy connect to its consoles."
            )
        assert row["host"] is not None  # it has answered
        token = new_uuid(self._random)
        now = self._clock.now()
        await self._database.write(
            console_tokens.insert,
            {
                "token_digest": token_digest(token),
                "instance_uuid": row["uuid"],
                "host": row["host"],
                "protocol": kind if direct else protocol,
                "created_at": micros(now),
                "expires_at": micros(now + self._settings.token_ttl),
            },
        )
        if protocol == "vnc":
            return vnc_url(self._settings.vnc_base_url or f"{root_url}/console/vnc_lite.html", token)
        if direct:
            return page_url(self._settings.spice_direct_base_url, token)
        if protocol == "spice":
            return page_url(self._settings.spice_base_url or f"{root_url}/console/spice_auto.html", token)
        return page_url(self._settings.serial_base_url or f"{root_url}/console/serial.html", token)

    def _offered(self) -> str:
        return f"novnc, spice-html5{', spice-direct' if self._settings.spice_direct_base_url else ''} and serial"

    async def show(self, context: RequestContext, token: str) -> tuple[str, str, ConsoleEndpoint, bool]:
        """Return the server, its host and the console of a valid token, and whether its type is spice-direct."""
        found, row = await self._database.read(self._find, token)
        endpoint = await self._guests.console_endpoint(context, row, found["protocol"])
        return row["uuid"], found["host"], endpoint, found["is_direct"]

    def _find(self, conn: sa.Connection, token: str) -> tuple[console_tokens.ValidToken, InstanceRow]:
        found = console_tokens.find(conn, token_digest(token), micros(self._clock.now()))
        row = None if found is None else instances.get(conn, found["instance_uuid"])
        if found is None or row is None:
            raise NotFound("Token not found: there is none, or it has expired.")
        return found, row


def vnc_url(base: str, token: str) -> str:
    """Return a link in the form that noVNC's own pages read too: the WebSocket's path contains the token."""
    folder = urllib.parse.urlsplit(base).path.rpartition("/")[0].strip("/")
    path = f"{folder}/websockify?token={token}" if folder else f"websockify?token={token}"
    return f"{base}{'&' if '?' in base else '?'}path={urllib.parse.quote(path, safe='')}"


def page_url(base: str, token: str) -> str:
    """Return a link to a page, or to the WebSocket itself if that is the base."""
    return f"{base}{'&' if '?' in base else '?'}token={token}"
