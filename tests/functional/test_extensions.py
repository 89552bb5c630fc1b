"""What others can add or change without touching our code: hooks, faults at run time; and the repair of counters.

`test_extension_package.py` has API extensions.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.conductor.findings.counters import repair_counters
from micronova.db.tables import allocations, inventories, quota_usages
from tests.functional.cloud import CloudOptions, OneProcess


class Recorder:
    """A hook that remembers how it was called."""

    calls: list[tuple[str, str]] = []

    def pre(self, *args: Any) -> None:
        Recorder.calls.append(("pre", type(args[0]).__name__))

    def post(self, result: Any, *args: Any) -> None:
        Recorder.calls.append(("post", type(result).__name__))


class Broken:
    """A hook that fails."""

    def pre(self, *args: Any) -> None:
        raise RuntimeError("this hook is broken")


class Entry:
    """Stands in for an installed entry point."""

    dist = None

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.value, self._thing = name, f"test:{name}", thing

    def load(self) -> Any:
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install hooks, good and bad ones."""
    Recorder.calls = []
    groups = {
        "micronova.hooks": [
            Entry("create_instance", Recorder),
            Entry("create_instance", Broken),
            Entry("build_instance", Recorder),
            Entry("build_instance", ImportError("not there")),
        ],
    }
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **wanted: groups.get(wanted.get("group", "")) or real(**wanted),
    )


async def test_hooks(installed: None, tmp_path: Path) -> None:
    """They are found and run; faulty ones are skipped."""
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        user = cloud.caller()
        await user.boot(name="hooked")
        await cloud.settled()
        assert Recorder.calls == [
            ("pre", "RequestContext"),
            ("post", "Created"),
            ("pre", "Context"),
            ("post", "dict"),
        ]
    finally:
        await cloud.stop()


async def test_fault_rules_at_run_time(tmp_path: Path) -> None:
    """An admin can make hosts fail while they run, if the deployment allows it; nobody else can."""
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2, settings={"api": {"fault_injection": True}}))
    await cloud.start()
    try:
        user, admin = cloud.caller(), cloud.caller().admin
        rules = {"rules": [{"operation": "spawn", "kind": "abort", "message": "as asked"}]}
        assert (await user.request("PUT", "/os-fault-rules/fake-1", rules)).status == 403
        assert (await admin.request("PUT", "/os-fault-rules/nowhere", rules)).status == 404
        bad = await admin.request("PUT", "/os-fault-rules/fake-1", {"rules": [{"operation": "dance"}]})
        assert bad.status == 400
        assert (await admin.request("PUT", "/os-fault-rules/fake-1", rules)).status == 200
        shown = await user.wait_for(await user.create(name="doomed"), "ERROR")
        assert "as asked" in shown["fault"]["message"]
        [rule] = (await admin.request("GET", "/os-fault-rules/fake-1")).json()["rules"]
        assert rule["hits"] == 1
        assert (await admin.request("PUT", "/os-fault-rules/fake-1", {"rules": []})).json() == {"rules": []}
        await user.boot(name="fine")
    finally:
        await cloud.stop()


async def test_fault_rules_are_off_by_default(tmp_path: Path) -> None:
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        assert (await cloud.caller().admin.request("GET", "/os-fault-rules/fake-1")).status == 404
    finally:
        await cloud.stop()


async def test_what_drifted_is_found_and_repaired(tmp_path: Path) -> None:
    """Counters that a manual change of the database made wrong: the audit names them, the job puts them right."""
    cloud = OneProcess(tmp_path, CloudOptions(hosts=2))
    await cloud.start()
    try:
        await cloud.caller().boot()
        await cloud.settled()
        database = cloud.process.database
        assert database is not None

        def damage(conn: sa.Connection) -> None:
            node = conn.execute(sa.select(inventories.c.node_uuid)).scalar()
            conn.execute(inventories.update().values(used=inventories.c.used + 7))
            conn.execute(quota_usages.update().values(in_use=quota_usages.c.in_use + 3))
            orphan = {"consumer_uuid": "gone", "node_uuid": node, "resource_class": "VCPU", "used": 2}
            conn.execute(allocations.insert(), orphan)

        await database.write(damage)
        kinds = {finding["kind"] for finding in await run_audit(cloud.process)}
        assert kinds == {"allocation", "quota"}
        assert await repair_counters(database, 1)
        assert await run_audit(cloud.process) == []
        assert await repair_counters(database, 1) == []
    finally:
        await cloud.stop()
