"""Services, hypervisors, hosts and availability zones at every microversion at which they change."""

import pytest

from tests.functional.api.resources import DOWN_TIME, Cloud, cloud  # noqa: F401
from tests.functional.api.seed import add_host, add_server, add_service
from tests.schemas.tempest import check, versions_of


async def _ids(cloud: Cloud, minor: int) -> dict[str, object]:
    listed = (await cloud.admin.get("/os-services", minor)).json()["services"]
    return {each["host"]: each["id"] for each in listed}


@pytest.mark.parametrize("minor", versions_of("services", 69, 75))
async def test_services(cloud: Cloud, minor: int) -> None:
    await add_host(cloud, "h1")
    await add_service(cloud, "nova-scheduler", "ctl")
    answer = await cloud.admin.get("/os-services", minor)
    check("services", "list_services", minor, answer.status, answer.json())
    compute, scheduler = answer.json()["services"]
    assert (compute["zone"], compute["state"], compute["status"]) == ("nova", "up", "enabled")
    assert scheduler["zone"] == "internal"
    assert ("forced_down" in compute) == (minor >= 11)
    assert isinstance(compute["id"], str if minor >= 53 else int)
    filtered = (await cloud.admin.get("/os-services?binary=nova-compute&host=h1", minor)).json()["services"]
    assert [each["host"] for each in filtered] == ["h1"]
    cloud.clock.time += DOWN_TIME + 1
    assert (await cloud.admin.get("/os-services", minor)).json()["services"][0]["state"] == "down"


@pytest.mark.parametrize("minor", [1, 11, 52])
async def test_services_are_switched_by_action_until_2_52(cloud: Cloud, minor: int) -> None:
    await add_host(cloud, "h1")
    body = {"host": "h1", "binary": "nova-compute"}
    answer = await cloud.admin.put("/os-services/disable", body, minor)
    check("services", "enable_disable_service", minor, answer.status, answer.json())
    answer = await cloud.admin.put("/os-services/enable", body, minor)
    check("services", "enable_disable_service", minor, answer.status, answer.json())
    answer = await cloud.admin.put("/os-services/disable-log-reason", {**body, "disabled_reason": "disk"}, minor)
    check("services", "disable_log_reason", minor, answer.status, answer.json())
    [shown] = (await cloud.admin.get("/os-services", minor)).json()["services"]
    assert (shown["status"], shown["disabled_reason"]) == ("disabled", "disk")
    answer = await cloud.admin.put("/os-services/force-down", {**body, "forced_down": "true"}, minor)
    if minor >= 11:
        check("services", "update_forced_down", minor, answer.status, answer.json())
        assert (await cloud.admin.get("/os-services", minor)).json()["services"][0]["state"] == "down"
    else:
        assert answer.status == 400
    assert (await cloud.admin.put("/os-services/nonsense", body, minor)).status == 404
    assert (await cloud.admin.put("/os-services/disable", {**body, "host": "h9"}, minor)).status == 404
    assert (await cloud.admin.put("/os-services/disable", {**body, "binary": "nova-x"}, minor)).status == 400
    assert (await cloud.admin.put("/os-services/disable-log-reason", body, minor)).status == 400


@pytest.mark.parametrize("minor", [53, 69, 104])
async def test_services_are_updated_by_uuid_since_2_53(cloud: Cloud, minor: int) -> None:
    await add_host(cloud, "h1")
    await add_service(cloud, "nova-scheduler", "ctl")
    ids = await _ids(cloud, minor)
    path = f"/os-services/{ids['h1']}"
    answer = await cloud.admin.put(path, {"status": "disabled", "disabled_reason": "disk"}, minor)
    check("services", "update_service", minor, answer.status, answer.json())
    assert answer.json()["service"]["disabled_reason"] == "disk"
    answer = await cloud.admin.put(path, {"forced_down": True}, minor)
    check("services", "update_service", minor, answer.status, answer.json())
    assert answer.json()["service"]["state"] == "down" and answer.json()["service"]["status"] == "disabled"
    answer = await cloud.admin.put(path, {"status": "enabled", "forced_down": "no"}, minor)
    assert (answer.json()["service"]["state"], answer.json()["service"]["disabled_reason"]) == ("up", None)
    for bad in ({}, {"status": "enabled", "disabled_reason": "x"}, {"status": "odd"}, {"host": "h1"}):
        assert (await cloud.admin.put(path, bad, minor)).status == 400
    assert (await cloud.admin.put(f"/os-services/{ids['ctl']}", {"status": "disabled"}, minor)).status == 400
    assert (await cloud.admin.put("/os-services/disable", {"status": "disabled"}, minor)).status == 400


