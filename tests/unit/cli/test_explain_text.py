"""Decisions as people read them in a terminal."""

from typing import Any

import msgspec

from micronova.cli.explain_text import MOST_LINES, WIDTH, dry_run_lines, explanation_lines, server_lines
from micronova.objects.explanation import Explanation, FilterStep, Winner
from micronova.objects.scheduling import DryRunResult, Selection
from micronova.servers.dry_run import DryRunRequest

WEIGHERS = {"RAMWeigher": 1.0, "CPUWeigher": 0.5, "DiskWeigher": -0.0, "BuildFailureWeigher": -1000000.0}
STEPS = (
    FilterStep(name="RetryFilter", removed=0, remaining=12),
    FilterStep(name="RamFilter", removed=11, remaining=1, hosts=tuple(f"h{number}" for number in range(10, 0, -1))),
    FilterStep(name="Plugin", removed=0, remaining=1, error="RuntimeError: " + "no " * 50),
)


def a_decision(**fields: Any) -> Explanation:
    winner = Winner(host="h12", node="h12", weight=-999998.5, weighers=WEIGHERS)
    given: dict[str, Any] = {"hosts": 12, "filters": STEPS, "winners": (winner,), "took": 432}
    return Explanation(**(given | fields))


def a_server(*requests: Any, fault: str | None = None) -> dict[str, Any]:
    return {"server": {"uuid": "u", "name": "web", "host": None, "fault": fault}, "requests": list(requests)}


def test_a_decision_is_a_table_that_fits() -> None:
    lines = explanation_lines(a_decision(), "")
    assert lines[:5] == [
        "decided among 12 hosts in 0.4 ms",
        "  filter       entered  removed     left",
        "  RetryFilter       12        -       12",
        "  RamFilter         12       11        1",
        "      h1, h2, h3, h4, h5, h6, h7, h8, h9, h10 and 1 more",
    ]
    assert "  chosen: h12, weight -999998.50 = RAMWeigher +1.00, CPUWeigher +0.50," in lines
    assert "-0.00" not in " ".join(lines) and "failed and let no host pass: RuntimeError:" in " ".join(lines)
    assert all(len(line) <= WIDTH for line in lines)


def test_long_names_fit_too() -> None:
    hosts = tuple(f"compute-{number}.{'x' * 60}.example.org" for number in range(10))
    step = FilterStep(name="F" * 100, removed=10, remaining=0, hosts=hosts)
    lines = explanation_lines(a_decision(filters=(step,), winners=()), "attempt 1 of 3: ")
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[-1] == "  no host was left"


def test_all_attempts_of_all_requests_are_told() -> None:
    refused = a_decision(winners=())
    build = {"request_id": "req-1", "operation": "build", "ended": True}
    move = {"request_id": "req-2", "operation": "resize", "ended": False}
    found = a_server(
        build | {"decisions": msgspec.to_builtins([a_decision(), refused])},
        move | {"decisions": msgspec.to_builtins([a_decision(winners=(), waits=True)])},
        fault="No valid host was found.",
    )
    lines = server_lines(found)
    assert [line for line in lines if "attempt" in line] == [
        "attempt 1 of 2: decided among 12 hosts in 0.4 ms",
        "attempt 2 of 2: decided among 12 hosts in 0.4 ms",
    ]
    assert "build, request req-1" in lines and "resize, request req-2, still runs" in lines
    assert "  no host was left; the scheduler is asked again" in lines
    assert lines[-1] == "fault: No valid host was found."


def test_what_is_not_kept_is_said() -> None:
    assert "conductor.keep_finished" in " ".join(server_lines(a_server()))
    assert "  the filters of this request are not kept any more" in explanation_lines(a_decision(filters=()), "")
    forced = explanation_lines(a_decision(filters=(), forced=True), "")
    assert "An admin named the host" in forced[1] and not [line for line in forced if "not kept" in line]


def test_a_dry_run_lists_hosts_once_and_not_all_of_many() -> None:
    places = [Selection(host=f"h{number // 2}", node="n", node_uuid="u", zone="east") for number in range(60)]
    told = DryRunResult(selections=tuple(places), explanation=a_decision(), fit=60)
    lines = dry_run_lines(DryRunRequest(flavor="m1.small", count=60), told)
    assert lines[:2] == ["60 servers of flavor m1.small would go to", "  h0 (zone east, 2 servers)"]
    assert f"  and {30 - MOST_LINES} more hosts: --json lists all" in lines
    assert lines[-1] == "Nothing was claimed. Quotas and networks were not looked at."


def test_a_dry_run_says_what_has_no_effect() -> None:
    remark = "The extra spec hw:cpu_polcy of flavor m1.small has no effect: nothing on this cloud honours it."
    told = DryRunResult(selections=(), explanation=a_decision(), fit=0, message="No valid host.", remarks=(remark,))
    lines = dry_run_lines(DryRunRequest(flavor="m1.small"), told)
    assert remark in " ".join(lines) and max(map(len, lines)) <= WIDTH


def test_a_dry_run_that_is_refused_has_the_words_of_the_fault() -> None:
    refused = DryRunResult(selections=(), explanation=a_decision(winners=()), fit=0, message="No valid host was found.")
    lines = dry_run_lines(DryRunRequest(flavor="m1.small"), refused)
    assert lines[0] == "1 server of flavor m1.small would be refused. No valid host was found."
