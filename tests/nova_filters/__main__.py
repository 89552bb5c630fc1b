"""Compares our filters and weighers with Nova's own classes on the same hosts and requests.

    python -m tests.nova_filters [--nova PYTHON] [--cases 2000] [--seed 1]

PYTHON is that of an environment with Nova; without it, Nova is installed into a temporary one. For each case, a request
to 25 hosts with settings, metadata of aggregates, extra specs, hints and image properties at random, every filter says
which hosts pass, and every weigher what it adds to their weights. Each filter is asked about every host, whatever the
others say.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from micronova.objects.errors import MicronovaError
from micronova.objects.pci_devices import parse_aliases
from micronova.scheduler.filters.base import Compared, FilterOptions
from micronova.scheduler.filters.registry import BUILT_IN as FILTERS
from micronova.scheduler.filters.registry import load_filters
from micronova.scheduler.host_table import HostTable
from micronova.scheduler.ranking import Ranking
from micronova.scheduler.weights.base import WeigherOptions
from micronova.scheduler.weights.registry import BUILT_IN as WEIGHERS
from micronova.scheduler.weights.registry import load_weighers
from tests.nova_filters.cases import ALIASES, NOW, Case, Maker
from tests.nova_filters.known import reason_for_verdict, reason_for_weights
from tests.nova_schemas.__main__ import nova_environment

NAMED_ALIASES = [{"name": name, **spec} for name, spec in ALIASES.items()]
SIDE = Path(__file__).with_name("nova_side.py")


class Nova:
    """Nova's filters and weighers, in a process of their own."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, SIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        known = self._read()
        self.filters = sorted(FILTERS.keys() & set(known["filters"]))
        self.weighers = sorted(WEIGHERS.keys() & set(known["weighers"]))
        self.only_nova = sorted((set(known["filters"]) - FILTERS.keys()) | (set(known["weighers"]) - WEIGHERS.keys()))

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("Nova's part has ended. Run it by hand to see why: PYTHON tests/nova_filters/nova_side.py")
        return json.loads(line)

    def ask(self, case: Case) -> Any:
        """Return what Nova says of a case."""
        asked = {**case.for_nova, "filters": self.filters, "weighers": [*self.weighers, *self._without_ours()]}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _without_ours(self) -> Iterable[str]:
        return [name for name in ("CrossCellWeigher",) if name in self.only_nova]

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def a_table(case: Case) -> HostTable:
    """Make our table of the hosts of a case."""
    table = HostTable()
    table.update(case.hosts)
    table.now = NOW
    return table


def our_verdicts(case: Case, names: Collection[str]) -> dict[str, list[bool]]:
    """Return which hosts our filters let pass."""
    hosts = a_table(case).view()
    found = {}
    options = FilterOptions(
        service_down_time=60.0, settings=case.settings, metrics=case.metrics, pci_aliases=parse_aliases(NAMED_ALIASES)
    )
    for each in load_filters(options, names):
        if each.name in names:  # and not one that is asked in any case
            mask = Compared.of(each.mask(hosts, case.spec)).mask
            found[each.name] = [True] * len(hosts) if mask is None else mask.tolist()
    return found


def our_weights(case: Case, names: Iterable[str]) -> dict[str, list[float]]:
    """Return what our weighers add to the weights of hosts."""
    table = a_table(case)
    options = WeigherOptions(settings=case.settings, metrics=case.metrics)
    found = {}
    for each in load_weighers(options=options, with_plugins=False):
        if each.name in names:
            found[each.name] = Ranking(table, table.view(), [each], case.spec, lasting=False).totals.tolist()
    return found


class Comparison:
    """Counts what is equal and what is not."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.unexplained: list[str] = []

    def add(self, number: int, case: Case, nova: Any) -> None:
        """Compare one case."""
        for name, ours in our_verdicts(case, nova["filters"]).items():
            for position, (one, other) in enumerate(zip(ours, nova["filters"][name], strict=True)):
                self.compared[name] += 1
                self.passed[name] += one
                if one != other:
                    reason = reason_for_verdict(case, name, position, one, other, nova["without_caches"][position])
                    self._differs(name, reason, f"case {number}, host {position}: ours {one}, Nova {other}")
        weights = our_weights(case, nova["weighers"])
        for name, theirs in nova["weighers"].items():
            given = weights.get(name, [0.0] * len(case.hosts))  # CrossCellWeigher: all hosts are in one cell
            self.compared[name] += len(given)
            if isinstance(theirs, str) or not np.allclose(given, theirs, rtol=1e-9, atol=1e-9):
                reason = reason_for_weights(case, name, theirs)
                self._differs(name, reason, f"case {number}: ours {given}, Nova {theirs}", len(given))

    def _differs(self, name: str, reason: str, text: str, count: int = 1) -> None:
        if reason:
            self.reasons.setdefault(name, Counter())[reason] += count
        else:
            self.unexplained.append(f"{name}, {text}")

    def show(self) -> None:
        """Print all counts."""
        print(f"{'filter or weigher':36} {'compared':>9} {'passed':>7} {'equal':>9}")
        for name, count in sorted(self.compared.items()):
            differing = sum(self.reasons.get(name, {}).values())
            differing += sum(1 for each in self.unexplained if each.startswith(f"{name},"))
            passed = f"{self.passed[name]:7}" if name in FILTERS else " " * 7
            print(f"{name:36} {count:9} {passed} {count - differing:9}")
            for reason, times in self.reasons.get(name, {}).items():
                print(f"    {times} differ: {reason}")
        for text in self.unexplained[:20]:
            print(text[:300])


def compare(python: str, cases: int, seed: int) -> int:
    """Print the counts; return how many differences have no known reason."""
    begin = time.monotonic()
    nova, maker, comparison = Nova(python), Maker(seed), Comparison()
    try:
        for number in range(cases):
            case = maker.case()
            comparison.add(number, case, nova.ask(case))
    except MicronovaError as error:
        sys.exit(f"our filters refuse a case: {error.message}")
    finally:
        nova.stop()
    comparison.show()
    print(f"only in Nova: {', '.join(nova.only_nova)}")
    total, differing = comparison.compared.total(), sum(each.total() for each in comparison.reasons.values())
    print(
        f"{cases} cases, {total} answers, {differing} differences with a known reason, "
        f"{len(comparison.unexplained)} without, {time.monotonic() - begin:.0f} s"
    )
    return len(comparison.unexplained)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.nova_filters")
    parser.add_argument("--nova", metavar="PYTHON", help="Python of an environment with Nova.")
    parser.add_argument("--cases", type=int, default=2000, help="How many requests to make.")
    parser.add_argument("--seed", type=int, default=1, help="What the cases are made from.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nova-") as place:
        sys.exit(compare(given.nova or nova_environment(place), given.cases, given.seed) != 0)
