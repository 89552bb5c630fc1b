"""Telemetry of a whole cloud: one trace across all roles, metrics, and the request id in each log line."""

import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from micronova.cli.telemetry import Telemetry
from micronova.cli.timeline import find_timeline
from micronova.cli.timeline_chart import bars_of
from micronova.clients.network.client import NetworkClient
from micronova.db.tables import operations
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Unavailable
from micronova.objects.operations import VERSIONS
from micronova.rpc.bus import Bus
from micronova.telemetry.logs import JSONLines
from micronova.telemetry.metrics import render
from micronova.telemetry.tracing import Tracing
from tests.distort import DistortedBus, Distortion
from tests.functional.cloud import IMAGE, CloudOptions, OneProcess
from tests.functional.servers.embedded_services import image, network
from tests.functional.servers.test_volumes import Volumes, attachment


class Spans:
    """The spans of a cloud, by trace and by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def of(self, root: str) -> dict[str, ReadableSpan]:
        """Return the spans of the trace that a request began, by name; of several, the one that ended first."""
        spans = self.exporter.get_finished_spans()
        [trace] = {span.context.trace_id for span in spans if span.name == root}
        return {span.name: span for span in reversed(spans) if span.context.trace_id == trace}


@asynccontextmanager
async def traced_cloud(directory: Path, wanted: CloudOptions | None = None) -> AsyncIterator[tuple[OneProcess, Spans]]:
    spans = Spans()
    cloud = OneProcess(directory, wanted or CloudOptions(hosts=2))
    cloud.process.telemetry = Telemetry(SystemClock(), Tracing(spans.exporter, host="test", at_once=True))
    await cloud.start()
    try:
        yield cloud, spans
    finally:
        await cloud.stop()


def parent_of(span: ReadableSpan, spans: dict[str, ReadableSpan]) -> str:
    assert span.parent is not None, f"{span.name} has no parent"
    return next(each.name for each in spans.values() if each.context.span_id == span.parent.span_id)


async def test_a_boot_is_one_trace_across_all_roles(tmp_path: Path) -> None:
    async with traced_cloud(tmp_path) as (cloud, made):
        user = cloud.caller()
        server = await user.boot(name="traced")
        await cloud.settled()
    spans = made.of("compute POST /servers")
    roles = {span.instrumentation_scope.name for span in spans.values() if span.instrumentation_scope}
    assert roles == {"micronova.api", "micronova.conductor", "micronova.scheduler", "micronova.compute"}
    assert spans["compute POST /servers"].parent is None
    parents = {name: parent_of(span, spans) for name, span in spans.items() if span.parent is not None}
    assert parents == {
        "conductor.run_operations": "compute POST /servers",
        "operation build": "conductor.run_operations",
        "schedule": "operation build",
        "scheduler.select_destinations": "schedule",
        "dispatch": "operation build",
        "compute.execute_order": "dispatch",
        "build": "compute.execute_order",
        "spawn": "build",
        "conductor.report": "compute.execute_order",
    }
    attributes = spans["build"].attributes or {}
    assert attributes["instance"] == server["id"]
    assert str(attributes["host"]).startswith("fake-")
    assert (spans["compute POST /servers"].attributes or {})["http.response.status_code"] == 202


async def test_the_trace_continues_in_other_services(tmp_path: Path) -> None:
    async with traced_cloud(tmp_path, CloudOptions(hosts=2, roles=("network",))) as (cloud, made):
        user = cloud.caller()
        net = await network(user)
        await user.boot(networks=[{"uuid": net["id"]}])
        await cloud.settled()
    spans = made.of("compute POST /servers")
    assert parent_of(spans["network POST /v2.0/ports"], spans) == "network"
    assert parent_of(spans["network"], spans) == "operation build"


async def test_a_callers_trace_continues(tmp_path: Path) -> None:
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with traced_cloud(tmp_path) as (cloud, made):
        user = cloud.caller()
        await user.request("GET", "/servers", headers={"traceparent": f"00-{trace}-{span}-01"})
        await user.request("GET", "/flavors", headers={"traceparent": "nonsense" * 1000})
    listed = made.of("compute GET /servers")["compute GET /servers"]
    assert f"{listed.context.trace_id:032x}" == trace
    assert listed.parent is not None and f"{listed.parent.span_id:016x}" == span
    assert made.of("compute GET /flavors")["compute GET /flavors"].parent is None


async def test_a_conductor_that_takes_an_operation_over_continues_its_trace(tmp_path: Path) -> None:
    """The cast to the conductor is lost: the sweep finds the operation, and the trace in its row."""

    def lose_hints(bus: Bus) -> Bus:
        hints = Distortion(drop_casts=True, applies=lambda method: method.name == "run_operations")
        return DistortedBus(bus, hints, clock=SystemClock(), random=random.Random(1))

    async with traced_cloud(tmp_path, CloudOptions(hosts=2, wrap_bus=lose_hints)) as (cloud, made):
        await cloud.caller().boot()
        await cloud.settled()
    spans = made.of("compute POST /servers")
    assert "conductor.run_operations" not in spans
    assert parent_of(spans["operation build"], spans) == "compute POST /servers"
    assert parent_of(spans["spawn"], spans) == "build"


async def test_heartbeats_begin_no_traces(tmp_path: Path) -> None:
    async with traced_cloud(tmp_path) as (cloud, made):
        before = cloud.process.bus.stats().handled.get("conductor.heartbeat", 0)  # type: ignore[union-attr]

        async def beaten() -> bool | None:
            now = cloud.process.bus.stats().handled["conductor.heartbeat"]  # type: ignore[union-attr]
            return True if now > before + 1 else None

        await cloud.until(beaten, "heartbeats")
    assert not [span.name for span in made.exporter.get_finished_spans() if "heartbeat" in span.name]


async def test_metrics_count_requests_operations_and_decisions(tmp_path: Path) -> None:
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        user = cloud.caller()
        server = await user.boot()
        await user.refused(404, "GET", "/servers/11111111-1111-4111-8111-111111111119")
        await user.delete(f"/servers/{server['id']}")
        await user.gone(server["id"])
        await cloud.settled()
        process = cloud.process
        text = render(process.databases, process.bus, process.telemetry.metrics).decode()
    finally:
        await cloud.stop()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("micronova_"))
    request = 'micronova_http_requests_total{route="%s",service="compute",status="%d"}'
    assert lines[request % ("POST /servers", 202)] == "1.0"
    assert lines[request % ("GET /servers/{id}", 404)] >= "1.0"
    assert lines['micronova_http_request_seconds_count{route="POST /servers",service="compute"}'] == "1.0"
    for kind in ("build", "delete"):
        assert lines[f'micronova_operation_seconds_count{{kind="{kind}",result="success"}}'] == "1.0"
        assert float(lines[f'micronova_operation_seconds_sum{{kind="{kind}",result="success"}}']) > 0
    assert float(lines["micronova_scheduler_decision_seconds_count"]) >= 1
    assert lines["micronova_builds_in_flight"] == "0.0"
    assert float(lines["micronova_conductor_unhealthy_seconds"]) >= 0.0
    assert float(lines['micronova_db_writes_total{service="compute"}']) > 0
    assert 'micronova_messages_handled_total{method="scheduler.select_destinations"}' in lines


async def _unavailable(*args: Any, **named: Any) -> None:
    raise Unavailable("The network service does not answer.")


def _open_in_step(cloud: OneProcess, step: str) -> Any:
    async def probe() -> bool | None:
        return True if [row.step for row in await cloud.open_operations()] == [step] else None

    return probe


async def test_each_operation_is_counted_once_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"default": {"reclaim_instance_interval": 3600.0, "shelved_offload_time": -1}}
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2, roles=("network", "image", "volume"), settings=settings))
    await cloud.start()
    try:
        user = cloud.caller()
        net = await network(user)
        volume, other_volume = await Volumes(user).create(), await Volumes(user).create()
        base = await image(user)
        metrics = cloud.process.telemetry.metrics

        def counted() -> Counter[tuple[str, str]]:
            return Counter({ended: sum(times.counts) for ended, times in metrics.operations.items()})

        id = (await user.boot(name="all-actions", imageRef=base))["id"]
        for action, value, status in (
            ("os-stop", None, "SHUTOFF"), ("os-start", None, "ACTIVE"), ("reboot", {"type": "HARD"}, "ACTIVE"),
            ("pause", None, "PAUSED"), ("unpause", None, "ACTIVE"),
            ("suspend", None, "SUSPENDED"), ("resume", None, "ACTIVE"), ("createImage", {"name": "i"}, "ACTIVE"),
            ("createBackup", {"name": "b", "backup_type": "daily", "rotation": 1}, "ACTIVE"),
            ("rescue", None, "RESCUE"), ("trigger_crash_dump", None, "RESCUE"), ("unrescue", None, "ACTIVE"),
            ("changePassword", {"adminPass": "new"}, "ACTIVE"),
            ("rebuild", {"imageRef": base}, "ACTIVE"),
            ("shelve", None, "SHELVED"), ("unshelve", None, "ACTIVE"),
            ("shelve", None, "SHELVED"), ("shelveOffload", None, "SHELVED_OFFLOADED"), ("unshelve", None, "ACTIVE"),
        ):  # fmt: skip
            await user.admin.act(id, action, value, 200 if action == "rescue" else 202)
            await user.wait_for(id, status)
            await cloud.settled()
        await user.delete(f"/servers/{id}")
        await user.wait_for(id, "SOFT_DELETED")
        await user.act(id, "restore")
        await user.wait_for(id, "ACTIVE")
        await cloud.settled()
        for action, value in (("resize", {"flavorRef": "2"}), ("migrate", None)):
            await user.admin.act(id, action, value)
            await user.wait_for(id, "VERIFY_RESIZE")
            end = "revertResize" if action == "resize" else "confirmResize"
            await user.act(id, end, status=202 if action == "resize" else 204)
            await user.wait_for(id, "ACTIVE")
            await cloud.settled()
        await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})
        await user.wait_for(id, "ACTIVE")
        await cloud.settled()
        async with cloud.faults({"operation": "live_migrate", "kind": "hang", "count": 1}):
            await user.admin.act(id, "os-migrateLive", {"host": None, "block_migration": "auto"})
            await cloud.fault_struck()
            await user.admin.act(id, "os-resetState", {"state": "active"})
            await user.wait_for(id, "ACTIVE")
            await cloud.settled()
        other = (await user.boot(imageRef=base, networks=[{"uuid": net["id"]}]))["id"]
        await user.act(other, "resize", {"flavorRef": "2"})
        await user.wait_for(other, "VERIFY_RESIZE")
        await user.admin.act(other, "os-resetState", {"state": "active"})
        await cloud.settled()
        services = (await user.admin.get("/os-services?binary=nova-compute"))["services"]
        [lost] = [each["id"] for each in services if each["host"] == await user.host_of(id)]
        await user.admin.put(f"/os-services/{lost}", {"forced_down": True})
        await user.admin.at(94).act(id, "evacuate", {}, 200)
        await user.wait_for(id, "ACTIVE")
        await user.admin.put(f"/os-services/{lost}", {"forced_down": False})
        await cloud.settled()
        path, body = f"/servers/{id}/os-interface", {"interfaceAttachment": {"net_id": net["id"]}}
        port = (await user.post(path, body, 200))["interfaceAttachment"]["port_id"]
        await user.delete(f"{path}/{port}", 202)
        await cloud.settled()
        volumes, event = f"/servers/{id}/os-volume_attachments", {"name": "volume-extended", "server_uuid": id}
        await user.at(100).post(volumes, attachment(volume), 200)
        await user.admin.post("/os-server-external-events", {"events": [{**event, "tag": volume}]}, 200)
        await cloud.settled()
        await user.admin.put(f"{volumes}/{volume}", attachment(other_volume), 202)
        await cloud.settled()
        await user.admin.put(f"{volumes}/{other_volume}", attachment(volume), 202)
        await cloud.settled()
        await user.delete(f"{volumes}/{volume}", 202)
        await cloud.settled()
        root = {"boot_index": 0, "source_type": "image", "destination_type": "volume", "volume_size": 1}
        mapping = [{**root, "uuid": base, "delete_on_termination": True}]
        from_volume = (await user.boot(imageRef=None, block_device_mapping_v2=mapping))["id"]
        await user.act(from_volume, "createImage", {"name": "of-volumes"})
        await cloud.settled()
        await user.at(100).post(volumes, attachment(volume), 200)  # the end of the server returns it
        async with cloud.faults({"operation": "pause", "kind": "fail"}, {"operation": "attach_interface"}):
            await user.act(id, "pause")
            await cloud.settled()
            await user.refused(500, "POST", path, body)
        async with cloud.faults({"operation": "spawn", "kind": "abort"}):
            await user.wait_for(await user.create(imageRef=base), "ERROR")
            with monkeypatch.context() as away:
                away.setattr(NetworkClient, "deallocate", _unavailable)
                await user.wait_for(await user.create(imageRef=base, networks=[{"uuid": net["id"]}]), "ERROR")
                await cloud.until(_open_in_step(cloud, "cleanup"), "the failed build")
                assert counted()["build", "error"] == 1  # the other one has ports to delete
        await cloud.settled()
        for server in (await user.get("/servers"))["servers"]:
            await user.act(server["id"], "forceDelete")
            await user.gone(server["id"])
        await cloud.settled()
        # The requests that end operations of others count none of them.
        found = sa.select(operations.c.kind, operations.c.result).where(operations.c.result != "cancelled")
        rows = await cloud.read(found)
        ended = Counter((row.kind, row.result) for row in rows)
        assert {kind for kind, _ in ended} == set(VERSIONS)  # a new kind of operation is tested here, too

        async def all_counted() -> bool | None:
            return True if sum(counted().values()) >= len(rows) else None

        await cloud.until(all_counted, "the count")
        assert counted() == ended
    finally:
        await cloud.stop()


class Lines(logging.Handler):
    """Keeps log lines as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JSONLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Any:
    handler = Lines()
    logger = logging.getLogger("micronova")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_every_line_of_a_requests_log_has_its_id(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        user = cloud.caller()
        rule = {"operation": "spawn", "name": "unlucky", "kind": "fail", "count": 1}
        async with cloud.faults(rule):
            body = {"server": {"name": "unlucky", "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}}
            answer = await user.request("POST", "/servers", body)
            await user.wait_for(answer.json()["server"]["id"], "ACTIVE", "ERROR")
        await cloud.settled()
    finally:
        await cloud.stop()
    id = answer.json()["server"]["id"]
    told = [line for line in lines if id in line["message"]]
    loggers = {line["logger"].split(".")[1] for line in told}
    assert {"compute", "conductor"} <= loggers, lines
    assert {line["request_id"] for line in told} == {answer.headers["x-openstack-request-id"]}


async def test_a_servers_timeline_has_every_try_and_the_schedulers_reasons(tmp_path: Path) -> None:
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        user = cloud.caller()
        async with cloud.faults({"operation": "spawn", "name": "unlucky", "kind": "fail", "count": 1}):
            server = await user.boot(name="unlucky")
        await user.admin.post("/flavors", {"flavor": {"name": "huge", "ram": 10**8, "vcpus": 1, "disk": 1}}, 200)
        [huge] = [each["id"] for each in (await user.get("/flavors"))["flavors"] if each["name"] == "huge"]
        lost = await user.create(flavorRef=huge)
        await user.wait_for(lost, "ERROR")
        assert cloud.process.database is not None
        built = await cloud.process.database.read(find_timeline, "unlucky")
        failed = await cloud.process.database.read(find_timeline, lost)
    finally:
        await cloud.stop()
    assert built["server"]["uuid"] == server["id"]
    [operation] = built["operations"]
    first, second = operation["dispatches"]
    assert {first["host"], second["host"]} == {"fake-1", "fake-2"}
    for attempt in (first, second):
        times = [attempt[name] for name in ("begun", "placed", "dispatched", "started", "finished")]
        assert times == sorted(times) and times[0] > 0
    assert operation["explanation"]["hosts"] == 2
    [operation] = failed["operations"]
    assert operation["dispatches"] == []
    assert any(step["removed"] for step in operation["explanation"]["filters"])
    names = [bar.name for bar in bars_of(built["actions"][0], built["events"], built["operations"][0])]
    assert names.count("image, plug, spawn") == 2
