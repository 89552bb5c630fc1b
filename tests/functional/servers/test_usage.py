"""The usage of projects."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tests.functional.cloud import Caller, Cloud
from tests.schemas.tempest import check


def _period(hours: float) -> str:
    """Return the query for a period around now."""
    now = datetime.now(UTC).replace(tzinfo=None)
    return f"start={(now - timedelta(hours=hours)).isoformat()}&end={(now + timedelta(hours=hours)).isoformat()}"


async def _usage(user: Caller, query: str = "") -> dict[str, Any]:
    answer = await user.request("GET", f"/os-simple-tenant-usage/{user.project}?{query}")
    if answer.json()["tenant_usage"]:
        check("tenant_usages", "get_tenant_usage", user.minor, answer.status, answer.json())
    return dict(answer.json()["tenant_usage"])


async def test_existing_and_deleted_servers(user: Caller) -> None:
    assert await _usage(user) == {}
    gone: dict[str, Any]
    _, gone = await asyncio.gather(user.boot(name="kept"), user.boot(name="gone"))
    await user.delete(f"/servers/{gone['id']}")
    await user.gone(gone["id"])
    shown = await _usage(user, _period(1))
    servers = {each["name"]: each for each in shown["server_usages"]}
    assert set(servers) == {"kept", "gone"} and shown["tenant_id"] == user.project
    assert (servers["kept"]["state"], servers["gone"]["state"]) == ("active", "terminated")
    assert servers["kept"]["ended_at"] is None and servers["gone"]["ended_at"] > servers["gone"]["started_at"]
    assert shown["total_hours"] == pytest.approx(sum(each["hours"] for each in servers.values()))
    assert shown["total_memory_mb_usage"] == pytest.approx(shown["total_hours"] * servers["kept"]["memory_mb"])
    assert shown["total_vcpus_usage"] == pytest.approx(shown["total_hours"] * servers["kept"]["vcpus"])
    assert shown["total_local_gb_usage"] == pytest.approx(shown["total_hours"] * servers["kept"]["local_gb"])


async def test_only_the_time_in_the_period_counts(user: Caller) -> None:
    await user.boot()
    assert await _usage(user, "start=2001-01-01T00:00:00&end=2001-02-01T00:00:00") == {}
    now = datetime.now(UTC).replace(tzinfo=None)
    assert await _usage(user, f"end={(now - timedelta(hours=1)).isoformat()}") == {}


async def test_admins_see_every_project(user: Caller, cloud: Cloud) -> None:
    await user.boot(name="mine")
    for query, detailed in (("", False), ("detailed=1", True), ("detailed=0", False), ("detailed=zork", False)):
        answer = await user.admin.request("GET", f"/os-simple-tenant-usage?{query}")
        check("tenant_usages", "list_tenant_usage", user.minor, answer.status, answer.json())
        [mine] = [each for each in answer.json()["tenant_usages"] if each["tenant_id"] == user.project]
        assert ("server_usages" in mine) == detailed
    await user.refused(403, "GET", "/os-simple-tenant-usage")
    await cloud.caller().refused(403, "GET", f"/os-simple-tenant-usage/{user.project}")


async def test_pages_since_2_40(user: Caller) -> None:
    ids = [server["id"] for server in await asyncio.gather(*(user.boot() for _ in range(3)))]
    new, seen, query = user.at(40), [], "limit=2"
    path = f"/os-simple-tenant-usage/{user.project}"
    while query:
        answer = await new.get(f"{path}?{query}")
        seen += [each["instance_id"] for each in answer["tenant_usage"].get("server_usages", [])]
        [link] = answer.get("tenant_usage_links", [{"href": ""}])
        query = link["href"].partition("?")[2]
    assert sorted(seen) == sorted(ids)
    assert len((await user.at(39).get(f"{path}?limit=2"))["tenant_usage"]["server_usages"]) == 3
    assert "marker" in await new.refused(400, "GET", f"{path}?marker=zork")


BAD = ["start=zork", "end=2001-13-01", "start=2002-01-01&end=2001-01-01", f"end={quote('ä')}"]


@pytest.mark.parametrize("query", BAD)
async def test_bad_periods(user: Caller, query: str) -> None:
    said = await user.refused(400, "GET", f"/os-simple-tenant-usage/{user.project}?{query}")
    assert "start" in said or "end" in said


async def test_unknown_parameters_are_refused_since_2_75(user: Caller) -> None:
    for caller, path in ((user, f"/os-simple-tenant-usage/{user.project}"), (user.admin, "/os-simple-tenant-usage")):
        await caller.at(74).get(f"{path}?zork=1")
        assert "zork" in await caller.at(75).refused(400, "GET", f"{path}?zork=1")
