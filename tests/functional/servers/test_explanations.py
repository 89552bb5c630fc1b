"""The scheduler's reasons for operators: kept with each decision, shown in the API and by `micronova explain`."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from micronova.cli import explain
from micronova.cli.explain_text import WIDTH, dry_run_lines, server_lines
from micronova.db import aggregates
from micronova.db.tables import inventories, metadata, operations
from micronova.objects.errors import Invalid
from micronova.objects.fleet import Fleet
from micronova.objects.scheduling import DryRunResult
from micronova.servers.dry_run import DryRunRequest
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process

POLICY_FILE = Path(__file__).with_name("details_for_members.yaml")
CLOUD = CloudOptions(
    hosts=4,
    api={"api": {"policy_file": str(POLICY_FILE)}},
    settings={"filter_scheduler": {"enabled_filters": ["ComputeFilter", "RamFilter", "ServerGroupAntiAffinityFilter"]}},
)
pytestmark = only_in_one_process("it has other filters, and the database is read")


async def _events(caller: Caller, id: str) -> list[dict[str, Any]]:
    """Give the events of a server's last action, the newest first."""
    path = f"/servers/{id}/os-instance-actions"
    [action, *_] = (await caller.get(path))["instanceActions"]
    events: list[dict[str, Any]] = (await caller.get(f"{path}/{action['request_id']}"))["instanceAction"]["events"]
    return events


async def _decisions(cloud: Cloud, id: str) -> list[list[dict[str, Any]]]:
    """Give the decisions of each operation of a server, as `micronova explain` has them."""
    found = await explain.read_decisions(cloud.process, id)
    assert all(len(line) <= WIDTH for line in server_lines(found)), server_lines(found)
    return [request["decisions"] for request in found["requests"]]


