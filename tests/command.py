"""The `micronova` command as a user calls it, and clouds that it starts."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.services.process import free_port


def micronova(
    *arguments: str | Path, env: Mapping[str, str] | None = None, timeout: float = 60, inside: Sequence[str] = ()
) -> Any:
    """Run the command to its end, by another program (`inside`) if need be."""
    return subprocess.run(
        [*inside, sys.executable, "-m", "micronova.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
        env={**os.environ, **(env or {})},
    )  # fmt: skip


def ok(*arguments: str | Path, env: Mapping[str, str] | None = None, inside: Sequence[str] = ()) -> str:
    """Run the command, which must succeed, and return what it printed."""
    done = micronova(*arguments, env=env, inside=inside)
    assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return str(done.stdout)


def refused(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run the command, which must refuse with one clear line, and return that line."""
    done = micronova(*arguments, env=env)
    assert done.returncode != 0, f"{arguments} was not refused: {done.stdout}"
    assert "Traceback" not in done.stderr, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith(("micronova: ", "Error: "))]
    return str(line)


class UpCloud:
    """A cloud of `micronova up` in a directory of its own."""

    def __init__(
        self, directory: Path, *options: str, settings: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.port = free_port()
        self.options = options
        self.settings = settings
        self._environment = environment

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = ["up", "--dir", self.directory, "--driver", "fake", "--port", str(self.port)]
        if self.settings:
            file = self.directory.with_suffix(".toml")
            file.write_text(self.settings)
            command += ["--config", file]
        return [*command, *self.options]

    def up(self) -> str:
        """Start it in the background; return what the command said."""
        return ok(*self._command(), "--detach", env=self._environment)

    def foreground(self) -> "subprocess.Popen[str]":
        """Start it as a child, and return that when the cloud answers."""
        child = self.start_command(*self._command())
        assert child.stdout is not None and child.stderr is not None
        for line in child.stdout:
            if "Ctrl-C stops" in line:
                return child
        raise AssertionError(f"the cloud did not start: {child.stderr.read()}")

    def start_command(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start a command that does not end by itself."""
        return subprocess.Popen(
            [sys.executable, "-m", "micronova.cli.main", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def down(self) -> str:
        """Stop it."""
        return ok("down", "--dir", self.directory)

    @property
    def pid(self) -> int:
        return int((self.directory / "micronova.pid").read_text())

    def kill(self) -> None:
        """End it as a power cut would."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self.directory / "micronova.log").read_text(errors="replace")

    def audit(self) -> list[dict[str, Any]]:
        """Return what `micronova audit` finds."""
        done = micronova("audit", "--dir", self.directory, "--json")
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        assert done.returncode == (1 if findings else 0)
        return findings

    # --- its HTTP ------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Send one request; return the status, the body and the headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else None, answer.headers
        finally:
            connection.close()

    def token(self, user: str = "admin", project: str = "admin") -> str:
        """Log in with the password that the first start made."""
        password = json.loads((self.directory / "keys.json").read_text())[f"{user}_password"]
        identity = {
            "methods": ["password"],
            "password": {"user": {"name": user, "domain": {"id": "default"}, "password": password}},
        }
        scope = {"project": {"name": project, "domain": {"id": "default"}}}
        body = {"auth": {"identity": identity, "scope": scope}}
        status, answer, headers = self.request("POST", "/identity/v3/auth/tokens", body)
        assert status == 201, answer
        return headers["X-Subject-Token"]

    def compute(self, method: str, path: str, body: Any = None, *, token: str, status: int = 200) -> Any:
        """Send one request to the compute API, which must answer with the status."""
        headers = {"X-Auth-Token": token, "OpenStack-API-Version": "compute 2.100"}
        got, answer, _ = self.request(method, f"/compute/v2.1{path}", body, headers)
        assert got == status, (method, path, got, answer)
        return answer
