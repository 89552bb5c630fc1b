"""`micronova region up`, `renew`, `reload` and `restart`: the certificate is replaced while servers are created."""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from micronova.cli.region.plan import read_plan
from tests.command import micronova
from tests.region_docs import free_ports
from tests.upgrade import Clients

pytestmark = pytest.mark.timeout(900)
SECONDS = 300.0


class Trial:
    """A region on this machine with TLS, and its administrator."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.plan = read_plan(place)
        self._token = ""
        self._trusts = ssl.create_default_context(cafile=self.plan.authority)

    def do(self, *arguments: str) -> str:
        """Run a command of `micronova region`."""
        done = micronova("region", *arguments, "--dir", self.place, timeout=SECONDS)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def log_in(self) -> None:
        """Get a token of the administrator."""
        password = json.loads((self.plan.state("identity") / "keys.json").read_text())["admin_password"]
        domain = {"id": "default"}
        user = {"name": "admin", "domain": domain, "password": password}
        identity = {"methods": ["password"], "password": {"user": user}}
        body = {"auth": {"identity": identity, "scope": {"project": {"name": "admin", "domain": domain}}}}
        answer, _ = self._ask("identity", "POST", "/identity/v3/auth/tokens", body)
        self._token = str(answer.headers["X-Subject-Token"])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request to the compute API, on a connection of its own."""
        answer, said = self._ask("api", method, f"/compute/v2.1{path}", body)
        return answer.status, said

    def image(self) -> str:
        """Return the id of an image."""
        _, said = self._ask("image", "GET", "/image/v2/images")
        return str(said["images"][0]["id"])

    def _ask(self, role: str, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPResponse, Any]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.plan.port(role), timeout=60, context=self._trusts)
        try:
            version = {"OpenStack-API-Version": "compute 2.100"}
            headers = {"X-Auth-Token": self._token, "Content-Type": "application/json", **version}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read()
            return answer, json.loads(said) if said else None
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)  # other processes tell us nothing: we have to ask


@pytest.fixture
def trial(services_dir: Path) -> Iterator[Trial]:
    place = services_dir / f"trial-{uuid4().hex[:8]}"
    options = ("--driver", "fake", "--host", "compute-1", "--tls", "--first-port", str(free_ports()))
    micronova("region", "init", "--dir", place, *options, "--conductors", "1", "--schedulers", "1")
    made = Trial(place)
    with made.plan.settings.open("a") as settings:
        settings.write("\n[quota]\ninstances = -1\ncores = -1\nram = -1\n")
    try:
        made.do("up")
        yield made
    finally:
        made.do("down")


def test_the_certificate_is_replaced_while_servers_are_created(trial: Trial) -> None:
    """All processes, the broker and the database show the new one, no request fails, and a host can be restarted."""
    trial.log_in()
    shown = ssl.get_server_certificate(("127.0.0.1", trial.plan.port("api")))
    with Clients(trial, imageRef=trial.image()) as clients:
        _until(lambda: bool(clients.kept or clients.failed))
        assert "is good until" in trial.do("renew")
        assert "reloaded: database, broker, identity, image, network, volume, conductor-1" in trial.do("reload")
        made = len(clients.kept)
        _until(lambda: len(clients.kept) > made or bool(clients.failed))
        assert "compute-1 is ready again" in trial.do("restart", "conductor-1", "compute-1")
    assert not clients.failed, clients.failed[:5]
    now = ssl.get_server_certificate(("127.0.0.1", trial.plan.port("api")))
    assert now != shown and now.strip() == trial.plan.certificate.read_text().strip()
    logs = "".join(file.read_text() for file in (trial.place / "log").glob("*.log"))
    assert logs.count("SIGHUP: reloaded") == len(trial.plan.processes) + 1 and "nothing is reloaded" not in logs