@pytest.mark.parametrize("minor", [1, 53])
async def test_a_service_is_forgotten_once_it_holds_nothing(cloud: Cloud, minor: int) -> None:
    node = await add_host(cloud, "h1")
    await add_host(cloud, "h2")
    await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "a"}})
    await cloud.admin.post("/os-aggregates/1/action", {"add_host": {"host": "h2"}})
    await add_server(cloud, host="h1", node_uuid=node)
    ids = await _ids(cloud, minor)
    assert (await cloud.admin.delete(f"/os-services/{ids['h1']}", minor)).status == 409
    assert (await cloud.admin.delete(f"/os-services/{ids['h2']}", minor)).status == 204
    assert list(await _ids(cloud, minor)) == ["h1"]
    assert (await cloud.admin.get("/os-aggregates/1")).json()["aggregate"]["hosts"] == []
    assert len((await cloud.admin.get("/os-hypervisors")).json()["hypervisors"]) == 1
    missing = "99" if minor == 1 else "00000000-0000-4000-8000-000000000000"
    assert (await cloud.admin.delete(f"/os-services/{missing}", minor)).status == 404
    assert (await cloud.admin.delete("/os-services/odd", minor)).status == 400


@pytest.mark.parametrize("minor", versions_of("hypervisors", 75, 88))
async def test_hypervisors(cloud: Cloud, minor: int) -> None:
    node = await add_host(cloud, "h1")
    await add_host(cloud, "h2")
    server = await add_server(cloud, host="h1", node_uuid=node)
    answer = await cloud.admin.get("/os-hypervisors", minor)
    check("hypervisors", "list_search_hypervisors", minor, answer.status, answer.json())
    first, _ = answer.json()["hypervisors"]
    assert first["id"] == (node if minor >= 53 else 1)
    answer = await cloud.admin.get("/os-hypervisors/detail", minor)
    check("hypervisors", "list_hypervisors_detail", minor, answer.status, answer.json())
    answer = await cloud.admin.get(f"/os-hypervisors/{first['id']}", minor)
    check("hypervisors", "get_hypervisor", minor, answer.status, answer.json())
    shown = answer.json()["hypervisor"]
    assert shown["service"]["host"] == "h1"
    if minor < 88:
        assert (shown["vcpus"], shown["memory_mb"], shown["memory_mb_used"]) == (8, 8192, 512)
        assert (shown["free_ram_mb"], shown["running_vms"]) == (7680, 1)
        assert shown["cpu_info"] == ({"arch": "x86_64"} if minor >= 28 else '{"arch":"x86_64"}')
    else:
        assert shown["uptime"] == "up 1 day"
    uptime = await cloud.admin.get(f"/os-hypervisors/{first['id']}/uptime", minor)
    statistics = await cloud.admin.get("/os-hypervisors/statistics", minor)
    if minor < 88:
        check("hypervisors", "get_hypervisor_uptime", minor, uptime.status, uptime.json())
        check("hypervisors", "get_hypervisor_statistics", minor, statistics.status, statistics.json())
        assert statistics.json()["hypervisor_statistics"]["count"] == 2
    else:
        # `statistics` is then the name of a hypervisor, and no uuid.
        assert (uptime.status, statistics.status) == (404, 404)
    if minor < 53:
        answer = await cloud.admin.get("/os-hypervisors/h1/search", minor)
        check("hypervisors", "list_search_hypervisors", minor, answer.status, answer.json())
        answer = await cloud.admin.get("/os-hypervisors/h/servers", minor)
        check("hypervisors", "get_hypervisors_servers", minor, answer.status, answer.json())
        assert answer.json()["hypervisors"][0]["servers"] == [{"uuid": server, "name": f"instance-{server[:8]}"}]
        assert (await cloud.admin.get("/os-hypervisors/h9/search", minor)).status == 404
    else:
        answer = await cloud.admin.get("/os-hypervisors?hypervisor_hostname_pattern=h1&with_servers=true", minor)
        check("hypervisors", "list_search_hypervisors", minor, answer.status, answer.json())
        assert answer.json()["hypervisors"][0]["servers"] == [{"uuid": server, "name": f"instance-{server[:8]}"}]
        _, empty = (await cloud.admin.get("/os-hypervisors?with_servers=1", minor)).json()["hypervisors"]
        assert empty.get("servers") == ([] if minor >= 75 else None)
        assert (await cloud.admin.get("/os-hypervisors/h1/search", minor)).status == 404
        assert (await cloud.admin.get("/os-hypervisors?hypervisor_hostname_pattern=h9", minor)).status == 404
        assert (await cloud.admin.get("/os-hypervisors/1", minor)).status == 400


async def test_hypervisors_are_paged_since_2_33(cloud: Cloud) -> None:
    for number in range(3):
        await add_host(cloud, f"h{number}")
    body = (await cloud.admin.get("/os-hypervisors?limit=2", 33)).json()
    assert [each["id"] for each in body["hypervisors"]] == [1, 2]
    assert body["hypervisors_links"][0]["href"].endswith("limit=2&marker=2")
    body = (await cloud.admin.get("/os-hypervisors/detail?limit=2&marker=2", 33)).json()
    assert [each["id"] for each in body["hypervisors"]] == [3]
    assert len((await cloud.admin.get("/os-hypervisors?limit=2", 32)).json()["hypervisors"]) == 3
    body = (await cloud.admin.get("/os-hypervisors?limit=1", 53)).json()
    marker = body["hypervisors"][0]["id"]
    assert len((await cloud.admin.get(f"/os-hypervisors?marker={marker}", 53)).json()["hypervisors"]) == 2
    assert (await cloud.admin.get("/os-hypervisors?marker=99", 33)).status == 400
    assert (await cloud.admin.get("/os-hypervisors?marker=odd", 53)).status == 400
    assert (await cloud.admin.get("/os-hypervisors?odd=1", 53)).status == 400
    assert (await cloud.admin.get("/os-hypervisors?limit=1&hypervisor_hostname_pattern=h", 53)).status == 400


