"""Follow docs/region.md: `python -m tests.region_docs` runs the commands of its blocks marked `sh`, in their order.

A command that fails ends the run with the logs of the region. What the commands show is checked at the end: the page
promises two conductors, two schedulers and two hosts that are up, a new certificate that is used without a restart, and
a server that survives a restore. The longest commands are listed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.osc import PLACEMENT, REQUIREMENT
from tests.peers import peer
from tests.services.process import free_port

PAGE = Path(__file__).parents[1] / "docs" / "region.md"
UP = ("scheduler-1", "scheduler-2", "conductor-1", "conductor-2", "compute-1", "compute-2")
PORTS = 20
MARK = "### "  # begins the line that the shell prints before each command
LISTED = 12  # commands that took longest


def commands(page: str) -> list[str]:
    """Return the commands of a page's blocks that are marked `sh`; a line that ends with a backslash goes on."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        found += [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return found


def follow(directory: Path, client: Path) -> str:
    """Run all commands in a directory, as one shell does, and return what they printed; raise CalledProcessError.

    `client` is the directory of the openstack command.
    """
    script = ["set -euo pipefail", "begin=$(($(date +%s%N) / 100000000))"]
    for command in commands(PAGE.read_text()):
        quoted = command.replace("'", "'\\''")
        script += [f"printf '{MARK}%5.1f s  %s\\n' $(($(date +%s%N) / 100000000 - begin))e-1 '{quoted}'", command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MICRONOVA_", "OS_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{client}:{os.environ['PATH']}"
    environment["MICRONOVA_FIRST_PORT"] = str(free_ports())
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=directory, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    printed = []
    try:
        assert shell.stdout is not None
        for line in shell.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        if shell.wait():
            raise subprocess.CalledProcessError(shell.returncode, printed and printed[-1])
    finally:
        shell.kill()
        shell.wait()
        subprocess.run(
            [sys.executable, "-m", "micronova.cli.main", "region", "down", "--dir", directory / "region"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return "".join(printed)


def check(printed: str) -> None:
    """Raise AssertionError unless the commands have shown what the page promises."""
    parts = {part.partition("\n")[0]: part for part in printed.split(MARK)}

    def shown_by(command: str, last: bool = False) -> str:
        found = [part for line, part in parts.items() if command in line]
        assert found, f"the page does not run `{command}`"
        return found[-1 if last else 0]

    services = shown_by("openstack compute service list")
    for name in UP:
        assert re.search(rf"\| {name} .*\| enabled \| up ", services), f"{name} is not up:\n{services}"
    assert re.search(r"\| status +\| ACTIVE ", shown_by("openstack server create")), "the server is not ACTIVE"
    assert re.search(r"\| status +\| ACTIVE ", shown_by("openstack server show web", last=True)), "it was not restored"
    assert "1 credentials of users, of which 1 had another key" in shown_by("micronova key rotate"), (
        "nothing was sealed"
    )
    assert re.search("reloaded: .*database, broker, identity", shown_by("micronova region reload")), "not all reloaded"
    assert "compute-3" in shown_by("--availability-zone nova:compute-3"), "the new host did not get the server"


def longest(printed: str, seconds: float) -> list[tuple[float, str]]:
    """Return the commands that took longest, with their seconds, of a run that took `seconds`."""
    begun = [(float(at), line) for at, line in re.findall(rf"^{MARK} *([0-9.]+) s  (.*)$", printed, re.MULTILINE)]
    ends = [*(at for at, _ in begun[1:]), seconds]
    took = [(end - at, line) for (at, line), end in zip(begun, ends, strict=True)]
    return sorted(took, reverse=True)[:LISTED]


def free_ports() -> int:
    """Return the first of PORTS free ports."""
    while True:
        first = free_port()
        if first + PORTS < 32_000 and all(_is_free(port) for port in range(first, first + PORTS)):
            return first


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def main() -> None:
    """Follow the page in a new directory, and remove it if all is well."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-region-docs-"))
    directory.chmod(0o755)  # the users of PostgreSQL and of the services have to get through
    client = peer("osc", REQUIREMENT, PLACEMENT) / "bin"  # to install it is no part of the page
    began = time.monotonic()
    try:
        printed = follow(directory, client)
        seconds = time.monotonic() - began
        check(printed)
    except (subprocess.CalledProcessError, AssertionError) as error:
        for log in sorted((directory / "region" / "log").glob("*.log")):
            print(f"--- {log.name}\n{''.join(log.read_text(errors='replace').splitlines(keepends=True)[-15:])}")
        sys.exit(f"docs/region.md cannot be followed: {error}; its files are in {directory}")
    shutil.rmtree(directory)
    for took, line in longest(printed, seconds):
        print(f"{took:6.1f} s  {line}")
    print(f"docs/region.md: {len(commands(PAGE.read_text()))} commands in {seconds:.0f} s")


if __name__ == "__main__":
    main()
