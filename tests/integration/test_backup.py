"""The commands of docs/operate.md that copy and restore a cloud of one machine, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import UpCloud

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
DIRECTORY = Path("/var/lib/micronova")


def _blocks() -> tuple[str, str]:
    """Return the commands of the page that make a backup, and those that restore it."""
    part = PAGE.read_text().partition("\n## Backup and restore\n")[2].partition("\n## ")[0]
    found = [
        each
        for each in re.findall(r"^```\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        if str(DIRECTORY.parent) in each
    ]
    backup, restore = found[:2]
    assert "--create" in backup and "--extract" in restore
    return backup, restore


def _follow(commands: str, cloud: UpCloud, beside: Path) -> None:
    """Run commands with the cloud's directory in the place of the documented one."""
    start = beside / "bin" / "micronova"
    start.parent.mkdir(exist_ok=True)
    options = f"--driver fake --port {cloud.port}"
    start.write_text(
        f'#!/bin/sh\n[ "$1" = up ] && set -- "$@" {options}\nexec {sys.executable} -m micronova.cli.main "$@"\n'
    )
    start.chmod(0o755)
    commands = commands.replace(str(DIRECTORY), str(cloud.directory))
    commands = commands.replace(f"--directory {DIRECTORY.parent}", f"--directory {cloud.directory.parent}")
    script = f"set -eu\n{commands}"
    environment = {**os.environ, "MICRONOVA_DIR": str(cloud.directory), "PATH": f"{start.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], cwd=beside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cloud_of_one_machine_is_restored(tmp_path: Path) -> None:
    backup, restore = _blocks()
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o755)
    cloud = UpCloud(state / "micronova")
    cloud.up()
    try:
        token = cloud.token()
        headers = {"X-Auth-Token": token}
        images = cloud.request("GET", "/image/v2/images", headers=headers)[1]["images"]
        _make_group(cloud, token, "kept")
        _follow(backup, cloud, tmp_path)
        token = cloud.token()
        [kept] = cloud.compute("GET", "/os-server-groups", token=token)["server_groups"]
        cloud.compute("DELETE", f"/os-server-groups/{kept['id']}", token=token, status=204)
        _make_group(cloud, token, "late")
        _follow(restore, cloud, tmp_path)
        token = cloud.token()
        assert cloud.compute("GET", "/os-server-groups", token=token)["server_groups"] == [kept]
        after = cloud.request("GET", "/image/v2/images", headers={"X-Auth-Token": token})[1]["images"]
        assert [each["id"] for each in after] == [each["id"] for each in images]
        assert cloud.audit() == []
    finally:
        cloud.down()


def _make_group(cloud: UpCloud, token: str, name: str) -> None:
    cloud.compute("POST", "/os-server-groups", {"server_group": {"name": name, "policy": "affinity"}}, token=token)
