"""Files in the current directory are never imported by the processes that Micronova starts."""

import re
import subprocess
from pathlib import Path

import pytest

import micronova
from micronova.cli.own_command import own_command
from micronova.cli.ssh import _proxy_command
from micronova.cli.state import StateDirectory
from micronova.privileged.client import HelperProcess


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A directory with modules that are named like ours and like those that we import."""
    place = tmp_path / "decoy"
    for module in ("micronova/cli/main.py", "micronova/privileged/helper.py", "click.py", "msgspec.py"):
        file = place / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("print('decoy')\nraise SystemExit(99)\n")
    for package in ("micronova", "micronova/cli", "micronova/privileged"):
        (place / package / "__init__.py").touch()
    return place


def test_a_package_in_the_current_directory_is_not_run(decoy: Path, tmp_path: Path) -> None:
    proxy = [word for word in _proxy_command(StateDirectory(tmp_path)) if word != "sudo"]
    helper = HelperProcess("mn-12345678", tmp_path / "s", directory=tmp_path / "run")._command()
    for command in (own_command("up"), proxy, helper):
        done = subprocess.run([*command, "--help"], cwd=decoy, capture_output=True, text=True)
        assert (done.returncode, "decoy" in done.stdout) == (0, False), (command, done.stdout, done.stderr)


def test_every_process_of_this_python_is_told_so() -> None:
    found = [
        (file.name, options)
        for file in Path(micronova.__file__).parent.rglob("*.py")
        for options in re.findall(r"sys\.executable,\s*(\S+)", file.read_text())
    ]
    assert len(found) >= 3 and all(options in ('"-P",', '"-I",') for _, options in found), found
