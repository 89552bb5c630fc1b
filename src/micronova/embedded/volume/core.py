"""What all handlers of the volume service share: database, clock, ids, settings, and access to volumes."""

import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.common.compute_events import Notifier
from micronova.embedded.common.revisions import Contended, retry
from micronova.embedded.volume import volume_queries
from micronova.embedded.volume.model import Volume
from micronova.embedded.volume.quotas import QUOTAS
from micronova.http.request import Request
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, NotFound
from micronova.objects.ids import new_uuid

P = ParamSpec("P")
R = TypeVar("R")
Found = TypeVar("Found", bound="Owned")

UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BACKEND: Final = "files"
"""The name of the only back end, which is also that of its only pool."""


@dataclass(frozen=True, kw_only=True)
class VolumeServiceSettings:
    """Settings of the embedded volume service."""

    quotas: Mapping[str, int] = field(default_factory=lambda: dict(QUOTAS))
    availability_zone: str = "nova"
    default_volume_type: str = "__DEFAULT__"
    max_limit: int = 1000  # resources in one page of a list


class Owned(Protocol):
    """A resource of a project."""

    @property
    def target(self) -> Mapping[str, str]:
        """The policy target."""


class Core:
    """The shared objects of all handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random_source: random.Random,
        settings: VolumeServiceSettings,
        host: str,
        notifier: Notifier,
    ) -> None:
        """`host` is the machine whose files this process works on; `notifier` tells compute of changes."""
        self.database = database
        self.clock = clock
        self.random_source = random_source
        self.settings = settings
        self.host = f"{host}@{BACKEND}"
        self.notifier = notifier
        self.on_operation: Callable[[], None] = lambda: None  # called after an operation was begun

    def now(self) -> int:
        """Return the time in microseconds, as the database stores it."""
        return micros(self.clock.now())

    def new_id(self) -> str:
        """Return a new id."""
        return new_uuid(self.random_source)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a transaction that begins an operation, and let the work begin."""
        found = await self.database.write(fn, *args, **kwargs)
        self.on_operation()
        return found

    async def load_volume(self, request: Request, volume_id: str, rule: str = "volume:get") -> Volume:
        """Return a volume; raise NotFound if the caller may not see it, Forbidden if `rule` does not allow it."""
        volume = await self.database.read(volume_queries.get, volume_id) if UUID.fullmatch(volume_id) else None
        return authorized(request, volume, "volume:get", rule, f"Volume {volume_id[:64]} could not be found.")


def authorized(request: Request, found: Found | None, see: str, rule: str, missing: str) -> Found:
    """Return what was found; raise NotFound if the caller may not `see` it, Forbidden if `rule` does not allow it."""
    if found is None or not request.allows(see, found.target):
        raise NotFound(missing)
    request.authorize(found.target, rule)
    return found


async def repeat(what: str, attempt: Callable[[], Awaitable[R]]) -> R:
    """Run a change that reads, decides and writes, until no other request comes between; raise Conflict."""
    try:
        return await retry(attempt)
    except Contended:
        raise Conflict(f"{what} is being changed by others all the time: try again.") from None
