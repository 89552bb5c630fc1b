"""The fixtures that all simulations share, and the count of the faults that were tried."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from micronova.cli.state import StateDirectory

CATEGORIES = ("message", "database", "driver", "volume service", "process ends")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a cloud whose keys have been created."""
    directory = tmp_path_factory.mktemp("template")
    StateDirectory(directory).keys()
    return directory


@pytest.fixture(autouse=True)
def no_host_believes_that_the_database_was_restored(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever fails: only a database that was restored offers an order again that its host had to refuse."""
    yield
    assert not [each.getMessage() for each in caplog.get_records("call") if "database is behind" in each.getMessage()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show how many faults were tried in each action, if all were to be tried."""
    if os.environ.get("MICRONOVA_EVERY") != "1":
        return
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "faults":
                    counts.update({(action, kind): count for action, kind, count in json.loads(value)})
    if counts:
        terminalreporter.section("faults that were tried in each action")
        terminalreporter.write_line(f"{'action':24}{'all':>8}" + "".join(f"{kind:>16}" for kind in CATEGORIES))
        for action in (*sorted({action for action, _ in counts}, key=str.lower), None):
            row = [
                sum(n for key, n in counts.items() if key[0] == (action or key[0]) and key[1] == kind)
                for kind in CATEGORIES
            ]
            terminalreporter.write_line(f"{action or 'all':24}{sum(row):>8}" + "".join(f"{n:>16}" for n in row))
