"""The real OpenStack client, as users call it, against a cloud of ours."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.peers import peer

REQUIREMENT = "python-openstackclient==10.5.0"
PLACEMENT = "osc-placement==4.9.1"


class Refused(Exception):
    """The client ended with an error; the message is what it told its user."""


class OpenStackClient:
    """Calls `openstack` with the clouds of a clouds.yaml, and remembers which commands it was given."""

    def __init__(self, clouds: Path) -> None:
        self._bin = peer("osc", REQUIREMENT, PLACEMENT) / "bin"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
        self._environment = {**kept, "OS_CLIENT_CONFIG_FILE": str(clouds), "OS_PLACEMENT_API_VERSION": "1.39"}
        self.commands: set[str] = set()
        self._driver = subprocess.Popen(
            [self._bin / "python", Path(__file__).with_name("osc_driver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip

    def close(self) -> None:
        """End the interpreter."""
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.close()
        self._driver.wait(30)
        self._driver.stdout.close()

    def __call__(self, command: str, *arguments: str, cloud: str = "micronova") -> str:
        """Run `openstack COMMAND ARGUMENTS…` to its end and return what it printed.

        Without a cloud the arguments say where to log in, and how.
        """
        assert self._driver.stdin is not None and self._driver.stdout is not None
        of_cloud = ["--os-cloud", cloud] if cloud else []
        print(json.dumps([*of_cloud, *command.split(), *arguments]), file=self._driver.stdin, flush=True)
        line = self._driver.stdout.readline()
        assert line, "the client's interpreter died"
        return self._result(command, arguments, **json.loads(line))

    def json(self, command: str, *arguments: str, cloud: str = "micronova") -> Any:
        """Run a command that shows or lists something, and return that."""
        return json.loads(self(command, *arguments, "-f", "json", cloud=cloud))

    def column(self, command: str, *arguments: str, name: str = "Name", cloud: str = "micronova") -> list[Any]:
        """Return one column of a list."""
        return [row[name] for row in self.json(command, *arguments, cloud=cloud)]

    def refused(self, command: str, *arguments: str, cloud: str = "micronova") -> str:
        """Expect the command to fail, and return what it said."""
        try:
            said = self(command, *arguments, cloud=cloud)
        except Refused as error:
            return str(error)
        raise AssertionError(f"openstack {command} {' '.join(arguments)} was not refused: {said}")

    def start(self, command: str, *arguments: str, cloud: str = "micronova") -> "subprocess.Popen[str]":
        """Start a command as a process of its own; `finish` waits for it."""
        return subprocess.Popen(
            [self._bin / "openstack", *command.split(), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self._environment, "OS_CLOUD": cloud},
        )  # fmt: skip

    def finish(self, process: "subprocess.Popen[str]", command: str) -> str:
        """Wait for a process, and return what it printed."""
        out, err = process.communicate(timeout=90)
        return self._result(command, (), process.returncode, out, err)

    def _result(self, command: str, arguments: tuple[str, ...], code: int, out: str, err: str) -> str:
        assert "Traceback" not in err, err
        if code:
            raise Refused(f"openstack {command} {' '.join(arguments)}: exit {code}: {err.strip()}")
        self.commands.add(command)
        return out