async def test_the_uptime_of_a_host_that_is_down_or_says_none(cloud: Cloud) -> None:
    await add_host(cloud, "h1")
    await add_host(cloud, "h2")
    assert (await cloud.admin.get("/os-hypervisors/2/uptime")).status == 501
    cloud.clock.time += DOWN_TIME + 1
    assert (await cloud.admin.get("/os-hypervisors/1/uptime")).status == 400
    assert (await cloud.admin.get("/os-hypervisors/9/uptime")).status == 404


async def test_hosts_until_2_42(cloud: Cloud) -> None:
    node = await add_host(cloud, "h1")
    await add_service(cloud, "nova-conductor", "ctl")
    await add_server(cloud, host="h1", node_uuid=node)
    admin = cloud.admin
    answer = await admin.get("/os-hosts", 42)
    check("hosts", "list_hosts", 42, answer.status, answer.json())
    assert answer.json()["hosts"] == [
        {"host_name": "h1", "service": "compute", "zone": "nova"},
        {"host_name": "ctl", "service": "conductor", "zone": "internal"},
    ]
    assert len((await admin.get("/os-hosts?zone=nova", 42)).json()["hosts"]) == 1
    answer = await admin.get("/os-hosts/h1", 42)
    check("hosts", "get_host_detail", 42, answer.status, answer.json())
    by = {each["resource"]["project"]: each["resource"] for each in answer.json()["host"]}
    assert by["(total)"]["memory_mb"] == 8192 and by["(used_max)"]["memory_mb"] == by["red"]["memory_mb"] == 512
    answer = await admin.put("/os-hosts/h1", {"status": "disable"}, 42)
    check("hosts", "update_host", 42, answer.status, answer.json())
    assert answer.json() == {"host": "h1", "status": "disabled"}
    assert (await admin.get("/os-hosts?zone=nova", 42)).json()["hosts"] == []
    assert (await admin.put("/os-hosts/h1", {"maintenance_mode": "enable"}, 42)).status == 501
    assert (await admin.put("/os-hosts/h1", {}, 42)).status == 400
    assert (await admin.put("/os-hosts/h9", {"status": "enable"}, 42)).status == 404
    for act in ("startup", "shutdown", "reboot"):
        assert (await admin.get(f"/os-hosts/h1/{act}", 42)).status == 501
        assert (await admin.get(f"/os-hosts/h9/{act}", 42)).status == 404
    for path in ("/os-hosts", "/os-hosts/h1", "/os-hosts/h1/reboot"):
        assert (await admin.get(path, 43)).status == 404


@pytest.mark.parametrize("minor", [1, 102, 104])
async def test_availability_zones(cloud: Cloud, minor: int) -> None:
    for host in ("h1", "h2", "h3"):
        await add_host(cloud, host)
    await add_service(cloud, "nova-scheduler", "ctl")
    await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "a", "availability_zone": "east"}})
    await cloud.admin.post("/os-aggregates/1/action", {"add_host": {"host": "h2"}})
    await cloud.admin.post("/os-aggregates", {"aggregate": {"name": "b", "availability_zone": "west"}})
    await cloud.admin.post("/os-aggregates/2/action", {"add_host": {"host": "h3"}})
    await cloud.admin.put("/os-services/disable", {"host": "h3", "binary": "nova-compute"})
    answer = await cloud.reader.get("/os-availability-zone", minor)
    check("availability_zone", "list_availability_zone_list", minor, answer.status, answer.json())
    shown = {zone["zoneName"]: zone["zoneState"]["available"] for zone in answer.json()["availabilityZoneInfo"]}
    assert shown == {"east": True, "nova": True, "west": False}
    answer = await cloud.admin.get("/os-availability-zone/detail", minor)
    check("availability_zone", "list_availability_zone_list_detail", minor, answer.status, answer.json())
    by_name = {zone["zoneName"]: zone["hosts"] for zone in answer.json()["availabilityZoneInfo"]}
    assert list(by_name["east"]) == ["h2"] and list(by_name["internal"]) == ["ctl"] and by_name["west"] is None
    assert by_name["east"]["h2"]["nova-compute"]["available"] is True
    assert (await cloud.reader.get("/os-availability-zone/detail", minor)).status == 403
    zones = {each["host"]: each["zone"] for each in (await cloud.admin.get("/os-services")).json()["services"]}
    assert zones == {"h1": "nova", "h2": "east", "h3": "west", "ctl": "internal"}
