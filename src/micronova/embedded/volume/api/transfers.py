"""Transfers: a project offers a volume, and another one that has the key accepts it."""

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from micronova.embedded.volume import states
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.listing import Links
from micronova.embedded.volume.api.request_bodies import Body, Flag, Text, Uuid, stripped, truth, uuid
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import AVAILABLE, AWAITING_TRANSFER, ResourceColumns, Snapshot, Transfer, Volume
from micronova.embedded.volume.store import (
    operation_queries,
    quotas,
    snapshot_queries,
    transfer_queries,
    type_queries,
    volume_queries,
)
from micronova.embedded.volume.tables import transfers
from micronova.http.paging import iso_micros
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.ids import UUID


class NewTransfer(Body):
    """The transfer to create."""

    versions = {"no_snapshots": since(55)}

    volume_id: Uuid
    name: Text | None = None
    no_snapshots: Flag | None = None


class NewTransferBody(Body):
    """The body of a create."""

    transfer: NewTransfer


class Acceptance(Body):
    """The key of a transfer."""

    auth_key: Text | int


class AcceptBody(Body):
    """The body of an acceptance."""

    accept: Acceptance


class TransferHandlers:
    """The handlers of transfers, at the path of old clients and at that of 3.55 and later."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *self._routes_at("/os-volume-transfer", {}),
            *self._routes_at("/volume-transfers", {"versions": since(55)}),
        ]

    def _routes_at(self, all_: str, more: dict[str, Any]) -> list[Route]:
        one = f"{all_}/{{transfer_id}}"
        route = partial(Route, checks_policy=True, **more)
        get, get_all = "volume:get_transfer", "volume:get_all_transfers"
        return [
            Route(method="GET", path=all_, handler=partial(self._list, all_, "", _brief), policy=get_all, **more),
            Route(
                method="GET",
                path=f"{all_}/detail",
                handler=partial(self._list, all_, "/detail", _full),
                policy=get_all,
                **more,
            ),
            route(
                method="POST",
                path=all_,
                handler=partial(self.create, all_),
                policy="volume:create_transfer",
                body=NewTransferBody,
                status=202,
            ),
            route(method="GET", path=one, handler=partial(self.show, all_), policy=get),
            route(method="DELETE", path=one, handler=self.delete, policy="volume:delete_transfer", status=202),
            Route(
                method="POST",
                path=f"{one}/accept",
                handler=partial(self.accept, all_),
                policy="volume:accept_transfer",
                body=AcceptBody,
                status=202,
                **more,
            ),
        ]

    async def _list(
        self, base: str, rest: str, view: Callable[[Request, str, Transfer], dict[str, Any]], request: Request
    ) -> dict[str, Any]:
        """List the transfers that the caller's project offers."""
        query = request.raw_query
        page = listing.read_page(query, transfer_queries.SORTABLE, self._core.settings.max_limit)
        conditions = listing.own_project(request, transfers.c.project_id)
        conditions += [transfers.c[name].in_(query[name]) for name in ("name", "volume_id") if name in query]
        found = await self._core.database.read(transfer_queries.list_transfers, page, conditions)
        path = f"{base.lstrip('/')}{rest}"
        return listing.answer(request, "transfers", path, found, partial(view, request, base))

    async def show(self, base: str, request: Request, transfer_id: str) -> dict[str, Any]:
        """Show a transfer that the caller's project offers."""
        return {"transfer": _full(request, base, await self._load(request, transfer_id))}

    async def create(self, base: str, request: Request) -> dict[str, Any]:
        """Offer a volume; the answer has the key, and no other does."""
        asked: NewTransfer = request.body.transfer
        volume_id, key, salt = uuid(asked.volume_id), secrets.token_hex(16), secrets.token_hex(8)
        new_id = self._core.new_id()

        async def try_once() -> Transfer:
            volume = await self._core.load_volume(request, volume_id)
            states.check_volume(volume, "transfer")
            made = Transfer(
                id=new_id,
                volume_id=volume.id,
                project_id=volume.project_id,
                name=stripped(asked.name),
                salt=salt,
                key_hash=_hash(salt, key),
                no_snapshots=truth(asked.no_snapshots or False),
                created_at=self._core.now(),
            )
            if volume.encryption_key_id is not None and request.minor < 70:
                raise Invalid(f"Invalid volume: Volume {volume.id} is encrypted: its transfer needs 3.70 or later.")
            found = await self._core.database.read(snapshot_queries.of_volume, volume.id)
            _check_snapshots(volume, found, made.no_snapshots)
            await self._core.database.write(_insert, volume, made)
            return made

        made = await retry_or_conflict(f"volume {volume_id}", try_once)
        return {"transfer": {**_full(request, base, made), "auth_key": key}}

    async def delete(self, request: Request, transfer_id: str) -> None:
        """Take an offer back."""

        async def try_once() -> None:
            found = await self._load(request, transfer_id)
            volume = await self._core.database.read(volume_queries.get, found.volume_id)
            await self._core.database.write(_delete, found, volume, self._core.now())

        await retry_or_conflict(f"transfer {transfer_id}", try_once)

    async def accept(self, base: str, request: Request, transfer_id: str) -> dict[str, Any]:
        """Take a volume over, with its snapshots unless the offer excludes them."""
        key = str(request.body.accept.auth_key)

        async def try_once() -> Transfer:
            found = (
                await self._core.database.read(transfer_queries.get, transfer_id)
                if UUID.fullmatch(transfer_id)
                else None
            )
            # A caller without the key learns nothing about a transfer, not even that there is one.
            if found is None or not hmac.compare_digest(found.key_hash, _hash(found.salt, key)):
                raise NotFound(f"Transfer {transfer_id[:64]} could not be found, or the key is wrong.")
            volume = await self._core.database.read(volume_queries.get, found.volume_id)
            if volume is None or volume.status != AWAITING_TRANSFER:
                raise Invalid(f"The volume of transfer {transfer_id} is not {AWAITING_TRANSFER} any more.")
            context = request.context
            if not await self._core.database.read(
                type_queries.usable, volume.volume_type_id, context.project_id, context.is_admin
            ):
                raise Invalid(f"The volume of transfer {transfer_id} has a type that your project may not use.")
            await self._core.database.write(self._take_over, found, volume, request.context)
            return found

        accepted = await retry_or_conflict(f"transfer {transfer_id}", try_once)
        return {"transfer": _brief(request, base, accepted)}

    def _take_over(self, conn: sa.Connection, transfer: Transfer, volume: Volume, context: RequestContext) -> None:
        now, defaults = self._core.now(), self._core.settings.quotas
        moved = snapshot_queries.of_volume(conn, volume.id)
        _check_snapshots(volume, moved, transfer.no_snapshots)
        quotas.check_size(conn, context.project_id, volume.size, defaults)
        owner: ResourceColumns = {"project_id": context.project_id, "user_id": context.user_id}
        volume_queries.update(conn, volume, {**owner, "status": AVAILABLE}, now)
        _check_unread(conn, volume)
        snapshot_queries.touch_of_volume(conn, volume.id, owner, now)
        transfer_queries.delete(conn, transfer.id)
        if volume.project_id == context.project_id:
            return
        amounts = Counter(quotas.volume(volume.volume_type_id, volume.size))
        for snapshot in moved:
            amounts.update(quotas.snapshot(snapshot.volume_type_id, snapshot.size))
        for project in sorted((volume.project_id, context.project_id)):  # the order in which usage rows are locked
            if project == context.project_id:
                quotas.charge(conn, project, amounts, defaults)
            else:
                quotas.release(conn, project, amounts)

    async def _load(self, request: Request, transfer_id: str) -> Transfer:
        see = "volume:get_transfer"
        return await self._core.load(request, transfer_queries.get, transfer_id, noun="Transfer", see=see)


