"""The guests that the hypervisors of all hosts really have: hosts are asked, many at once."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from micronova.compute.rpcapi import ComputeAPI
from micronova.db import services
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.context import Context
from micronova.objects.orders import Guest
from micronova.objects.service_names import COMPUTE

HOSTS_AT_ONCE = 100
"""Hosts that are asked for their guests at the same time."""
HOSTS_PER_STEP = 500
"""Hosts that are read at once, and after which the progress is told."""

Answers = Mapping[str, tuple[Guest, ...] | str]
"""The guests of each host that was asked, or why it does not answer."""

ReportProgress = Callable[[int, int], None]
"""Is told how many of the hosts have answered."""


def no_progress(done: int, hosts: int) -> None:
    """Do nothing."""


async def hosts_up(database: Database, clock: Clock, down_time: float) -> list[str]:
    """Return the compute hosts that are up."""
    return [host for host, up in await _hosts(database, clock, down_time) if up]


async def hosts_down(database: Database, clock: Clock, down_time: float) -> list[str]:
    """Return the compute hosts that are not up, by name."""
    return sorted(host for host, up in await _hosts(database, clock, down_time) if not up)


async def _hosts(database: Database, clock: Clock, down_time: float) -> list[tuple[str, bool]]:
    """Return all compute hosts, and whether they are up. They are read in parts: conductors answer others meanwhile."""
    found: list[tuple[str, bool]] = []
    after = 0
    while True:
        part = await database.read(services.list_, binary=COMPUTE, after=after, limit=HOSTS_PER_STEP)
        now = micros(clock.now())
        found += [(row.host, services.is_up(row, now, down_time)) for row in part]
        if len(part) < HOSTS_PER_STEP:
            return found
        after = part[-1].id


def answered(answers: Answers) -> Iterator[tuple[str, tuple[Guest, ...]]]:
    """Yield the hosts that have answered, with their guests."""
    for host, guests in answers.items():
        if not isinstance(guests, str):
            yield host, guests


async def guests_of_all(compute: ComputeAPI, hosts: Sequence[str], progress: ReportProgress) -> Answers:
    """Ask these hosts for their guests, many at once."""
    answers: dict[str, tuple[Guest, ...] | str] = dict.fromkeys(hosts, ())
    waiting = iter(hosts)
    done = 0

    async def ask() -> None:
        nonlocal done
        for host in waiting:
            answers[host] = await _guests_of(compute, host)
            done += 1
            if done % HOSTS_PER_STEP == 0 or done == len(hosts):
                progress(done, len(hosts))

    await asyncio.gather(*(ask() for _ in range(HOSTS_AT_ONCE)))
    return answers


async def _guests_of(compute: ComputeAPI, host: str) -> tuple[Guest, ...] | str:
    try:
        return await compute.list_guests(Context(request_id="req-audit"), host)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return str(error)
