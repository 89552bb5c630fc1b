"""`micronova fleet-simulate` as a user calls it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.command import micronova, ok

SMALL = ("--hosts", "10", "--count", "120", "--seed", "3")
PLOTS = {"utilisation.svg", "fragmentation.svg", "refusals.svg", "decisions.svg"}


def report_of(*arguments: str | Path, output: Path) -> Any:
    """Return the report that the command prints, without what depends on the machine."""
    found = json.loads(ok("fleet-simulate", *arguments, "--output", output, "--json"))
    assert found == json.loads((output / "report.json").read_text())
    for policy in found["policies"]:
        assert policy.pop("decisions_per_second") > 0 and policy.pop("servers_per_second") > 0
        assert 0 < policy.pop("decision_ms_p50") <= policy.pop("decision_ms_p99")
        for sample in policy["samples"]:
            del sample["decision_seconds"]
    return found


def test_policies_side_by_side(tmp_path: Path) -> None:
    shown = ok("fleet-simulate", *SMALL, "--policy", "spread", "--policy", "pack", "--output", tmp_path / "out")
    first, *_ = shown.splitlines()
    assert first.startswith("10 hosts, 120 requests for ") and first.endswith("seed 3")
    [header] = [line for line in shown.splitlines() if "spread" in line]
    assert header.split() == ["spread", "pack"]
    for row in (
        "servers placed",
        "servers refused",
        "decisions per second",
        "memory used",
        "room for c",
        "unusable memory",
    ):
        assert row in shown, row
    assert {path.name for path in (tmp_path / "out").iterdir()} == PLOTS | {"report.json"}
    for name in PLOTS:
        root = ElementTree.fromstring((tmp_path / "out" / name).read_text())
        words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"spread", "pack"} <= words or {"Policy spread", "Policy pack"} <= words, name


def test_a_trace_that_was_written_gives_what_the_synthetic_one_gives(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    said = ok("fleet-simulate", *SMALL, "--write-trace", trace)
    assert said.startswith(f"{trace}: 120 requests for ")
    assert len(trace.read_text().splitlines()) == 120
    again = tmp_path / "again.jsonl"
    ok("fleet-simulate", *SMALL, "--write-trace", again)
    assert again.read_bytes() == trace.read_bytes()
    synthetic = report_of(*SMALL, output=tmp_path / "a")
    assert report_of("--hosts", "10", "--seed", "3", "--requests", trace, output=tmp_path / "b") == synthetic
    [policy] = synthetic["policies"]
    assert (policy["policy"], policy["requests"], synthetic["hosts"]) == ("spread", 120, 10)
    assert policy["servers"] == policy["placed_servers"] + policy["refused_servers"]
    assert 0 < policy["used"]["MEMORY_MB"]["mean"] <= policy["used"]["MEMORY_MB"]["most"] <= 1


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "micronova.cli.main", "fleet-simulate", *SMALL, "--output", str(tmp_path / "out")]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert child.stdout is not None
    report = child.stdout.read().decode()
    assert child.wait(timeout=60) == 0
    assert b"spread" in shown and b"120/120" in shown
    assert "120/120" not in report and "servers placed" in report


def _bad_trace(path: Path) -> Path:
    file = path / "bad.jsonl"
    file.write_text('{"at": 0, "flavor": {"name": "a", "vcpus": 1, "ram": 512}}\n{"at": 1, "flavor": {"name": "b"}}\n')
    return file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--requests", "BAD"), "line 2: flavor: 'vcpus' is a required property. A line is, for example"),
        (("--requests", "no-such-file"), "Cannot read no-such-file: No such file or directory"),
        (("--requests", "BAD", "--load", "2"), "--load is for synthetic traces"),
        (("--policy", "dense"), "There is no policy dense"),
        (("--policy", "a=enabled_filters=NoFilter"), "Unknown scheduler filter NoFilter"),
        (("--policy", "pack", "--policy", "pack"), "Two policies have the name pack"),
        (("--fleet", "no-such-file"), "Cannot read no-such-file"),
        (("--count", "1"), "ask for more requests (--count)"),
        (
            ("--days", "1", "--output", "/proc/none"),
            "Cannot use /proc/none: No such file or directory; name another place",
        ),
        (("--days", "1", "--write-trace", "/proc/none/x"), "Cannot use /proc/none/x: No such file or directory"),
        (("--hosts", "0"), "0 is not in the range"),
        (("--days", "nan"), "nan is not in the range"),
        (("--load", "nan"), "nan is not in the range"),
        (("--build-time", "nan"), "nan is not in the range"),
        (("--write-trace", "x", "--policy", "pack"), "--write-trace writes a synthetic trace and simulates nothing"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    given = [str(_bad_trace(tmp_path)) if each == "BAD" else each for each in arguments]
    done = micronova("fleet-simulate", "--output", tmp_path / "out", *given)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
