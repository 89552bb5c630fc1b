"""`make demo`: what a newcomer sees first."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from micronova.cli.supervisor import probe
from micronova.conf.settings import Settings
from micronova.testimage.builder import available

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def _left_of(directory: str, cloud: str) -> list[str]:
    """List what there is of a cloud: namespaces with all that is in them, files of its servers, processes."""
    places = [*Path("/run/netns").glob(f"{cloud}*"), *Path("/run/micronova").glob(f"{cloud}*"), Path(directory)]
    records = [file for file in Path("/var/lib/micronova-clouds").glob("*.json") if directory in file.read_text()]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [str(place) for place in [*places, *records] if place.exists()] + [
        line for line in processes if directory in line or cloud in line
    ]


def test_the_demo_boots_a_guest_and_leaves_nothing(outside: Path) -> None:
    obstacle = probe(Settings()) or available()
    if obstacle:
        pytest.skip(obstacle)
    root = Path(__file__).parents[2]
    # As a newcomer's: on the machine's own network, from where the client that it shows is fetched.
    done = subprocess.run(
        ["nsenter", f"--net={outside}", "bash", "scripts/demo"], cwd=root, env={**os.environ, "TERM": "dumb"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, f"{said}\n{done.stderr}"
    address = re.search(r"private=(10\.0\.\d+\.\d+)", said)
    assert address is not None
    # its timeline, its console log with its own name, address and user data, and what SSH showed
    assert re.search(r"create, done after [\d.]+ m?s", said) and "image, plug, spawn" in said
    assert f"MICRONOVA-GUEST-READY hostname=demo ip={address[1]} " in said
    assert "user data ran on demo" in said
    assert f"I am demo with {address[1]}/" in said
    assert "nothing is wrong" in said
    assert re.search(r"^\d+ s after the cloud was up$", said, re.MULTILINE)
    directory = re.search(r"--dir (\S+)", said)
    cloud = re.search(r"\((mn-[0-9a-f]{8})\*\)", said)
    assert directory is not None and cloud is not None
    assert _left_of(directory[1], cloud[1]) == []
