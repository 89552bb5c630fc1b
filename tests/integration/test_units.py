"""The systemd units: systemd itself reads them without a complaint, and finds roles without rights well confined."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "packaging" / "systemd"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with the command of this environment."""
    command = Path(sys.executable).with_name("micronova")
    for unit in UNITS.glob("*.service"):
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/bin/micronova", str(command)))
    return tmp_path


def _analyze(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["micronova.service", "micronova-host.service", "micronova@api.service"])
def test_systemd_accepts_it(units: Path, name: str) -> None:
    done = _analyze("verify", "--man=no", units / name)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_stopping_a_host_ends_its_first_process_alone(units: Path) -> None:
    """What `e2e/test_host_restart.py` does to a host is what systemd does; a cloud of one machine ends as a whole."""
    modes = {
        name: re.findall(r"^KillMode=(\w+)$", (units / f"{name}.service").read_text(), re.MULTILINE)
        for name in ("micronova-host", "micronova")
    }
    assert modes == {"micronova-host": ["process"], "micronova": ["mixed"]}


def test_a_role_without_rights_is_confined(units: Path) -> None:
    """The threshold is systemd's exposure times ten, from 0 (none) to 100 (everything)."""
    done = _analyze("security", "--offline=true", "--threshold=20", units / "micronova@.service")
    assert done.returncode == 0, done.stdout + done.stderr
