"""The worked example of docs/extend.md: installed as it stands there, every part of it is found and works."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from micronova.api.compute.extensions import load_extensions
from micronova.conf.settings import load
from micronova.http.service import Route
from micronova.http.versions import since, until
from micronova.plugins.hooks import Hooks
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.weights.registry import load_weighers
from tests.unit.scheduler.factory import NOW, OPTIONS, a_host, a_spec, a_table

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
PROJECT, ENABLED = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
[MODULE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    project = PROJECT["project"]
    (tmp_path / "micronova_racks.py").write_text(MODULE)
    about = tmp_path / f"micronova_racks-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("micronova_racks", None)


def test_filter_and_weigher() -> None:
    enabled = ENABLED["filter_scheduler"]["enabled_filters"]
    default = load(None, {}).filter_scheduler.enabled_filters
    assert tuple(enabled) == (*default, "RackFilter")
    weighers = [each for each in load_weighers() if each.name == "QuietHostWeigher"]
    scheduler = FilterScheduler(load_filters(OPTIONS, enabled), weighers, random=Random(1))
    table = a_table(a_host("rack-1-a"), a_host("rack-7-a", num_instances=5), a_host("rack-7-b", num_instances=2))
    decision = scheduler.select(table, a_spec(hints={"rack": ["rack-7"]}), ["i"], now=NOW)
    assert [each.selected.host for each in decision.destinations] == ["rack-7-b"]


def test_plain_functions() -> None:
    weighers = [each for each in load_weighers() if each.name == "FewFailuresWeigher"]
    assert [each.multiplier for each in weighers] == [1.0]
    scheduler = FilterScheduler(load_filters(OPTIONS, ["CalmHostFilter"]), weighers, random=Random(1))
    table = a_table(a_host("a", num_io_ops=5), a_host("b", failed_builds=2), a_host("c", failed_builds=1))
    decision = scheduler.select(table, a_spec(), ["i", "j"], now=NOW)
    assert [each.selected.host for each in decision.destinations] == ["c", "c"]
    assert decision.explanation.winners[0].weighers == {"FewFailuresWeigher": 1.0}
    [step] = [each for each in decision.explanation.filters if each.name == "CalmHostFilter"]
    assert step.hosts == ("a",)


def test_what_filters_say_that_they_honour() -> None:
    rack, calm = load_filters(OPTIONS, ["RackFilter", "CalmHostFilter"])[:2]
    assert rack.hints == {"rack"} and not calm.hints


def test_hook(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Hooks.load().pre("create_instance", a_spec(project_id="engines"), None)
    assert "The project engines asks for servers" in caplog.text


async def test_extension() -> None:
    extensions = load_extensions()
    detail = Route(
        method="GET", path="/servers/detail", handler=show_detail, policy="", answer={"servers": [{"id": str}]}
    )
    before, changed, added = extensions.extend([detail], None)
    assert (before.versions, changed.versions) == (until(89), since(90)) and before.answer == detail.answer
    assert added.label == "GET /racks" and added.policy in {rule.name for rule in extensions.rules}
    assert changed.answer == {"servers": [{"id": str, "racks:rack?": str}]}
    answer = await changed.handler(None)
    assert [each["racks:rack"] for each in answer["servers"] if "racks:rack" in each] == ["rack-7"]
    assert [each.extension.alias for each in extensions.used] == ["os-racks"] and not extensions.problems


async def show_detail(request: object) -> dict[str, list[dict[str, str]]]:
    return {"servers": [{"id": "1", "OS-EXT-SRV-ATTR:host": "rack-7-node-3"}, {"id": "2"}]}
