"""The files around the code: hooks, workflow, units and example settings name what exists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from micronova.cli.main import main
from micronova.cli.names import ROLES
from micronova.conf.settings import load
from tests.command import ok
from tests.unit.test_docs import ROOT, TARGETS


def _load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_calls_make_targets_on_every_python_that_is_supported() -> None:
    jobs = _load(".github/workflows/check.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert {"check", "test", "dist", "check-oldest"} == called
    assert called <= TARGETS
    classifiers = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    for name in ("check", "test"):
        assert jobs[name]["strategy"]["matrix"]["python"] == classifiers


def test_the_hooks_run_what_lint_runs() -> None:
    [local] = _load(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    hooks = [
        " ".join(hook["entry"].split()[:2]).replace(" --force-exclude", "")
        for hook in local["hooks"]
        if "stages" not in hook
    ]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks:
        assert hook.replace(".venv/bin", "$(BIN)") in recipe


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("a" * 72, False),
        ("é" * 72 + "\n\n" + "A reason that is as long as it has to be. " * 9, False),
        ("a" * 73, True),
        ("# a comment of the editor\n\n" + "a" * 73, True),
        (f"Merge branch '{'a' * 80}'", False),
    ],
)
def test_the_hook_refuses_a_subject_that_is_too_long(tmp_path: Path, message: str, refused: bool) -> None:
    [hook] = [each for each in _load(".pre-commit-config.yaml")["repos"][0]["hooks"] if "stages" in each]
    assert hook["stages"] == ["commit-msg"]
    written = tmp_path / "COMMIT_EDITMSG"
    written.write_text(message, encoding="utf-8")
    done = subprocess.run([ROOT / hook["entry"], written], capture_output=True, text=True)
    assert (done.returncode, "at most 72" in done.stdout) == ((1, True) if refused else (0, False))


def test_continuous_integration_runs_a_target() -> None:
    [target] = re.findall(r"^exec make (\S+)$", Path(ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert target in TARGETS


# --- packaging ---

PACKAGING = ROOT / "packaging"


@pytest.mark.parametrize("path", sorted((PACKAGING / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_example_settings(path: Path, tmp_path: Path) -> None:
    settings = load(path, {})
    assert settings != load(None, {}), "it changes nothing"
    if not settings.database.connection and settings.default.transport_url == "local://":
        assert "ok    settings" in ok("check", "--config", path, "--dir", tmp_path / "cloud")


def test_the_hosts_example_has_what_host_add_prints() -> None:
    host, control = (load(PACKAGING / "examples" / f"region-{name}.toml", {}) for name in ("host", "control"))
    assert host.default.control_users == control.default.control_users
    for option in ("endpoint_override", "metadata_url"):
        assert getattr(host.neutron, option) == getattr(control.neutron, option)
    assert not host.database.connection and not host.identity.password


def _commands() -> list[list[str]]:
    units = sorted((PACKAGING / "systemd").glob("*.service"))
    lines = [re.findall(r"^ExecStart=/usr/bin/micronova (.*)$", unit.read_text(), re.MULTILINE) for unit in units]
    assert all(len(found) == 1 for found in lines), units
    return [found[0].split() for found in lines]


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_units_start_commands_and_roles_that_exist(words: list[str]) -> None:
    command = main.commands[words[0]]
    options = {option for each in command.params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if words[0] == "run":
        roles = [word for word in words[1 : words.index("--dir")] if word != "$ROLES"]
        assert set(roles) <= set(ROLES)


def test_the_directories_of_units_are_closed_and_apart() -> None:
    places = set()
    for unit in (PACKAGING / "systemd").glob("*.service"):
        values = dict(line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"\w+=", line))
        assert (values["StateDirectoryMode"], values["UMask"]) == ("0700", "0077"), unit.name
        place = Path("/var/lib", values["StateDirectory"])
        assert f"--dir {place} " in values["ExecStart"], unit.name
        places.add(place)
    # Root gives a directory away with all that is in it.
    assert not [(place, other) for place in places for other in places if place in other.parents]


@pytest.mark.parametrize("name", ["micronova", "micronova-host"])
def test_units_with_networks_have_no_mounts_of_their_own(name: str) -> None:
    """A namespace that `ip netns add` mounts has to be there at the next start; and no device may be refused."""
    text = (PACKAGING / "systemd" / f"{name}.service").read_text()
    options = set(re.findall(r"^(\w+)=", text.partition("[Service]")[2].partition("[Install]")[0], re.MULTILINE))
    plain = {
        *("Type", "NotifyAccess", "TimeoutStartSec", "ExecStart", "ExecReload", "KillMode", "TimeoutStopSec"),
        *("Restart", "RestartSec", "StateDirectory", "StateDirectoryMode", "UMask", "LimitNOFILE"),
        *("LockPersonality", "RestrictRealtime", "SystemCallArchitectures"),
    }
    assert options <= plain, "look whether systemd makes a mount namespace or a device policy for these"


def test_the_template_unit_names_the_roles_that_need_no_right_of_the_machine() -> None:
    about = (PACKAGING / "systemd" / "micronova@.service").read_text().partition("[Unit]")[0]
    assert set(re.findall(r"@([a-z]+)[,.]", about)) == set(ROLES) - {"compute", "network-agent"}


def test_the_template_unit_allows_the_sandbox_of_the_volume_service() -> None:
    """`@system-service` has no system call of Landlock, without which no image is converted."""
    unit = (PACKAGING / "systemd" / "micronova@.service").read_text()
    allowed = {
        word for words in re.findall(r"^SystemCallFilter=([^~\n]*)$", unit, re.MULTILINE) for word in words.split()
    }
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= allowed


def test_the_container_starts_a_command_that_exists() -> None:
    lines = (PACKAGING / "Containerfile").read_text().splitlines()
    assert {line.split()[0] for line in lines if re.match("[A-Z]+ ", line)} <= {
        "FROM", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    [entry], [command] = ([json.loads(line.partition(" ")[2]) for line in lines if line.startswith(word)]
                          for word in ("ENTRYPOINT", "CMD"))  # fmt: skip
    assert entry == ["micronova"]
    options = {option for each in main.commands[command[0]].params for option in each.opts}
    assert {word for word in command if word.startswith("--")} <= options


# --- the tests themselves ---


@pytest.mark.parametrize(("without", "code", "said"), [("", 1, "make test WITHOUT_GUESTS=1"), ("1", 0, "1 skipped")])
def test_a_test_of_real_guests_that_cannot_run_fails(tmp_path: Path, without: str, code: int, said: str) -> None:
    file = tmp_path / "test_guest.py"
    file.write_text("import pytest\n@pytest.mark.e2e\ndef test_guest() -> None:\n    pytest.skip('no QEMU')\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            "-c",
            "pyproject.toml",
            file,
        ],
        env={**os.environ, "MICRONOVA_WITHOUT_GUESTS": without},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
