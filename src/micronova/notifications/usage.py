"""Notifications for usage and billing: that a server changed (`instance.update`), that it exists (`instance.exists`).

`instance.update` follows `notifications.notify_on_state_change`; `instance.exists` is sent for every server of an audit
period. The periods are Nova's: hours, days, months or years, which begin at an offset.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from micronova.notifications import unversioned, versioned
from micronova.notifications.resources import Announcement
from micronova.notifications.times import instant, spaced, with_fraction
from micronova.objects.clock import micros
from micronova.objects.context import Context
from micronova.objects.instance import InstanceRow
from micronova.objects.service_names import COMPUTE, CONDUCTOR

_FIRST = {"hour": 0, "day": 0, "month": 1, "year": 1}  # the offset of a period that names none


class Period(msgspec.Struct, frozen=True):
    """A span of time in microseconds since 1970 (UTC)."""

    begin: int
    end: int


class Before(msgspec.Struct, frozen=True):
    """What an instance was before a change; nothing, if it is new."""

    vm_state: str | None = None
    task_state: str | None = None
    display_name: str | None = None


def _parsed(text: str) -> tuple[str, int]:
    unit, _, offset = text.partition("@")
    return unit, max(int(offset or 0), _FIRST[unit])


def last_completed(period: str, now: int) -> Period:
    """Return the newest period that has ended before a time."""
    unit, offset = _parsed(period)
    moment = datetime.fromtimestamp(now / 1_000_000, UTC)
    if unit == "hour":
        end = moment.replace(minute=offset, second=0, microsecond=0)
    elif unit == "day":
        end = moment.replace(hour=offset, minute=0, second=0, microsecond=0)
    elif unit == "month":
        end = moment.replace(day=offset, hour=0, minute=0, second=0, microsecond=0)
    else:
        end = moment.replace(month=offset, day=1, hour=0, minute=0, second=0, microsecond=0)
    if end >= moment:
        end = _earlier(end, unit)
    return Period(micros(_earlier(end, unit).timestamp()), micros(end.timestamp()))


def _earlier(moment: datetime, unit: str) -> datetime:
    if unit == "hour":
        return moment - timedelta(hours=1)
    if unit == "day":
        return moment - timedelta(days=1)
    if unit == "year":
        return moment.replace(year=moment.year - 1)
    return moment.replace(year=moment.year - (moment.month == 1), month=(moment.month - 2) % 12 + 1)


def exists(row: InstanceRow, context: Context, period: Period) -> Announcement:
    """Return the notification that a server existed in a period."""
    return Announcement(
        event="instance.exists",
        payload=_payload("InstanceExistsPayload", row, context, period, {}),
        source=COMPUTE if row["host"] else CONDUCTOR,
        host=row["host"],
        old_event="compute.instance.exists",
        old_payload={
            **unversioned.instance_payload("exists", row, None),
            "audit_period_beginning": spaced(period.begin)[:19],
            "audit_period_ending": spaced(period.end)[:19],
        },
        old_publisher=f"compute.{row['host']}" if row["host"] else "conductor",
    )


def update(before: Before, row: InstanceRow, context: Context, period: Period) -> Announcement:
    """Return the notification that a server has changed; the period is the present one."""
    states = {
        "old_state": before.vm_state,
        "state": row["vm_state"],
        "old_task_state": before.task_state,
        "new_task_state": row["task_state"],
    }
    renamed = before.display_name if before.display_name != row["display_name"] else None
    more: dict[str, Any] = {
        "state_update": versioned.as_object("InstanceStateUpdatePayload", "1.0", states),
        "old_display_name": renamed,
        "tags": row["tags"],
    }
    old = {
        **unversioned.instance_payload("update", row, None),
        **states,
        "audit_period_beginning": with_fraction(period.begin),
        "audit_period_ending": with_fraction(period.end),
    }
    return Announcement(
        event="instance.update",
        payload=_payload("InstanceUpdatePayload", row, context, period, more),
        source=COMPUTE if row["host"] else CONDUCTOR,
        host=row["host"],
        old_event="compute.instance.update",
        old_payload={**old, "old_display_name": renamed} if renamed else old,
        old_publisher=f"compute.{row['host']}" if row["host"] else "conductor",
    )


def _payload(name: str, row: InstanceRow, context: Context, period: Period, more: dict[str, Any]) -> dict[str, Any]:
    data = dict(versioned.instance_payload("", row, context, None)["nova_object.data"])
    del data["fault"]
    span = {"audit_period_beginning": instant(period.begin), "audit_period_ending": instant(period.end)}
    audited = versioned.as_object("AuditPeriodPayload", "1.0", span)
    return versioned.as_object(name, "2.1", {**data, "audit_period": audited, **more})
