"""What `micronova status` prints: a summary that stays short however many hosts there are."""

from typing import Any

from micronova.cli.status import NAMED, summarise


def found(*services: tuple[str, str, str], servers: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "version": "1",
        "pid": 7,
        "memory_mib": 90,
        "services": [
            {"binary": binary, "host": host, "state": state, "seconds_ago": 90.0} for binary, host, state in services
        ],
        "servers": servers or {},
        "operations": {"open": 3, "without_valid_lease": 1},
        "periodic_jobs": [],
        "bus": {"connected": True, "connected_seconds": 90.0, "blocked": "", "dead_letters": 0},
    }


def test_a_thousand_hosts_are_counted_and_those_that_are_down_are_named() -> None:
    hosts = [("nova-compute", f"h{number}", "up") for number in range(997)]
    hosts += [("nova-compute", "h997", "down"), ("nova-compute", "h998", "down"), ("nova-compute", "h999", "disabled")]
    lines = summarise(found(*hosts, ("nova-conductor", "c", "up"), servers={"ERROR": 2, "ACTIVE": 4000}))
    assert lines == [
        "Micronova 1, process 7, 90 MiB",
        "  nova-compute     997 up, 2 down, 1 disabled",
        "  nova-conductor   1 up",
        "down:",
        "  nova-compute     h997, last seen 90 s ago",
        "  nova-compute     h998, last seen 90 s ago",
        "disabled:",
        "  nova-compute     h999, last seen 90 s ago",
        "servers: 4000 ACTIVE, 2 ERROR",
        "operations: 3 open, 1 stuck (without a valid lease)",
        "bus: connected for 90 s, 0 dead letters",
    ]


def test_when_all_are_down_only_some_are_named() -> None:
    lines = summarise(found(*[("nova-compute", f"h{number}", "down") for number in range(1000)]))
    assert len(lines) < NAMED + 10
    assert f"  and {1000 - NAMED} more: micronova status --json lists all" in lines
    assert "servers: none" in lines


def test_a_broker_that_blocks_us_is_shown() -> None:
    seen = found()
    seen["bus"] |= {"blocked": "low on memory", "blocked_seconds": 12.0}
    [line] = [line for line in summarise(seen) if "BLOCKED" in line]
    assert line.startswith("bus: BLOCKED by the broker for 12 s (low on memory)")


def test_a_lost_connection_is_shown() -> None:
    seen = found()
    seen["bus"] = {"connected": False, "connected_seconds": None, "blocked": "", "dead_letters": 0}
    assert summarise(seen)[-1] == "bus: NOT connected"


def test_periodic_jobs_are_shown_with_their_last_run() -> None:
    seen = found()
    seen["periodic_jobs"] = [
        {"name": "repair_counters", "began_seconds_ago": 130.0, "ended_seconds_ago": 128.5, "error": ""},
        {"name": "purge", "began_seconds_ago": 30.0, "ended_seconds_ago": None, "error": ""},
        {"name": "usage_audit", "began_seconds_ago": 7300.0, "ended_seconds_ago": 7300.0, "error": "Unavailable: no"},
        {"name": "cache_images", "began_seconds_ago": None, "ended_seconds_ago": None, "error": ""},
    ]
    lines = summarise(seen)
    start = lines.index("periodic jobs:")
    assert lines[start + 1 : start + 5] == [
        "  repair_counters    last run 2 min ago, took 2 s",
        "  purge              begun 30 s ago, not ended",
        "  usage_audit        last run 2 h ago, took 0 s, FAILED: Unavailable: no",
        "  cache_images       never ran",
    ]
