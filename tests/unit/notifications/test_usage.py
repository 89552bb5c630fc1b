"""Audit periods are Nova's; instance.exists and instance.update have its payloads."""

from datetime import UTC, datetime

import pytest

from micronova.notifications import usage
from micronova.notifications.usage import Before, Period
from micronova.objects.clock import micros
from tests.schemas.notifications import check
from tests.unit.notifications.samples import CONTEXT, server


def at(text: str) -> int:
    return micros(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    ("period", "now", "begin", "end"),
    [
        ("hour", "2026-11-17 12:34:56", "2026-11-17 11:00", "2026-11-17 12:00"),
        ("hour@40", "2026-11-17 12:34:56", "2026-11-17 10:40", "2026-11-17 11:40"),
        ("day", "2026-11-17 12:34:56", "2026-11-16", "2026-11-17"),
        ("day@18", "2026-11-17 12:34:56", "2026-11-15 18:00", "2026-11-16 18:00"),
        ("month", "2026-11-17 12:34:56", "2026-10-01", "2026-11-01"),
        ("month", "2026-01-17", "2025-12-01", "2026-01-01"),
        ("month@20", "2026-02-17", "2025-12-20", "2026-01-20"),
        ("month@20", "2026-01-17", "2025-11-20", "2025-12-20"),
        ("year", "2026-11-17", "2025-01-01", "2026-01-01"),
        ("year@12", "2026-11-17", "2024-12-01", "2025-12-01"),
        ("day", "2026-11-17 00:00:00", "2026-11-15", "2026-11-16"),  # a period that ends now has not ended before
    ],
)
def test_the_last_period_that_has_ended(period: str, now: str, begin: str, end: str) -> None:
    assert usage.last_completed(period, at(now)) == Period(at(begin), at(end))


PERIOD = Period(at("2026-10-01"), at("2026-11-01"))


def test_a_server_exists() -> None:
    made = usage.exists(server(), CONTEXT, PERIOD)
    data = check(made.payload, "InstanceExistsPayload")
    assert data["audit_period"]["nova_object.data"]["audit_period_ending"] == "2026-11-01T00:00:00Z"
    assert (made.event, made.source, made.host) == ("instance.exists", "nova-compute", "compute-1")
    assert made.old_event == "compute.instance.exists" and made.old_publisher == "compute.compute-1"
    assert made.old_payload["audit_period_beginning"] == "2026-10-01 00:00:00"


def test_a_server_has_changed() -> None:
    made = usage.update(Before("building", "spawning", "some-server"), server(), CONTEXT, PERIOD)
    data = check(made.payload, "InstanceUpdatePayload")
    assert data["state_update"]["nova_object.data"] == {
        "old_state": "building",
        "state": "active",
        "old_task_state": "spawning",
        "new_task_state": None,
    }
    assert data["old_display_name"] is None and data["tags"] == ["blue"]
    assert made.old_payload["old_state"] == "building" and "old_display_name" not in made.old_payload
    renamed = usage.update(Before("active", None, "before"), server(), CONTEXT, PERIOD)
    assert (
        renamed.payload["nova_object.data"]["old_display_name"] == renamed.old_payload["old_display_name"] == "before"
    )
    new = usage.update(Before(), server(host=None, vm_state="building"), CONTEXT, PERIOD)
    assert new.source == "nova-conductor" and new.payload["nova_object.data"]["old_display_name"] is None
