"""What the parts of the volume service share: database, clock, ids, settings, and access to resources."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.common.compute_events import EventSender
from micronova.embedded.common.revisions import Contended, retry
from micronova.embedded.volume.backend.capabilities import BACKEND
from micronova.embedded.volume.backend.keys import KeyBox
from micronova.embedded.volume.backend.luks import LuksTool
from micronova.embedded.volume.model import Backup, ProjectRow, Snapshot, Volume
from micronova.embedded.volume.store import backup_queries, snapshot_queries, volume_queries
from micronova.embedded.volume.store.quotas import QUOTAS
from micronova.http.request import Request
from micronova.http.service import SERVICE_ROLE
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.ids import UUID, new_uuid

P = ParamSpec("P")
R = TypeVar("R")
Found = TypeVar("Found", bound=ProjectRow)


@dataclass(frozen=True, kw_only=True)
class VolumeServiceSettings:
    """Settings of the embedded volume service."""

    quotas: Mapping[str, int] = field(default_factory=lambda: dict(QUOTAS))
    availability_zone: str = "nova"
    default_volume_type: str = "__DEFAULT__"
    max_limit: int = 1000  # resources in one page of a list


class Core:
    """The objects that the parts of the service share."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random_source: random.Random,
        settings: VolumeServiceSettings,
        machine: str,
        events: EventSender,
        keys: KeyBox | None = None,
        luks: LuksTool | None = None,
    ) -> None:
        """`machine` is the one whose files this process works on; `events` tells compute of changes.

        Without `keys` and `luks` there are no encrypted volumes.
        """
        self.database = database
        self.clock = clock
        self.random_source = random_source
        self.settings = settings
        self.host = f"{machine}@{BACKEND}"  # the service as rows name it
        self.events = events
        self.keys = keys
        self.luks = luks
        self.on_operation: Callable[[], None] = lambda: None  # called after an operation is recorded

    def now(self) -> int:
        """Return the time in microseconds, as the database stores it."""
        return micros(self.clock.now())

    def new_id(self) -> str:
        """Return a new id."""
        return new_uuid(self.random_source)

    async def record_operation(
        self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a transaction that records an operation, then wake the engine, which works on it."""
        found = await self.database.write(fn, *args, **kwargs)
        self.on_operation()
        return found

    async def load(
        self,
        request: Request,
        get: Callable[[sa.Connection, str], Found | None],
        id: str,
        *,
        noun: str,
        see: str,
        rule: str | None = None,
    ) -> Found:
        """Return a resource; raise NotFound if the caller may not `see` it, Forbidden if `rule` does not allow it.

        Without `rule` the rule of the request's route decides.
        """
        found = await self.database.read(get, id) if UUID.fullmatch(id) else None
        if found is None or not request.allows(found.target, see):
            raise NotFound(f"{noun} {id[:64]} could not be found.")
        request.authorize(found.target, rule)
        return found

    async def load_volume(self, request: Request, volume_id: str, rule: str | None = None) -> Volume:
        """Return a volume; raise as `load` does."""
        return await self.load(request, volume_queries.get, volume_id, noun="Volume", see="volume:get", rule=rule)

    async def load_snapshot(self, request: Request, snapshot_id: str, rule: str | None = None) -> Snapshot:
        """Return a snapshot; raise as `load` does."""
        see = "volume:get_snapshot"
        return await self.load(request, snapshot_queries.get, snapshot_id, noun="Snapshot", see=see, rule=rule)

    async def load_backup(self, request: Request, backup_id: str, rule: str | None = None) -> Backup:
        """Return a backup; raise as `load` does."""
        return await self.load(request, backup_queries.get, backup_id, noun="Backup", see="backup:get", rule=rule)


def is_admin_or_service(request: Request) -> bool:
    """Return whether the caller is an administrator, or another service of the cloud."""
    return request.context.is_admin or SERVICE_ROLE in request.context.roles


async def retry_or_conflict(what: str, try_once: Callable[[], Awaitable[R]]) -> R:
    """Run `revisions.retry`; raise Conflict if other requests change the same at each attempt."""
    try:
        return await retry(try_once)
    except Contended:
        raise Conflict(f"Other requests keep changing {what}: try again.") from None
