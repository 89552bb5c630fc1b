"""What every part of the network service is given: database, time, chance, settings, and the way to compute."""

import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from micronova.db.engine import Database
from micronova.neighbours.network.notifier import Event, Notifier
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

ATTEMPTS = 30

# -1 is no limit. The numbers are those that Neutron ships with.
QUOTAS: Mapping[str, int] = {
    "floatingip": 50,
    "network": 100,
    "port": 500,
    "rbac_policy": 10,
    "router": 10,
    "security_group": 10,
    "security_group_rule": 100,
    "subnet": 100,
    "subnetpool": -1,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an operator may want different."""

    quotas: Mapping[str, int] = field(default_factory=lambda: dict(QUOTAS))
    mac_prefix: str = "fa:16:3e"
    tenant_network_type: str = "vxlan"
    mtu: int = 1500  # of the wire; a tunnel's headers are taken off for overlay networks
    availability_zone: str = "nova"
    dns_domain: str = "openstacklocal."
    agent_down_after: float = 75.0  # seconds without a heartbeat


class Changed(Exception):
    """What a transaction was about to change is not what was read: read again."""


class Hints:
    """Where to look first for a free address of each subnet.

    Only a hint: a row of the database decides. But requests that come together begin at different places, and an
    address that was just given back is not given out again at once.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, subnet_id: str, first: int) -> int:
        """Return a place that no other request of this process is looking at; at the beginning, the first address."""
        found = self._next.get(subnet_id, first)
        self._next[subnet_id] = found + 1
        return found

    def learn(self, subnet_id: str, hint: int | None, number: int) -> None:
        """Note an address that was found elsewhere than hinted, so that the next search begins behind it."""
        if number == hint:
            return
        if len(self._next) > 10_000:
            self._next.clear()
        self._next[subnet_id] = number + 1


class Core:
    """The shared means of all handlers."""

    def __init__(
        self, database: Database, clock: Clock, chance: random.Random, settings: Settings, notifier: Notifier
    ) -> None:
        self.database = database
        self.clock = clock
        self.chance = chance
        self.settings = settings
        self.notifier = notifier
        self.hints = Hints()

    def now(self) -> int:
        """The time as the database keeps it."""
        return micros(self.clock.now())

    def new_id(self) -> str:
        """Make an id."""
        return str(uuid.UUID(int=self.chance.getrandbits(128), version=4))

    async def change(
        self, fn: Callable[Concatenate[sa.Connection, P], tuple[R, list[Event]]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a transaction that may have news for compute: they are in the outbox when it commits, then sent."""
        result, news = await self.database.write(_with_events, fn, self.notifier, args, kwargs)
        self.notifier.hand_over(news)
        return cast(R, result)


def _with_events(
    conn: sa.Connection, fn: Callable[..., tuple[Any, list[Event]]], notifier: Notifier, args: Any, kwargs: Any
) -> tuple[Any, list[Event]]:
    result, news = fn(conn, *args, **kwargs)
    if news:
        notifier.put(conn, news)
    return result, news


async def again(fn: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a handler's read-decide-write until no other request came between."""
    for _ in range(ATTEMPTS):
        try:
            return await fn(*args, **kwargs)
        except (Changed, sa.exc.IntegrityError) as error:
            reason = error
    raise Unavailable("Too many requests change the same thing at once: try again.") from reason


def insert_unless_there(conn: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Insert a row unless it would break a unique constraint; say whether it was inserted.

    Not an exception: on PostgreSQL a failed statement would take the whole transaction with it.
    """
    key = (conn.dialect.name, table.name)
    statement = _INSERTS.get(key)
    if statement is None:
        build = sqlite.insert if conn.dialect.name == "sqlite" else postgresql.insert
        statement = _INSERTS[key] = build(table).on_conflict_do_nothing()
    return conn.execute(statement, values).rowcount == 1


_INSERTS: dict[tuple[str, str], sa.Executable] = {}  # statements, built once
