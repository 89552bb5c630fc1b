"""The chart of a server's actions: which steps, how long each took, and what the scheduler decided."""

import io
from typing import Any

from rich.console import Console

from micronova.cli.timeline_chart import bars_of, draw, explain

T = 1_700_000_000_000_000


def action(name: str = "create", finish: int | None = 20_000, **more: Any) -> dict[str, Any]:
    end = None if finish is None else T + finish
    return {"action": name, "request_id": "req-1", "start_time": T, "finish_time": end, "message": None, **more}


def event(host: str, start: int, finish: int | None, result: str | None = "Success", **more: Any) -> dict[str, Any]:
    return {
        "event": "compute__do_build_and_run_instance",
        "request_id": "req-1",
        "host": host,
        "start_time": T + start,
        "finish_time": None if finish is None else T + finish,
        "result": result,
        "details": None,
        **more,
    }


def attempt(host: str, *times: int) -> dict[str, Any]:
    names = ("begun", "placed", "networked", "dispatched", "started", "finished")
    return {"host": host, **{name: time and T + time for name, time in zip(names, times, strict=True)}}


def operation(*dispatches: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "request_id": "req-1",
        "kind": "build",
        "result": "success",
        "dispatches": list(dispatches),
        "explanation": None,
        **more,
    }


def spans(bars: list[Any]) -> list[tuple[str, int, int | None]]:
    return [(bar.name, bar.start - T, None if bar.finish is None else bar.finish - T) for bar in bars]


def test_a_build_is_shown_step_by_step() -> None:
    bars = bars_of(
        action(), [event("h1", 9_000, 20_000)], operation(attempt("h1", 2_000, 5_000, 8_000, 9_000, 10_000, 18_000))
    )
    assert spans(bars) == [
        ("wait for a conductor", 0, 2_000),
        ("schedule and claim", 2_000, 5_000),
        ("bind ports", 5_000, 8_000),
        ("send to the host", 8_000, 9_000),
        ("wait for the host", 9_000, 10_000),
        ("image, plug, spawn", 10_000, 18_000),
        ("report", 18_000, 20_000),
    ]
    assert bars[-1].host == "h1" and bars[-1].result == "Success"


def test_each_try_is_shown_with_why_it_failed() -> None:
    failed = event("h1", 3_001, 6_000, "Error", details="no disk")
    bars = bars_of(
        action(),
        [failed, event("h2", 8_001, 20_000)],
        operation(
            attempt("h1", 1_000, 2_000, 0, 3_000, 4_000, 5_000), attempt("h2", 7_000, 7_500, 0, 8_000, 9_000, 19_000)
        ),
    )
    assert [bar.name for bar in bars].count("image, plug, spawn") == 2
    assert [(bar.result, bar.details) for bar in bars if bar.result] == [("Error", "no disk"), ("Success", "")]
    assert ("wait for a conductor", 6_000, 7_000) in spans(bars)


def test_a_host_whose_clock_is_wrong_is_made_to_fit() -> None:
    bars = bars_of(
        action(), [event("h1", 9_000, 20_000)], operation(attempt("h1", 2_000, 5_000, 0, 9_000, -4_000_000, 90_000_000))
    )
    assert spans(bars)[-3:] == [
        ("wait for the host", 9_000, 9_000),
        ("image, plug, spawn", 9_000, 20_000),
        ("report", 20_000, 20_000),
    ]


def test_a_build_that_goes_on_has_no_end() -> None:
    bars = bars_of(
        action(finish=None), [event("h1", 9_000, None, None)], operation(attempt("h1", 2_000, 5_000, 0, 9_000, 0, 0))
    )
    assert spans(bars)[-1] == ("image, plug, spawn", 9_000, None)


def test_without_the_operation_the_events_are_shown() -> None:
    bars = bars_of(action("stop"), [event("h1", 9_000, 20_000, event="compute_stop_instance")], None)
    assert spans(bars) == [("wait for a conductor", 0, 9_000), ("stop", 9_000, 20_000)]
    only_end = event("", 20_000, 20_000, "Error", event="conductor_schedule_and_build_instances")
    assert spans(bars_of(action(), [only_end], None)) == [("schedule and claim", 0, 20_000)]
    assert spans(bars_of(action("reboot"), [], None)) == [("reboot", 0, 20_000)]


def test_the_schedulers_reasons_are_told() -> None:
    decision = {
        "hosts": 10,
        "filters": [
            {"name": "RamFilter", "removed": 7, "remaining": 3},
            {"name": "DiskFilter", "removed": 0, "remaining": 3},
            {"name": "OddFilter", "removed": 0, "remaining": 3, "error": "oh"},
        ],
        "winners": [
            {"host": "other", "node": "other"},
            {"host": "h1", "node": "h1", "weight": 1.5, "weighers": {"RAMWeigher": 1.0, "CPUWeigher": 0.5}},
        ],
    }
    assert explain(operation(attempt("h1", 1, 2, 0, 3, 4, 5), explanation=decision)) == [
        "scheduler: 10 hosts",
        "  RamFilter removed 7, left 3",
        "  OddFilter failed and let no host pass: oh",
        "  1 filter removed none",
        "  chose h1, weight 1.50 (RAMWeigher +1.00, CPUWeigher +0.50)",
    ]
    assert "an admin named the host" in explain(operation(explanation={"hosts": 1, "forced": True}))[0]
    assert explain(None) == explain(operation()) == []


