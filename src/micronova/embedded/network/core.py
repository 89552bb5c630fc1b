"""What all handlers of the network service share: database, clock, random source, settings and the sender of events."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.common.compute_events import Event, EventSender
from micronova.embedded.network.agent.dhcp import DNS_DOMAIN
from micronova.embedded.network.agent_liveness import AgentTimes
from micronova.embedded.network.heartbeat_interval import AGENT_DOWN_AFTER, down_time, interval_for
from micronova.objects.clock import Clock, micros
from micronova.objects.ids import new_uuid

P = ParamSpec("P")
R = TypeVar("R")

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
    "trunk": -1,
}


@dataclass(frozen=True, kw_only=True)
class NetworkServiceSettings:
    """Settings of the embedded network service."""

    quotas: Mapping[str, int] = field(default_factory=lambda: dict(QUOTAS))
    mac_prefix: str = "fa:16:3e"
    tenant_network_type: str = "vxlan"
    mtu: int = 1500  # of the physical network; overlay networks have less by the headers of their tunnel
    availability_zone: str = "nova"
    dns_domain: str = f"{DNS_DOMAIN}."
    agent_down_after: float = AGENT_DOWN_AFTER
    max_limit: int | None = None  # resources in one page of a list


class AddressHints:
    """The address of each subnet at which the search for a free one begins.

    The database decides who gets an address. With hints, concurrent requests begin at different addresses, and an
    address that was just released is not allocated again at once.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, subnet_id: str, first: int) -> int:
        """Return an address at which no other request of this process begins; `first` for the first request."""
        found = self._next.get(subnet_id, first)
        self._next[subnet_id] = found + 1
        return found

    def learn(self, subnet_id: str, hint: int | None, number: int) -> None:
        """Let the next search begin after an address that was found elsewhere than hinted."""
        if number == hint:
            return
        if len(self._next) > 10_000:
            self._next.clear()
        self._next[subnet_id] = number + 1


class Core:
    """The shared objects of all handlers."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        random_source: random.Random,
        settings: NetworkServiceSettings,
        events: EventSender,
        wake_agents: Callable[[], None],
    ) -> None:
        self.database = database
        self.clock = clock
        self.random_source = random_source
        self.settings = settings
        self.events = events
        self._wake_agents = wake_agents
        self.hints = AddressHints()
        self.heartbeat_interval = interval_for(settings.agent_down_after)  # seconds, for the answers to agents

    def now(self) -> int:
        """Return the time in microseconds, as the database stores it."""
        return micros(self.clock.now())

    def set_heartbeat_interval(self, agents: int) -> None:
        """Set the interval of heartbeats for this number of agents."""
        self.heartbeat_interval = interval_for(self.settings.agent_down_after, agents)

    def agent_times(self) -> AgentTimes:
        """Return since when a live agent has sent a heartbeat, and how long a silent one keeps the routers."""
        now, silence = self.now(), micros(down_time(self.heartbeat_interval))
        return AgentTimes(now, alive_since=now - silence, grace=silence // 2)

    def new_id(self) -> str:
        """Return a new id."""
        return new_uuid(self.random_source)

    async def write_and_wake(
        self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a transaction that notes changes for network agents (`host_changes.note`), and wake those who wait.

        Transactions that note nothing use `database.write`.
        """
        found = await self.database.write(fn, *args, **kwargs)
        self._wake_agents()
        return found

    async def write_with_events(
        self, fn: Callable[Concatenate[sa.Connection, P], tuple[R, list[Event]]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a transaction that also returns events for compute; wake agents, and send the events.

        The events are written in the transaction, so that they are sent even if this process dies.
        """
        result, events = await self.write_and_wake(_with_events, fn, self.events, args, kwargs)
        self.events.hand_over(events)
        return result


def _with_events(
    conn: sa.Connection,
    fn: Callable[..., tuple[R, list[Event]]],
    sender: EventSender,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> tuple[R, list[Event]]:
    result, events = fn(conn, *args, **kwargs)
    if events:
        sender.put(conn, events)
    return result, events
