"""The routes of the metadata service.

Guests have no tokens: the proxy of the guest's network signs which guest asks (`signed`). Only the list of versions
needs no signature. Paths are looked up here and not by the router, because EC2's tree depends on the guest.
"""

import asyncio
import random
from collections.abc import Iterable

import sqlalchemy as sa

from micronova.api.metadata import tree
from micronova.api.metadata.guests import Guests
from micronova.api.metadata.signed import Asker, Signatures
from micronova.db import instances, server_passwords
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.metadata import ec2, openstack
from micronova.metadata.facts import VendorData
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Invalid, MethodNotAllowed, NotFound

TEXT = "text/plain; charset=UTF-8"
JSON = "application/json"
PASSWORD = "password"
LONGEST_PASSWORD = 1020  # bytes: a password encrypted with an RSA key of 6144 bits, in base64
BODY_TIMEOUT = 30.0  # seconds

_VENDOR = (openstack.VENDOR_DATA, openstack.VENDOR_DATA_2)


class Metadata:
    """The handlers."""

    def __init__(
        self, database: Database, guests: Guests, signatures: Signatures, clock: Clock, chance: random.Random
    ) -> None:
        self._database = database
        self._guests = guests
        self._signatures = signatures
        self._clock = clock
        self._random = chance

    async def versions(self, request: Request) -> Response:
        """List EC2's versions; guests request this to find out whether there is a metadata service."""
        return _listing((*ec2.VERSIONS, ec2.LATEST))

    async def read(self, request: Request, path: str) -> Response:
        """Show a document or a directory."""
        asker = self._signatures.asker(request)
        names = _names(path)
        if names[:1] == ["openstack"]:
            return await self._openstack(asker, names[1:])
        if names[:1] == ["ec2"]:
            names = names[1:]
        facts = await self._guests.facts(asker)
        if not names:
            return _listing((*ec2.VERSIONS, ec2.LATEST))
        found = tree.look_up(facts, names[0], names[1:])
        if found is None:
            raise _no_document(path)
        return Response(body=found, content_type=TEXT)

    async def write(self, request: Request, path: str) -> Response:
        """Store the password that the guest generated; it can be posted once."""
        asker = self._signatures.asker(request)
        names = _names(path)
        if not _is_password(names):
            raise MethodNotAllowed("The only document that can be posted is openstack/latest/password.")
        facts = await self._guests.facts(asker)
        password = await _read_password(request)
        if password:
            kept = await self._database.write(self._keep, facts.instance.uuid, password)
            if not kept:
                raise Conflict("There is a password already: it can be posted once.")
        return Response(body=b"", content_type=TEXT)

    def _keep(self, conn: sa.Connection, uuid: str, password: str) -> bool:
        if instances.lock(conn, uuid) is None:  # deleted meanwhile: store nothing
            raise NotFound("There is no such server.")
        return server_passwords.put_once(conn, uuid, password, micros(self._clock.now()))

    async def _openstack(self, asker: Asker, names: list[str]) -> Response:
        facts = await self._guests.facts(asker)
        if not names:
            return _listing((*openstack.VERSIONS, openstack.LATEST))
        version = names[0]
        if version not in (*openstack.VERSIONS, openstack.LATEST) or len(names) > 2:
            raise _no_document("/".join(["openstack", *names]))
        known = openstack.names(facts, version, static_vendor_data=self._guests.static_vendor_data)
        has_password = _is_password(["openstack", version, PASSWORD])
        if len(names) == 1:
            return _listing([*known, PASSWORD] if has_password else known)
        name = names[1]
        if name == PASSWORD and has_password:
            kept = await self._database.read(server_passwords.get, facts.instance.uuid)
            return Response(body=kept.encode(), content_type=TEXT)
        if name not in known:
            raise _no_document("/".join(["openstack", *names]))
        vendor_data = await self._guests.vendor_data(facts) if name in _VENDOR else VendorData()
        seed = self._random.randbytes(openstack.SEED_BYTES)
        body = openstack.document(facts, version, name, vendor_data, seed)
        return Response(body=body, content_type=JSON if name.endswith(".json") else TEXT)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _is_password(names: list[str]) -> bool:
    if len(names) != 3 or names[0] != "openstack" or names[2] != PASSWORD:
        return False
    return names[1] == openstack.LATEST or (names[1] in openstack.VERSIONS and names[1] >= openstack.GRIZZLY)


async def _read_password(request: Request) -> str:
    http = request.falcon
    body = b""
    if (http.content_length or 0) <= LONGEST_PASSWORD:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await http.stream.read(LONGEST_PASSWORD + 1)
        except TimeoutError:
            raise Invalid(f"The body did not arrive within {BODY_TIMEOUT:g} seconds.") from None
    if len(body) > LONGEST_PASSWORD or (http.content_length or 0) > LONGEST_PASSWORD:
        raise Invalid(f"Request is too large: a password may have {LONGEST_PASSWORD} bytes.")
    try:
        password = body.decode()
    except UnicodeDecodeError:
        password = "\x00"
    if "\x00" in password:
        raise Invalid("The password must be text: encrypt it with the server's public key and send it in base64.")
    return password


def _listing(names: Iterable[str]) -> Response:
    return Response(body="\n".join(names).encode(), content_type=TEXT)


def _no_document(path: str) -> NotFound:
    return NotFound(f"There is no document {path[:128]} for this server.")


def routes(
    database: Database, guests: Guests, signatures: Signatures, clock: Clock, chance: random.Random
) -> list[Route]:
    """Declare the routes; `chance` generates the guests' random seeds."""
    h = Metadata(database, guests, signatures, clock, chance)
    return [
        *(Route(method=method, path="", handler=h.versions, policy=None) for method in ("GET", "HEAD")),
        *(Route(method=method, path="/{path:path}", handler=h.read, policy=None) for method in ("GET", "HEAD")),
        Route(method="POST", path="/{path:path}", handler=h.write, policy=None, raw_body=True),
    ]