def test_the_reasons_of_every_attempt_are_told() -> None:
    def decision(host: str, removed: int) -> dict[str, Any]:
        filters = [{"name": "RetryFilter", "removed": removed, "remaining": 3 - removed}]
        return {"hosts": 3, "filters": filters, "winners": [{"host": host, "node": host}]}

    refused = {"hosts": 3, "filters": [{"name": "RetryFilter", "removed": 3, "remaining": 0}]}
    attempts = attempt("h1", 1, 2, 0, 3, 4, 5), attempt("h2", 6, 7, 0, 8, 9, 10)
    told = explain(operation(*attempts, explanation={**refused, "earlier": [decision("h1", 0), decision("h2", 1)]}))
    assert told == [
        "scheduler, attempt 1: 3 hosts",
        "  1 filter removed none",
        "  chose h1 (all have one weight)",
        "scheduler, attempt 2: 3 hosts",
        "  RetryFilter removed 1, left 2",
        "  chose h2 (all have one weight)",
        "scheduler, attempt 3: 3 hosts",
        "  RetryFilter removed 3, left 0",
    ]


def test_a_choice_that_no_weigher_made_is_explained() -> None:
    for remaining, reason in ((1, "the only host left"), (2, "all have one weight")):
        filters = [{"name": "RamFilter", "removed": 3 - remaining, "remaining": remaining}]
        decision = {"hosts": 3, "filters": filters, "winners": [{"host": "h1", "weight": 0.0, "weighers": {}}]}
        said = explain(operation(attempt("h1", 1, 2, 0, 3, 4, 5), explanation=decision))
        assert said[-1] == f"  chose h1 ({reason})"


def test_an_error_is_told_once() -> None:
    out = io.StringIO()
    reason = "No valid host was found. There are not enough hosts available."
    event_name = "conductor_schedule_and_build_instances"
    found = {
        "server": {"name": "web", "uuid": "u", "fault": {"message": reason}},
        "actions": [action(message="Error")],
        "events": [event("", 20_000, 20_000, "Error", event=event_name, details=reason)],
        "operations": [],
    }
    draw(found, Console(file=out, width=160))
    assert out.getvalue().count(reason) == 1 and f"schedule and claim: {reason}" in out.getvalue()


def test_all_of_it_is_drawn() -> None:
    out = io.StringIO()
    found = {
        "server": {"name": "web", "uuid": "u", "fault": {"message": "It broke."}},
        "actions": [action(message="Error"), action("stop", None, request_id="req-2")],
        "events": [event("h1", 9_000, 20_000)],
        "operations": [operation(attempt("h1", 2_000, 5_000, 0, 9_000, 10_000, 18_000))],
    }
    draw(found, Console(file=out, width=160))
    text = out.getvalue()
    assert "web (u): create, done after 20.0 ms" in text  # an event failed, a later one made up for it
    assert "web (u): stop, still runs" in text
    assert "schedule and claim" in text and "8.0 ms" in text
    assert "fault: It broke." in text


def test_a_long_reason_leaves_room_for_the_steps() -> None:
    out = io.StringIO()
    reason = "the hypervisor said [no] " * 10
    found = {
        "server": {"name": "web", "uuid": "u", "fault": None},
        "actions": [action(message="Error")],
        "events": [event("h1", 9_000, 20_000, "Error", details=reason.strip())],
        "operations": [operation(attempt("h1", 2_000, 5_000, 0, 9_000, 10_000, 18_000))],
    }
    draw(found, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    [step] = [line for line in lines if line.startswith("image, plug, spawn")]
    assert "h1" in step and "8.0 ms" in step and "█" in step
    assert reason.strip() in " ".join(out.getvalue().split())


def test_a_server_without_a_past_says_so() -> None:
    out = io.StringIO()
    draw(
        {"server": {"name": "web", "uuid": "u", "fault": None}, "actions": [], "events": [], "operations": []},
        Console(file=out),
    )
    assert "has no recorded actions" in out.getvalue()


def test_a_chart_fits_eighty_columns_with_long_names() -> None:
    out = io.StringIO()
    host = "compute-17.rack-4.region-one.example.org"
    long = event(host, 20_000, 90_000_000, event="conductor_schedule_and_build_instances")
    found = {
        "server": {"name": "web", "uuid": "01b1f550-dd85-4fde-a05b-2f55e6cda9f3", "fault": None},
        "actions": [action(finish=90_000_000)],
        "events": [event(host, 9_000, 20_000), long],
        "operations": [operation(attempt(host, 2_000, 5_000, 8_000, 9_000, 10_000, 18_000))],
    }
    draw(found, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert "create, done after 90.0 s" in " ".join(lines)
    assert any("image, plug, spawn" in line and "compute-17.rack" in line and "█" in line for line in lines)
