"""Checks of the hosts and processes that run: how often hosts send heartbeats, and whether they may."""

import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from micronova.cli.checks.shape import Check, Finding, NotAsked, Subject
from micronova.db import schema, services
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError
from micronova.objects.service_names import COMPUTE

ROLES = ("api", "conductor", "scheduler")
DAY = 86_400.0


def checks(subject: Subject) -> Iterator[Check]:
    """Return the checks of what runs, if there is a database to ask."""
    if subject.among(ROLES) and subject.has_database:
        yield Check("heartbeats", ("conductor",), _heartbeats, "default.service_down_time")
        yield Check("users of hosts", ("conductor",), _host_users, "conductor.require_host_users")


async def _read(subject: Subject, function: Any, *args: Any) -> Any:
    """Ask the compute database; raise NotAsked if it cannot be asked, because the check of it says why."""
    try:
        database = await subject.database()
        at = await database.read(schema.current)
        if at != schema.head("micronova.db.migrations"):
            raise NotAsked("the database has not the schema of this release")
        return await database.read(function, *args)
    except (MicronovaError, sa.exc.SQLAlchemyError):
        raise NotAsked("the database cannot be asked, as said above") from None


async def _heartbeats(subject: Subject) -> list[Finding]:
    from micronova.conductor.heartbeat_interval import longest_interval, too_often

    hosts = await _read(subject, services.count_up, COMPUTE, micros(time.time()), DAY)
    default = subject.settings.default
    longest = longest_interval(default.service_down_time, subject.settings.conductor.lease)
    problem = too_often(hosts, report_interval=default.report_interval, longest=longest)
    if problem is None:
        return [Finding("", f"of {hosts} hosts", outcome="ok")]
    said, _, right = problem.partition(": set ")
    return [Finding("default.service_down_time", said, right)]


async def _host_users(subject: Subject) -> list[Finding]:
    """Find hosts that send heartbeats and have no broker user of their own, where that is demanded."""
    if not subject.settings.conductor.require_host_users:
        return []
    rows = await _read(subject, services.list_)
    known = (await _read(subject, services.host_users)).registered
    down = subject.settings.default.service_down_time
    now = micros(time.time())
    up = [row.host for row in rows if row.binary == COMPUTE and services.is_up(row, now, down)]
    strange = sorted(host for host in up if host not in known)
    if not strange:
        return []
    found = f"{', '.join(strange[:5])} send heartbeats and were not added: conductors refuse them"
    return [Finding("conductor.require_host_users", found, f"run `micronova host add {strange[0]}`")]
