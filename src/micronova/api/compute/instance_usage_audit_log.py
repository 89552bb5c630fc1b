"""The log of the usage audit (`default.instance_usage_audit`): for which hosts the servers of a period are reported."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from micronova.api.inputs import STRICT, NoQuery
from micronova.db import services, task_logs
from micronova.db.engine import Database
from micronova.db.task_logs import TaskLogRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.notifications import usage
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid
from micronova.objects.service_names import COMPUTE

TASK = "instance_usage_audit"
_LOG = {
    "period_beginning": str,
    "period_ending": str,
    "num_hosts": int,
    "num_hosts_done": int,
    "num_hosts_running": int,
    "num_hosts_not_run": int,
    "hosts_not_run": list[str],
    "total_instances": int,
    "total_errors": int,
    "overall_status": str,
    "log": {"*": {"state": str, "instances": int, "errors": int, "message": str}},
}


class UsageAuditLogs:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, period: str) -> None:
        self._database = database
        self._clock = clock
        self._period = period

    async def index(self, request: Request) -> dict[str, Any]:
        """Show the last period that has ended."""
        return {"instance_usage_audit_logs": await self._log(micros(self._clock.now()))}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show the last period that had ended at a time, 2026-11-17 12:00:00 for example."""
        try:
            moment = datetime.strptime(f"{id} +0000", f"%Y-%m-%d %H:%M:%S{'.%f' if '.' in id else ''} %z")
            before = micros(moment.timestamp())
            return {"instance_usage_audit_log": await self._log(before)}
        except (ValueError, OverflowError):
            raise Invalid(f"Invalid timestamp for date {id[:64]}: write it as 2026-11-17 12:00:00.") from None

    async def _log(self, before: int) -> dict[str, Any]:
        period = usage.last_completed(self._period, before)
        hosts, rows = await self._database.read(_read, period.begin, period.end)
        done = {row.host for row in rows if row.state == task_logs.DONE}
        missing = sorted(hosts - {row.host for row in rows})
        errors = sum(row.errors for row in rows)
        return {
            "period_beginning": _text(period.begin),
            "period_ending": _text(period.end),
            "num_hosts": len(hosts),
            "num_hosts_done": len(done),
            "num_hosts_running": sum(row.state == task_logs.RUNNING for row in rows),
            "num_hosts_not_run": len(missing),
            "hosts_not_run": missing,
            "total_instances": sum(row.task_items for row in rows),
            "total_errors": errors,
            "overall_status": f"{'ALL' if len(done) == len(hosts) else f'{len(done)} of {len(hosts)}'} hosts done. "
            f"{errors} errors.",
            "log": {
                row.host: {
                    "state": row.state,
                    "instances": row.task_items,
                    "errors": row.errors,
                    "message": row.message,
                }
                for row in rows
            },
        }


def _read(conn: sa.Connection, begin: int, end: int) -> tuple[set[str], Sequence[TaskLogRow]]:
    hosts = {row.host for row in services.list_(conn, binary=COMPUTE)}
    return hosts, task_logs.of_period(conn, TASK, begin, end)


def _text(time: int) -> str:
    return f"{datetime.fromtimestamp(time // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"


def routes(database: Database, clock: Clock, period: str) -> list[Route]:
    """Declare the routes."""
    handlers = UsageAuditLogs(database, clock, period)
    path, rule = "/os-instance_usage_audit_log", "os_compute_api:os-instance-usage-audit-log"
    read = partial(Route, method="GET", query=NoQuery, strict_query=STRICT)
    return [
        read(
            path=path,
            handler=handlers.index,
            policy=f"{rule}:list",
            answer={"instance_usage_audit_logs": _LOG},
        ),
        read(
            path=f"{path}/{{id}}",
            handler=handlers.show,
            policy=f"{rule}:show",
            answer={"instance_usage_audit_log": _LOG},
        ),
    ]
