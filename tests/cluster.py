"""A cloud of separate processes on PostgreSQL and RabbitMQ, which tests and benchmarks start, kill and restart."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.services.process import free_port

READY = 60.0


class Cluster:
    """Named processes, each running one role or several; `config` is the settings they share."""

    def __init__(self, directory: Path, database: str, bus: str, **sections: Mapping[str, Any]) -> None:
        self.directory = directory
        self.port = free_port()
        self.urls: dict[str, str] = {}  # of processes that have a port of their own
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.python = sys.executable  # what processes that are started from now on run with
        self._roles: dict[str, tuple[str, Path | None, dict[str, str]]] = {}
        settings: dict[str, dict[str, Any]] = {
            "default": {
                "transport_url": bus,
                "secret_key": "5a" * 32,
                "report_interval": 1.0,
                "service_down_time": 6.0,
                "log_level": "INFO",
            },
            "database": {"connection": database, "pool_size": 5},
            "conductor": {"lease": 6.0, "sweep_interval": 1.0},
            "api": {"auth_strategy": "noauth2", "port": self.port},
            "quota": {"instances": -1, "cores": -1, "ram": -1},
        }
        for name, values in sections.items():
            settings.setdefault(name, {}).update(values)
        directory.mkdir(parents=True, exist_ok=True)
        self.config = directory / "micronova.toml"
        self.config.write_text(toml(settings))

    def add(self, name: str, role: str, config: Path | None = None, **environment: str) -> None:
        """Say which role a process has; a settings file or MICRONOVA__… settings of its own may be given."""
        self._roles[name] = (role, config, environment)

    def add_service(self, name: str, role: str, port: int, **environment: str) -> None:
        """Say which role a process with a port of its own has."""
        self.urls[name] = f"http://127.0.0.1:{port}"
        self.add(name, role, None, MICRONOVA__API__PORT=str(port), MICRONOVA__API__WORKERS="1", **environment)

    def start(self, *names: str) -> None:
        """Start processes (all, if none is named)."""
        for name in names or tuple(self._roles):
            role, config, environment = self._roles[name]
            home = self.directory / name
            home.mkdir(exist_ok=True)
            with (self.directory / f"{name}.log").open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [
                        self.python,
                        "-m",
                        "micronova.cli.main",
                        "run",
                        *role.split(),
                        "--config",
                        str(config or self.config),
                        "--dir",
                        str(home),
                    ],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process and all its workers, at once."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait()

    def remove(self, name: str) -> None:
        """End a process at once and forget it."""
        self.kill(name)
        del self.processes[name], self._roles[name]
        self.urls.pop(name, None)

    def stop(self) -> None:
        """Stop all processes cleanly, then those that do not."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + 20
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(name)

    def pids(self) -> dict[int, str]:
        """Return the process ids, for measuring."""
        return {process.pid: name for name, process in self.processes.items()}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str = "admin:admin",
        version: str = "2.100",
        timeout: float = 30.0,
    ) -> tuple[int, Any]:
        """Send one request to the compute API; raises OSError while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {
                "X-Auth-Token": token,
                "OpenStack-API-Version": f"compute {version}",
                "Content-Type": "application/json",
            }
            connection.request(method, f"/compute/v2.1{path}", json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if data else None
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def wait_ready(self, hosts: int) -> None:
        """Wait until all services accept connections, the API answers, and so many hosts are up."""

        def ready() -> bool:
            _connect(*self.urls.values())
            status, body = self.request("GET", "/os-services?binary=nova-compute")
            return status == 200 and sum(service["state"] == "up" for service in body["services"]) >= hosts

        self.wait_until(ready)

    def wait_listening(self, name: str) -> None:
        """Wait until a process with a port of its own accepts connections."""

        def listening() -> bool:
            _connect(self.urls[name])
            return True

        self.wait_until(listening)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds while all processes run."""
        deadline = time.monotonic() + READY
        last: object = "not all hosts are up"
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended: {self.log(name)[-2000:]}")
            try:
                if condition():
                    return
            except OSError as error:
                last = error
            time.sleep(0.1)  # the processes of the cloud tell us nothing; we have to ask
        raise AssertionError(f"the cloud did not become ready: {last}")

    def log(self, name: str) -> str:
        """Return what a process has logged."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def audit(self) -> list[dict[str, Any]]:
        """Run `micronova audit --json` and return its findings."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "micronova.cli.main",
                "audit",
                "--json",
                "--config",
                str(self.config),
                "--dir",
                str(self.directory / "audit"),
            ],
            capture_output=True,
            timeout=120,
        )
        assert done.stdout, done.stderr.decode()
        findings: list[dict[str, Any]] = json.loads(done.stdout)
        wrong = any(each["kind"] != "unasked" for each in findings)
        assert done.returncode == (1 if wrong else 3 if findings else 0)
        return findings


def _connect(*urls: str) -> None:
    for url in urls:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Write settings as a file has them."""
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(_value(item) for item in value)}]" if isinstance(value, list) else json.dumps(value)
