"""What operators watch a region with: metrics, the alerts and the dashboard that name them, the audit's record."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import yaml

from micronova.cli.region_status import ENDPOINTS, lines
from micronova.cli.region_status import collect as collect_status
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conductor import region_metrics
from micronova.conductor.manager import ConductorManager
from micronova.conductor.region_metrics import INTERVAL, SHARE, RegionMetrics
from micronova.conf.settings import load
from micronova.db import audits
from micronova.objects.clock import SystemClock
from micronova.rpc.bus import Bus
from micronova.telemetry.metrics import Metrics, render
from tests.clocks import SetClock
from tests.functional.cloud import CloudOptions, OneProcess

PACKAGING = Path(__file__).parents[2] / "packaging"
NAME = re.compile(r"\bmicronova_[a-z_]+")

together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = OneProcess(tmp_path_factory.mktemp("watched"), CloudOptions(hosts=2))
    await made.start()
    yield made
    await made.stop()


def _region_metrics(process: Process) -> RegionMetrics:
    [conductor] = [role for role in process.started if isinstance(role, ConductorManager)]
    return conductor._region_metrics


def _rendered(process: Process) -> str:
    return render(process.databases, process.bus, process.telemetry.metrics).decode()


@together
async def test_one_conductor_counts_the_region(cloud: OneProcess) -> None:
    await cloud.caller().boot(name="counted")
    await cloud.settled()
    process = cloud.process
    await _region_metrics(process).count()
    text = _rendered(process)
    assert "micronova_region_counted 1.0" in text
    assert 'micronova_services{binary="nova-compute",state="up"} 2.0' in text
    assert 'micronova_servers{status="ACTIVE"} 1.0' in text
    # An alert watches how this one grows: it has to exist before the first such server.
    assert 'micronova_servers{status="ERROR"} 0.0' in text
    assert 'micronova_queue_messages{queue="conductor:compute_task"} 0.0' in text
    assert process.database is not None and process.bus is not None
    # Another conductor that is asked as well leaves the job to the first.
    metrics = Metrics()
    other = RegionMetrics(
        process.database, process.bus, SystemClock(), metrics, owner="conductor:other", service_down_time=20.0
    )
    await other.count()
    text = render(process.databases, process.bus, metrics).decode()
    assert "micronova_region_counted 0.0" in text and "micronova_servers{" not in text


@together
async def test_slow_counts_are_shown_by_one_conductor(cloud: OneProcess) -> None:
    """They are far apart. The job is kept meanwhile: figures that two conductors show are added up."""
    database, bus, clock = cloud.process.database, cloud.process.bus, SetClock()
    assert database is not None and bus is not None
    counts = list[float]()

    class SlowBus:
        """Of these two only: the cloud's own conductor may count meanwhile."""

        async def queue_lengths(self, queues: Any) -> Any:
            counts.append(clock.time)
            clock.time += 9.0
            return {}

    shown = {name: Metrics() for name in ("conductor:slow-1", "conductor:slow-2")}
    conductors = [
        RegionMetrics(database, cast(Bus, SlowBus()), clock, metrics, owner=name, service_down_time=20.0)
        for name, metrics in shown.items()
    ]
    for _ in range(20):
        for each in conductors:
            await each.keep_or_count()
        texts = [render({}, bus, metrics).decode() for metrics in shown.values()]
        assert ["micronova_region_counted 1.0" in text for text in texts] == [True, False]
        clock.time += INTERVAL
    assert len(counts) == 2 and counts[1] - counts[0] >= SHARE * 9.0


