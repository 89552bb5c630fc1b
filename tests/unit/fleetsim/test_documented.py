"""The examples in docs/fleet-simulator.md are accepted and simulated as they are."""

import asyncio
import re
from pathlib import Path

import pytest

from micronova.fleetsim.fleet import DEFAULT_FLEET, read_fleet
from micronova.fleetsim.policies import OPTIONS, parse_policy
from micronova.fleetsim.simulation import Experiment, check, simulate
from micronova.fleetsim.trace import TraceLine, read_trace

PAGE = (Path(__file__).parents[3] / "docs" / "fleet-simulator.md").read_text()


def _block(kind: str, path: Path) -> Path:
    [text] = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    path.write_text(text)
    return path


def test_the_trace_and_the_policies(tmp_path: Path) -> None:
    requests = read_trace(_block("json", tmp_path / "trace.jsonl"))
    experiment = Experiment(DEFAULT_FLEET, 3, requests)
    texts = [text for text in re.findall(r"--policy ([a-z]\S+)", PAGE) if not text.endswith("micronova.toml")]
    assert len(texts) >= 5
    for policy in map(parse_policy, texts):
        if "DifferentHostFilter" in policy.settings.filter_scheduler.enabled_filters:
            check(experiment, [policy])
        outcome = asyncio.run(simulate(experiment, policy, timer=lambda: 0.0))
        assert outcome.refused_servers == {"dedicated CPUs": 1}, policy.name  # the default fleet has none


def test_the_fleet(tmp_path: Path) -> None:
    fleet = read_fleet(_block("toml", tmp_path / "fleet.toml"))
    assert [(kind.name, kind.share) for kind in fleet.kinds] == [("general", 3.0), ("pinned", 1.0)]
    assert fleet.zones == ("east", "west")


@pytest.mark.parametrize("field", TraceLine.__struct_fields__)
def test_every_field_of_a_trace_is_described(field: str) -> None:
    assert f"\n| `{field}` | " in PAGE


def test_the_options_of_policies_are_in_the_sections_that_the_page_names() -> None:
    assert set(OPTIONS.values()) == {"default", "scheduler", "filter_scheduler"}
    assert all(f"`{section}`" in PAGE for section in OPTIONS.values())