def _insert(conn: sa.Connection, volume: Volume, made: Transfer) -> None:
    volume_queries.update(conn, volume, {"status": states.VOLUME_ACTIONS["transfer"].during}, made.created_at)
    _check_unread(conn, volume)
    if not transfer_queries.insert(conn, made):
        raise Invalid(f"Volume {volume.id} is being transferred already.")


def _delete(conn: sa.Connection, transfer: Transfer, volume: Volume | None, now: int) -> None:
    if volume is not None and volume.status == AWAITING_TRANSFER:
        volume_queries.update(conn, volume, {"status": AVAILABLE}, now)
    transfer_queries.delete(conn, transfer.id)


def _check_unread(conn: sa.Connection, volume: Volume) -> None:
    """Raise Invalid if a volume is attached, or is copied: the copy would have what the next project writes.

    The transaction has already changed the volume, so an operation that is recorded later finds it unavailable.
    """
    if volume.attachments or operation_queries.uses(conn, volume.id):
        raise Invalid(f"Invalid volume: Volume {volume.id} is attached or being read: it cannot be transferred yet.")


def _check_snapshots(volume: Volume, found: Sequence[Snapshot], excluded: bool) -> None:
    """Raise Invalid unless the snapshots of a volume can go with it."""
    if found and excluded:
        raise Invalid(f"Volume {volume.id} has snapshots, which the transfer excludes: delete them first.")
    for snapshot in found:
        if snapshot.status != AVAILABLE:
            raise Invalid(f"Snapshot {snapshot.id} is {snapshot.status}: to be transferred it must be {AVAILABLE}.")


def _hash(salt: str, key: str) -> str:
    return hashlib.sha256(f"{salt}{key}".encode()).hexdigest()  # the key has 128 random bits


def _brief(request: Request, base: str, transfer: Transfer) -> dict[str, Any]:
    return {
        "id": transfer.id,
        "volume_id": transfer.volume_id,
        "name": transfer.name,
        "links": Links(request).of(base.lstrip("/"), transfer.id),
    }


def _full(request: Request, base: str, transfer: Transfer) -> dict[str, Any]:
    shown = {**_brief(request, base, transfer), "created_at": iso_micros(transfer.created_at)}
    if request.minor >= 55:
        shown["no_snapshots"] = transfer.no_snapshots
    if request.minor >= 57:
        shown |= {"source_project_id": transfer.project_id, "destination_project_id": None, "accepted": False}
    return shown