@together
async def test_a_region_is_counted_while_the_broker_is_away(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the database has is shown, and the next count is not put off by the wait for the broker."""
    process, found = cloud.process, _region_metrics(cloud.process)
    assert process.bus is not None

    async def never(queues: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as away:
        away.setattr(process.bus, "queue_lengths", never)
        away.setattr(region_metrics, "BROKER_TIMEOUT", 1.0)
        await found.count()
        text = _rendered(process)
    assert "micronova_region_counted 1.0" in text and 'micronova_servers{status="ERROR"} 0.0' in text
    assert "micronova_queue_messages{" not in text

    async def counted() -> bool | None:
        await found.keep_or_count()
        return True if "micronova_queue_messages{" in _rendered(process) else None

    await cloud.until(counted, "the queues to be counted", seconds=0.75 * SHARE)


@together
async def test_open_operations_are_counted_by_kind_and_step(cloud: OneProcess) -> None:
    user, process = cloud.caller(), cloud.process
    async with cloud.faults({"operation": "spawn", "name": "held", "kind": "hang"}):
        held = await user.create(name="held")

        async def counted() -> bool | None:
            await _region_metrics(process).count()
            return True if 'operations_open{kind="build",step="dispatched"} 1.0' in _rendered(process) else None

        await cloud.until(counted, "the build to be counted")
        text = _rendered(process)
        assert re.search(r'micronova_operations_oldest_seconds\{kind="build",step="dispatched"\} \d', text)
        assert 'micronova_operations_late{kind="build",step="dispatched"} 0.0' in text
    await user.delete(f"/servers/{held}")
    await cloud.settled()


def _declared() -> set[str]:
    """Return the names of all metrics, as Prometheus stores them."""
    names: set[str] = set()
    for file in (Path(__file__).parents[2] / "src/micronova").rglob("*.py"):
        text = file.read_text()
        for kind, name in re.findall(r'(Counter|Gauge|Histogram)MetricFamily\(\s*f?"(micronova_[a-z_{}]+)"', text):
            names |= {
                "Counter": {f"{name}_total"},
                "Gauge": {name},
                "Histogram": {f"{name}_bucket", f"{name}_count", f"{name}_sum"},
            }[kind]
        names |= set(re.findall(r'\.gauge\(\s*"(micronova_[a-z_]+)"', text))
        names |= {f"{name}_total" for name in re.findall(r'\.counter\(\s*"(micronova_[a-z_]+)"', text)}
    template = "micronova_messages_{name}_total"
    assert template in names  # one loop makes three
    return names | {template.replace("{name}", name) for name in ("handled", "failed", "expired")}


def test_the_alerts_name_metrics_that_exist() -> None:
    document = yaml.safe_load((PACKAGING / "prometheus/micronova-alerts.yaml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len(rules) >= 10 and len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule) and rule["annotations"]["summary"]
        assert rule["annotations"]["description"], rule["alert"]  # what to do
        named = set(NAME.findall(rule["expr"]))
        assert named and named <= _declared(), rule["alert"]


def test_the_dashboard_names_metrics_that_exist() -> None:
    document = json.loads((PACKAGING / "grafana/micronova-region.json").read_text())
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    assert len(expressions) >= 15 and all(panel["description"] for panel in document["panels"])
    for expression in expressions:
        named = set(NAME.findall(expression))
        assert named and named <= _declared(), expression


@together
async def test_the_metrics_of_a_cloud_are_those_that_are_declared(cloud: OneProcess) -> None:
    await _region_metrics(cloud.process).count()
    found = set(re.findall(r"^(micronova_[a-z_]+)", _rendered(cloud.process), re.MULTILINE))
    created = {name for name in found if name.endswith("_created")}
    unknown = found - _declared() - created
    assert not unknown


@pytest.mark.asyncio
async def test_a_process_with_nothing_but_embedded_services_has_metrics(tmp_path: Path) -> None:
    roles = ["identity", "image", "network", "volume"]
    process = Process(load(environ={}), roles, StateDirectory(tmp_path / "cloud"))
    await process.start(socket.create_server(("127.0.0.1", 0)))
    try:
        text = _rendered(process)
        for pool, size in (("passwords", 2), ("image-data", 4), ("volume-files", 2), ("volume-copies", 4)):
            assert f'micronova_threads_size{{pool="{pool}"}} {size}.0' in text
            assert f'micronova_threads_used{{pool="{pool}"}} 0.0' in text
        for service in ("identity", "network"):
            [number] = re.findall(rf'^micronova_db_writes_total{{service="{service}"}} (\S+)$', text, re.MULTILINE)
            assert float(number) > 0
        assert 'service="compute"' not in text
    finally:
        await process.stop()


@together
async def test_an_audit_is_recorded_and_status_shows_the_region(cloud: OneProcess, tmp_path: Path) -> None:
    process = cloud.process
    assert process.database is not None
    await cloud.assert_clean()
    recorded = await process.database.read(audits.last)
    assert recorded is not None and recorded.findings == {} and "@" in recorded.auditor
    settings = load(None, {}, default={"state_path": str(process.directory.path)})
    found = await collect_status(settings, None)
    assert not found.database.error and not found.broker.error and found.services == ()
    [shown] = found.database.processes
    assert shown.host == process.host and "conductor" in shown.roles and shown.seen_seconds_ago < 60
    said = lines(found)
    assert all(len(line) <= 80 for line in said), said
    assert "last audit: " in said[-1] and said[-1].endswith("nothing is wrong")
    assert any(line.startswith("nova-compute: 2 up") for line in said)
    jobs = {line.split()[0]: line for line in said[said.index("periodic jobs:") + 1 :] if line.startswith("  ")}
    assert "last run" in jobs["region_metrics"] and "never ran" in jobs["cache_images"] and "repair_counters" in jobs


@together
async def test_status_works_without_database_broker_and_services(tmp_path: Path) -> None:
    settings = load(
        None,
        {},
        default={"transport_url": "amqp://user:hidden-1@127.0.0.1:1/", "state_path": str(tmp_path)},
        database={"connection": "postgresql://user:hidden-2@127.0.0.1:1/none"},
        identity={"auth_url": "http://127.0.0.1:1/identity/v3"},
        neutron={"endpoint_override": "http://127.0.0.1:1/network"},
    )
    async with asyncio.timeout(60):
        found = await collect_status(settings, None)
    assert found.database.error and found.broker.error
    [service] = found.services
    assert service.service == "identity, network" and service.error
    said = lines(found)
    assert all(len(line) <= 80 for line in said), said
    text = "\n".join(said)
    assert "database: AWAY" in text and "broker: AWAY" in text and "DOES NOT WORK" in text and "hidden" not in text


def test_status_asks_every_service_that_has_a_url() -> None:
    settings = load(None, {})
    for section, option in ENDPOINTS.values():
        assert hasattr(getattr(settings, section), option)
