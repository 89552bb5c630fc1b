"""Compares our fitting of NUMA nodes and PCI devices with Nova's, on random hosts and instances.

    python -m tests.nova_numa [--nova PYTHON] [--cases 10000] [--seed 1]

PYTHON is that of an environment with Nova; without it, Nova is installed into a temporary one. Each case is a host of
which a part is in use, and an instance. Nova's `numa_fit_instance_to_host` and our `fit` have to give the same answer:
whether the instance fits, on which cells, with which pages and which CPUs. As many flavors and images are given to
Nova's `numa_get_constraints` and our `topology_request`. `known.py` has the reasons for the differences.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.nova_numa.cases import Case, fit_case, our_fit, our_request, request_case
from tests.nova_numa.known import fit_reason, request_reason
from tests.nova_schemas.__main__ import nova_environment

SIDE = Path(__file__).with_name("nova_side.py")
AT_ONCE = 500
_OURS = ("topology", "use", "asked")


def verdicts(python: str, cases: list[Case]) -> list[Any]:
    """Return what Nova says of the cases."""
    plain = [{name: value for name, value in case.items() if name not in _OURS} for case in cases]
    lines = [json.dumps(plain[first : first + AT_ONCE]) for first in range(0, len(plain), AT_ONCE)]
    done = subprocess.run([python, SIDE], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [each for line in done.stdout.splitlines() for each in json.loads(line)]


def compare(python: str, count: int, seed: int) -> int:
    """Print what was compared, and every difference without a reason; return how many of these there are."""
    begin = time.monotonic()
    chance = random.Random(seed)
    fits = [fit_case(chance) for _ in range(count)]
    requests = [request_case(chance) for _ in range(count)]
    counts: Counter[str] = Counter()
    unexplained = 0
    for case, (nova, without_caches) in zip(fits, verdicts(python, fits), strict=True):
        ours = _plain(our_fit(case))
        if ours == nova:
            counts["equal: does not fit" if ours is False else "equal: fits, on the same cells, pages and CPUs"] += 1
            continue
        reason = fit_reason(case, ours, nova, without_caches)
        counts[f"differs: {reason or 'without a reason'}"] += 1
        if not reason:
            unexplained += 1
            _show(case, ours, nova, without_caches)
    for case, nova in zip(requests, verdicts(python, requests), strict=True):
        ours = _plain(our_request(case))
        if ours == nova:
            counts["flavor and image, equal: " + _kind(ours)] += 1
            continue
        reason = request_reason(case, ours, nova)
        counts[f"flavor and image, differs: {reason or 'without a reason'}"] += 1
        if not reason:
            unexplained += 1
            print(f"{case}\n    ours {ours}\n    Nova {nova}")
    for text, number in sorted(counts.items()):
        print(f"{number:7} {text}")
    print(f"{unexplained} differences without a reason, {time.monotonic() - begin:.0f} s")
    return unexplained


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _kind(verdict: Any) -> str:
    return "refused" if verdict is False else "no NUMA nodes" if verdict is None else "the same NUMA nodes"


def _show(case: Case, ours: Any, nova: Any, without_caches: Any) -> None:
    print(f"{case['topology']}\n{case['use']}\n{case['asked']}")
    print(f"    ours {ours}\n    Nova {nova}\n    Nova without its caches {without_caches}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.nova_numa")
    parser.add_argument("--nova", metavar="PYTHON", help="Python of an environment with Nova.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nova-") as place:
        sys.exit(compare(given.nova or nova_environment(place), given.cases, given.seed) != 0)
