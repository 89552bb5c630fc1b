"""What `micronova audit` prints of what hosts say of themselves."""

from typing import Any

import pytest
from click.testing import CliRunner

from micronova.cli import audit as command
from micronova.cli.main import main
from micronova.conductor.findings.finding import Finding
from micronova.conductor.findings.network import LONGEST_FAULT, MOST_FAULTS, compare_agents
from micronova.objects.network import NetworkAgent

HOSTILE = "broken\n\x1b[2J\rnothing is wrong\u202e"


def _found(*faults: str) -> list[Finding]:
    return compare_agents([NetworkAgent("stolen", True, faults)], ["stolen"])


@pytest.mark.parametrize("options", [[], ["--repair"]])
def test_a_host_writes_no_lines_of_its_own_and_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    [finding] = _found(HOSTILE)
    repair = {"name": "x", "text": f"Repair {HOSTILE}"}
    found = {"kind": finding.kind, "subject": finding.subject, "message": finding.message, "repairs": [repair]}
    report = {"findings": [found], "down": [HOSTILE]}
    monkeypatch.setattr(command, "ask", lambda *args, **more: report)
    done = CliRunner().invoke(main, ["audit", *options], "n\n")
    assert done.exit_code == 1 and "broken" in done.output
    assert not [line for line in done.output.splitlines() if line.startswith("nothing") or not line.isprintable()]


def test_a_guest_that_is_not_found_is_not_silently_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ask", lambda *args, **more: {"findings": [], "down": []})
    done = CliRunner().invoke(main, ["audit", "--repair", "--yes", "--remove-guest", "typo"])
    assert done.exit_code == 1 and "--remove-guest typo: the audit finds no such guest" in done.output


class _Found:
    """A cloud in which each of some repairs uncovers the next finding; one more finding stays."""

    def __init__(self, rounds: int, *, stays: bool = False) -> None:
        self.left = rounds
        self.stays = stays

    def __call__(self, control: Any, path: str, *, method: str = "GET", body: Any = None) -> Any:
        if path == "/repair":
            self.left -= 1
            return "repaired"
        names = [f"finding {self.left}"] * bool(self.left) + ["the one that stays"] * self.stays
        return {"findings": [self._finding(each) for each in names], "down": []}

    def _finding(self, name: str) -> dict[str, Any]:
        return {"kind": "quota", "subject": name, "message": "", "repairs": [{"name": name, "text": f"Mend {name}."}]}


def test_what_the_last_round_repairs_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ask", _Found(command.MOST_ROUNDS))
    done = CliRunner().invoke(main, ["audit", "--repair", "--yes"])
    assert done.exit_code == 0 and "nothing is wrong" in done.output


def test_a_repair_that_is_declined_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ask", _Found(3, stays=True))
    done = CliRunner().invoke(main, ["audit", "--repair"], "y\nn\ny\ny\n")
    assert done.exit_code == 1 and done.output.count("Mend the one that stays. [y/N]") == 1
    assert done.output.count(" [y/N]") == 4


def test_what_an_agent_says_of_its_faults_is_bounded() -> None:
    found = _found(*["x" * 10 * LONGEST_FAULT] * 10 * MOST_FAULTS)
    assert len(found) == MOST_FAULTS
    assert {len(each.message) for each in found} == {LONGEST_FAULT}
