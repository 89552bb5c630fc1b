"""Requests that schemathesis generates from the OpenAPI document, as an admin, a member and a reader.

No answer is a 5xx, except a 501 that the document has, and none is outside its schema. Some ids in paths and bodies
are those of things that exist, so that requests reach further than the first check. A short run is part of the tests;
`make schemathesis` sends at least 5,000 requests.
"""

import asyncio
import dataclasses
import os
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import (
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from micronova.api.compute.api_document import document
from micronova.http.service import Route
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud, Person
from tests.functional.good_requests import Things

EXAMPLES = int(os.environ.get("MICRONOVA_EXAMPLES", "0"))  # of each operation and mode; 0 is the short run
SEED = int(os.environ.get("MICRONOVA_SEED", "1"))
ROLES, MINORS = ("admin", "member", "reader"), (1, 53, 104)
SHORT = {("admin", 104), ("member", 53), ("reader", 1)}
CHECKS = [
    content_type_conformance,
    status_code_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
LIMITS = {"quota": {"instances": 30, "cores": 1000, "ram": -1, "server_groups": 50, "key_pairs": 50}}

T = TypeVar("T")


class RunningCloud:
    """A cloud that answers on a port; its event loop runs in a thread."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cloud")
        self._thread.start()
        self.cloud = self.run(self._start(directory))

    async def _start(self, directory: Path) -> FullCloud:
        cloud = FullCloud(directory, **LIMITS)
        sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/compute/v2.1"
        await cloud.start(sock)
        return cloud

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the cloud's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def stop(self) -> None:
        """Stop the cloud and its thread."""
        self.run(self.cloud.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCloud]:
    made = RunningCloud(tmp_path)
    yield made
    made.stop()


@dataclasses.dataclass
class Run:
    """What one caller does at one microversion."""

    url: str
    caller: Person
    things: Things
    schema: Any
    routes: dict[tuple[str, str], Route]
    service: Any
    minor: int
    sent: int = 0
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def ids(self, path: str, method: str) -> dict[str, str]:
        """Return the path's parameters with the ids of things that exist."""
        route = self.routes[path, method]
        filled = good.path(self.service, route, self.things)
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(f"/compute/v2.1{path}"))
        found = re.fullmatch(pattern, filled)
        return found.groupdict() if found else {}

    def try_operation(self, path: str, method: str, mode: GenerationMode, examples: int) -> None:
        """Send generated requests."""
        operation = self.schema[path][method]
        strategy = operation.as_strategy(generation_mode=mode)
        real = self.ids(path, method)
        names = {key: self.things[value] for key, value in REAL.items()}

        @seed(SEED)
        @settings(
            max_examples=examples, database=None, deadline=None, derandomize=False, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=strategy, there=st.integers(0, 3), inside=st.booleans())
        def send(case: schemathesis.Case[Any], there: int, inside: bool) -> None:
            if there:  # three of four requests are about something that exists
                case.path_parameters = {**(case.path_parameters or {}), **real}
            if inside:
                case.body = with_real(case.body, names)
            self._send(case, f"{method} {path}")

        try:
            send()
        except Exception as error:  # noqa: BLE001 - a failure of the generator is reported as well
            self.failures.setdefault(f"{method} {path} {type(error).__name__}", str(error)[:2000])

    def _send(self, case: schemathesis.Case[Any], name: str) -> None:
        self.sent += 1
        headers = {"X-Auth-Token": self.caller.token, "OpenStack-API-Version": f"compute 2.{self.minor}"}
        response = case.call(base_url=self.url, headers=headers, timeout=60)
        if response.status_code >= 500 and response.status_code != 501:
            key = f"{name} {response.status_code}"
            self.failures.setdefault(key, f"{case.as_curl_command()}\n{response.text[:500]}")
            return
        try:
            case.validate_response(response, checks=CHECKS)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - all kinds of failures are collected
            wrong = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            key = f"{name} {response.status_code} {type(wrong).__name__}"
            self.failures.setdefault(key, f"{str(wrong)[:1500]}\n{case.as_curl_command()}\n{response.text[:300]}")


# Names of fields that take the id of something, and what it is.
REAL = {
    "imageRef": "image", "flavorRef": "flavors", "tenant": "other project", "server_uuid": "servers",
    "net_id": "networks", "port_id": "ports", "networkId": "networks", "parent_group_id": "security-groups",
    "group_id": "security-groups", "pool": "public", "host": "os-hosts", "address": "floating ip",
}  # fmt: skip


def with_real(value: Any, names: dict[str, str]) -> Any:
    """Return a generated body with the ids of things that exist."""
    if isinstance(value, dict):
        return {
            key: names[key] if key in names and isinstance(each, str) else with_real(each, names)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_real(each, names) for each in value]
    return value


def _order(operation: tuple[str, str]) -> tuple[int, str]:
    """Read first and delete last, so that what exists stays for a while."""
    path, method = operation
    return {"GET": 0, "POST": 2, "PUT": 1, "DELETE": 4}[method] + path.endswith("/action"), path


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("role", ROLES)
def test_generated_requests(running: RunningCloud, role: str, minor: int) -> None:
    if not EXAMPLES and (role, minor) not in SHORT:
        pytest.skip("make schemathesis")
    cloud = running.cloud
    owner = running.run(cloud.person("member"))
    things = running.run(good.make_things(cloud, owner))
    caller = cloud.admin if role == "admin" else owner
    if role == "reader":
        caller = running.run(cloud.person("reader", project=running.run(cloud.project_name(owner))))
    service = cloud.process.services["compute"]
    routes = {
        (route.path, route.method): route
        for route in service.routes
        if minor in route.versions
        and not good.is_removed(route)
        and route.policy is not None
        and not route.path.startswith(("/os-volumes_boot", "/os-fault-rules"))
    }
    content = document(service.routes, minor)
    for item in content["paths"].values():
        del item["parameters"][0]  # the microversion: it is not for the generator to choose
    run = Run(running.url, caller, things, from_dict(content), routes, service, minor)
    for path, method in sorted(routes, key=_order):
        for mode in MODES if EXAMPLES else MODES[:1]:
            run.try_operation(path, method, mode, EXAMPLES or 1)
    print(f"{role} at 2.{minor}: {run.sent} requests")
    report = "\n\n".join(f"### {name}\n{said}" for name, said in run.failures.items())
    assert not run.failures, f"{len(run.failures)} of {run.sent} requests as {role} at 2.{minor}:\n{report}"
    assert run.sent >= len(routes) * (len(MODES) * EXAMPLES or 1) * 0.9