async def _large(user: Caller, **fields: Any) -> str:
    """Make a flavor that fits on no host."""
    wanted = {"name": user.project, "ram": 1 << 30, "vcpus": 1, "disk": 1, **fields}
    return str((await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"])


async def _dry_run(cloud: Cloud, **fields: Any) -> DryRunResult:
    request = DryRunRequest(**({"flavor": "m1.tiny"} | fields))
    result = await explain.dry_run(cloud.process, request)
    assert all(len(line) <= WIDTH for line in dry_run_lines(request, result))
    return result


async def test_a_dry_run_of_a_boot_from_a_volume_needs_no_room_for_the_root_disk(
    cloud: OneProcess, user: Caller
) -> None:
    flavor = await _large(user, ram=64, disk=1 << 20)
    assert not (await _dry_run(cloud, flavor=flavor)).selections
    assert (await _dry_run(cloud, flavor=flavor, boot_from_volume=True)).selections


async def test_admins_read_in_the_event_how_the_host_was_chosen(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    host = await user.host_of(id)
    [event] = await _events(user.admin, id)
    assert event["result"] == "Success" and event["host"] == host
    assert event["details"].startswith("The scheduler was asked about 4 hosts and decided in ")
    assert "These removed none: RetryFilter, AvailabilityZoneFilter, Capacity(VCPU), " in event["details"]
    assert f"Chosen: {host}, weight " in event["details"] and "RAMWeigher +" in event["details"]
    [older] = await _events(user.admin.at(83), id)
    assert "details" not in older


async def test_who_may_read_details_and_not_hosts_learns_no_host(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    lost = await user.create(flavorRef=await _large(user))
    message = (await user.wait_for(lost, "ERROR"))["fault"]["message"]
    [event] = await _events(user, id)
    assert event["details"] is None and "host" not in event
    [event] = await _events(user, lost)
    assert event["details"] == message
    [event] = await _events(user.admin, lost)
    assert event["details"].startswith(message)
    assert f"MaxUnit(MEMORY_MB): 4 entered, 0 left; it removed {', '.join(cloud.hosts)}." in event["details"]


async def test_each_attempt_is_told_with_the_event_of_its_host(cloud: OneProcess, user: Caller) -> None:
    fails = {"operation": "spawn", "kind": "fail", "name": user.project, "message": "no luck", "count": 1}
    async with cloud.faults(fails):
        id = (await user.boot(name=user.project))["id"]
    last, first = await _events(user.admin, id)
    for event in (first, last):
        assert f"Chosen: {event['host']}, " in event["details"]
    assert first["details"].startswith("no luck\n") and first["host"] != last["host"]
    [decisions] = await _decisions(cloud, id)
    assert [each["winners"][0]["host"] for each in decisions] == [first["host"], last["host"]]
    assert all(each["took"] > 0 for each in decisions)


async def test_a_refused_resize_keeps_its_reasons(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.act(id, "resize", {"flavorRef": await _large(user)})
    await user.wait_for(id, "ACTIVE", "ERROR")
    built, resized = await _decisions(cloud, id)
    assert built[0]["winners"] and "winners" not in resized[0]
    [step] = [step for step in resized[0]["filters"] if step["name"] == "MaxUnit(MEMORY_MB)"]
    assert step["remaining"] == 0 and set(step["hosts"]) <= set(cloud.hosts)
    told = [event["details"] for event in await _events(user.admin, id)]
    assert len([details for details in told if "MaxUnit(MEMORY_MB): " in details]) == 1


async def test_a_move_keeps_its_reasons(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    _, [moved] = await _decisions(cloud, id)
    assert moved["winners"][0]["host"] == await user.host_of(id)
    told = [event["details"] for event in await _events(user.admin, id) if event["details"]]
    assert len(told) == 1 and f"Chosen: {await user.host_of(id)}" in told[0]


async def _rows(cloud: Cloud) -> dict[str, int]:
    """Count the rows of all tables, besides those that hosts write by themselves."""
    return {name: len(await cloud.read(sa.select(table))) for name, table in metadata.tables.items()}


async def _reported(cloud: OneProcess, *hosts: str) -> None:
    """Wait until hosts have reported that these have a server each, and no others: those of earlier tests are gone."""

    async def probe() -> bool | None:
        fleet = await explain.list_hosts(cloud.process)
        return True if {each.host: each.servers for each in fleet.hosts if each.servers} == expected else None

    expected = dict.fromkeys(hosts, 1)

    await cloud.settled()
    await cloud.until(probe, "the reports of hosts")


async def test_a_dry_run_changes_nothing(cloud: OneProcess, user: Caller) -> None:
    """No row, no claim, no load in the table of the running scheduler."""
    await _reported(cloud, await user.host_of((await user.boot())["id"]))
    await _dry_run(cloud, count=1000)  # a refusal reads all hosts again
    used = sa.select(inventories.c.node_uuid, inventories.c.resource_class, inventories.c.used)
    before = await _rows(cloud), await cloud.read(used), await explain.list_hosts(cloud.process)
    for count in (1, 7, 1000):
        await _dry_run(cloud, count=count, with_hosts=True)
    assert (await _rows(cloud), await cloud.read(used), await explain.list_hosts(cloud.process)) == before


async def test_a_dry_run_says_where_the_next_server_goes(cloud: OneProcess, user: Caller) -> None:
    await _reported(cloud)
    told = await _dry_run(cloud, with_hosts=True)
    [selection] = told.selections
    assert isinstance(told.fleet, Fleet) and [each.host for each in told.fleet.hosts if each.chosen] == [selection.host]
    assert await user.host_of((await user.boot())["id"]) == selection.host


async def test_a_dry_run_says_what_refuses_it(cloud: OneProcess, user: Caller) -> None:
    group = await user.at(64).post("/os-server-groups", {"server_group": {"name": "g", "policy": "anti-affinity"}}, 200)
    hints = {"group": [group["server_group"]["id"]]}
    fits = await _dry_run(cloud, hints=hints, count=4)
    assert sorted(each.host for each in fits.selections) == sorted(cloud.hosts)
    refused = await _dry_run(cloud, hints=hints, count=5)
    assert (refused.selections, refused.fit) == ((), 4)
    assert (
        "no host is without a member of the anti-affinity group; 4 hosts have members of the group." in refused.message
    )
    assert refused.explanation.filters[-1].name == "ServerGroupAntiAffinityFilter"
    one = await _dry_run(cloud, host=cloud.hosts[2])
    assert [each.host for each in one.selections] == [cloud.hosts[2]] and one.explanation.hosts == 1
    forced = await _dry_run(cloud, availability_zone=f"nova:{cloud.hosts[1]}")
    assert [each.host for each in forced.selections] == [cloud.hosts[1]] and forced.explanation.forced
    flavor = await _large(user, name=f"large-{user.project}")
    large = await _dry_run(cloud, flavor=f"large-{user.project}")
    assert large.message == (await _dry_run(cloud, flavor=flavor)).message
    assert "no host is large enough for 1048576 GiB of memory; 4 hosts are too small." in large.message


async def test_a_dry_run_says_what_has_no_effect(
    cloud: OneProcess, user: Caller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the request, and of the metadata of aggregates, which is also logged when it is set."""
    number = (await user.admin.post("/os-aggregates", {"aggregate": {"name": user.project}}, 200))["aggregate"]["id"]
    act = f"/os-aggregates/{number}/action"
    await user.admin.post(act, {"add_host": {"host": cloud.hosts[0]}}, 200)
    metadata = {"filter_tenant_id": "p", "cpu_allocation_ratio": "99", "instance_type": None, "rack": "7"}
    await user.admin.post(act, {"set_metadata": {"metadata": metadata}}, 200)
    remarks = [
        f"The metadata cpu_allocation_ratio of aggregate {user.project} has no effect: it needs the filter "
        "AggregateCoreFilter.",
        f"The metadata filter_tenant_id of aggregate {user.project} has no effect: it needs the filter "
        "AggregateMultiTenancyIsolation or the setting scheduler.limit_tenants_to_placement_aggregate.",
    ]
    assert [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()] == remarks
    told = await _dry_run(cloud, hints={"diferent_host": ["x"]})
    assert told.remarks == ("The scheduler hint diferent_host has no effect: no enabled filter honours it.", *remarks)
    await user.admin.post(act, {"set_metadata": {"metadata": {"cpu_allocation_ratio": None}}}, 200)
    with monkeypatch.context() as patched:  # they are those of all hosts: not read where nothing is compared with them
        patched.delattr(aggregates, "largest_ratios")
        assert (await _dry_run(cloud)).remarks == tuple(remarks[1:])
    await user.admin.post(act, {"remove_host": {"host": cloud.hosts[0]}}, 200)
    await user.admin.delete(f"/os-aggregates/{number}", 200)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"flavor": "none-such"}, "Flavor none-such could not be found"),
        ({"count": 0}, "from 1 to 1000, and not 0"),
        ({"count": 1001}, "from 1 to 1000"),
        ({"host": "none-such"}, "Compute host none-such could not be found"),
        ({"availability_zone": "none-such"}, "'none-such' is not available"),
        ({"availability_zone": "a:b:c:d"}, "it is ZONE, ZONE:HOST or ZONE:HOST:NODE"),
        ({"availability_zone": "nova:fake-1", "host": "fake-1"}, "exclude each other"),
        ({"hints": {"group": ["none-such"]}}, "Instance group none-such could not be found"),
        ({"hints": {"group": ["a", "b"]}}, "names one server group"),
        ({"hints": {"same_host": ["x"]}}, "same_host is not supported"),
        ({"hints": {"query": ["junk"]}}, "query is not supported"),
    ],
)
async def test_a_dry_run_of_what_no_create_would_accept(cloud: OneProcess, fields: Any, words: str) -> None:
    with pytest.raises(Invalid) as caught:
        await _dry_run(cloud, **fields)
    assert words in caught.value.message


async def test_a_flavor_of_others_is_not_for_a_project(cloud: OneProcess, user: Caller) -> None:
    wanted = {"name": f"own-{user.project}", "ram": 64, "vcpus": 1, "disk": 1, "os-flavor-access:is_public": False}
    flavor = (await user.admin.post("/flavors", {"flavor": wanted}, 200))["flavor"]["id"]
    assert (await _dry_run(cloud, flavor=flavor)).selections
    with pytest.raises(Invalid, match="could not be found for project"):
        await _dry_run(cloud, flavor=flavor, project=user.project)
    access = {"addTenantAccess": {"tenant": user.project}}
    await user.admin.post(f"/flavors/{flavor}/action", access, 200)
    assert (await _dry_run(cloud, flavor=wanted["name"], project=user.project)).selections


async def test_what_is_kept_is_small(cloud: OneProcess, user: Caller) -> None:
    """However often a build is tried again."""
    async with cloud.faults({"operation": "spawn", "kind": "fail", "name": user.project}):
        id = await user.create(name=user.project)
        await user.wait_for(id, "ERROR")
    [row] = await cloud.read(sa.select(operations).where(operations.c.instance_uuid == id))
    assert len(msgspec.json.encode(row.explanation)) < 8000


async def test_a_server_about_which_nothing_is_kept(cloud: OneProcess, user: Caller) -> None:
    id = (await user.boot())["id"]
    await cloud.settled()
    assert cloud.process.database is not None
    gone = operations.delete().where(operations.c.instance_uuid == id)
    await cloud.process.database.write(lambda conn: conn.execute(gone))
    found = await explain.read_decisions(cloud.process, id)
    assert found["requests"] == [] and "conductor.keep_finished" in " ".join(server_lines(found))
    [event] = await _events(user.admin, id)
    assert event["details"] is None
