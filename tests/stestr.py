"""Test suites of other projects that stestr runs: a progress line, and each failure and skip with its reason."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(
    environment: Path, folder: Path, package: str, selection: str, *, variables: dict[str, str], processes: int = 1,
    inside: Sequence[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the tests that .stestr.conf in the folder finds, with a progress line; return their results."""
    python = environment / "bin" / "python"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OS_")},
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        **variables,
    }
    stestr = [*inside, str(environment / "bin" / "stestr")]
    if not (folder / ".stestr").exists():
        subprocess.run([*stestr, "init"], cwd=folder, env=variables, check=True)
    listed = subprocess.run(
        [*stestr, "list", selection], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    ids = [line.strip() for line in listed.stdout.splitlines() if line.startswith(f"{package}.")]
    if not ids:
        return []
    total = len(ids)
    in_class = Counter(_short(id, package).rpartition(".")[0] for id in ids)
    tests = subprocess.Popen(
        [*stestr, "run", "--subunit", "--concurrency", str(processes), selection],
        cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    reader = subprocess.Popen(
        [python, Path(__file__).with_name("stestr_results.py")], stdin=tests.stdout, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    results: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for line in reader.stdout:
        result = json.loads(line)
        if result["id"] == "stdout" or result["status"] in ("exists", "inprogress"):
            continue
        # One result may be that of all tests of a class, which ended before they began.
        whole = re.match(rf"setUpClass \({re.escape(package)}\.(.*)\)", result["id"])
        result["tests"] = max(in_class[whole[1]], 1) if whole else 1
        results.append(result)
        counts[result["status"]] += result["tests"]
        if sys.stdout.isatty() or len(results) % 25 == 0:
            print(f"\r{counts.total()} of {total}: {counted(counts)}", end="", flush=True)
    tests.wait()
    reader.wait()
    return results


def report(results: list[dict[str, Any]], *, package: str) -> int:
    """Print each failure and each skip with its reason, and the counts."""
    print()
    for status in ("skip", "fail"):
        for result in sorted(results, key=lambda result: str(result["id"])):
            if result["status"] == status:
                several = f" ({result['tests']} tests)" if result["tests"] > 1 else ""
                print(f"{status}  {_short(result['id'], package)}{several}\n      {_reason(result['why'])}")
    counts: Counter[str] = Counter()
    for result in results:
        counts[result["status"]] += result["tests"]
    print(counted(counts))
    return 1 if counts["fail"] or not counts["success"] else 0


def counted(counts: Counter[str]) -> str:
    return f"{counts['success']} passed, {counts['fail']} failed, {counts['skip']} skipped"


def _short(id: str, package: str) -> str:
    return re.sub(r"\[.*", "", id).removeprefix(f"{package}.")


def _reason(why: str) -> str:
    """Return the last line that says something: that of a traceback is its error."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|\w+): ?|Details", line)),
        lines[-1] if lines else "no reason given",
    )
