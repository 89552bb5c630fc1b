"""What runs in an environment with Placement: its gabbi files and fixtures, pointed at our API.

    PYTHON placement_side.py PORT [REGEX]

The fixtures of Placement are used as they are. Only the functions with which they write into Placement's database are
replaced by requests to our API. One line of JSON per test goes to the standard output. This file imports nothing of
ours.
"""

import json
import os
import re
import sys
import tempfile
import types
import unittest
import uuid
from typing import Any

import fixtures  # type: ignore[import-not-found]
import httpx  # type: ignore[import-not-found, unused-ignore]
from gabbi import driver  # type: ignore[import-not-found]
from placement.tests.functional import fixtures as placement_fixtures  # type: ignore[import-not-found]
from placement.tests.functional.fixtures import gabbits  # type: ignore[import-not-found]

HEADERS = {"x-auth-token": "admin", "x-roles": "admin,service", "openstack-api-version": "placement 1.37"}


class API:
    """Our API, as the fixtures call it."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS)

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body)
        if answer.status_code not in (200, 201, 204):
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def make_anew(self, policy: str, *origins: str) -> None:
        self("POST", "/control", {"policy": policy, "origins": list(origins)})


class Provider:
    """A resource provider, as the fixtures use it."""

    def __init__(self, api: API, uuid: str) -> None:
        self._api = api
        self.uuid = uuid

    @property
    def generation(self) -> int:
        return int(self._api("GET", f"/resource_providers/{self.uuid}")["generation"])

    def set_aggregates(self, aggregates: Any) -> None:
        body = {"aggregates": list(aggregates), "resource_provider_generation": self.generation}
        self._api("PUT", f"/resource_providers/{self.uuid}/aggregates", body)


class Things:
    """What the fixtures use of Placement's `test_base`, over our API."""

    def __init__(self, api: API) -> None:
        self._api = api

    def create_provider(self, context: Any, name: str, *aggregates: str, **more: str) -> Provider:
        provider = Provider(self._api, more.get("uuid") or getattr(gabbits.uuids, name))
        body = {"name": name, "uuid": provider.uuid}
        if more.get("parent"):
            body["parent_provider_uuid"] = more["parent"]
        self._api("POST", "/resource_providers", body)
        if aggregates:
            provider.set_aggregates(aggregates)
        return provider

    def ensure_rc(self, context: Any, name: str) -> None:
        if name.startswith("CUSTOM_"):
            self._api("PUT", f"/resource_classes/{name}")

    def add_inventory(self, provider: Provider, name: str, total: int, **more: Any) -> None:
        self.ensure_rc(None, name)
        more.setdefault("max_unit", total)
        body = {"resource_class": name, "total": total, **more}
        self._api("POST", f"/resource_providers/{provider.uuid}/inventories", body)

    def set_traits(self, provider: Provider, *traits: str) -> None:
        for name in traits:
            if name.startswith("CUSTOM_"):
                self._api("PUT", f"/traits/{name}")
        body = {"traits": list(traits), "resource_provider_generation": provider.generation}
        self._api("PUT", f"/resource_providers/{provider.uuid}/traits", body)

    def create_user_and_project(self, context: Any, prefix: str = "fake") -> tuple["Named", "Named"]:
        return Named(context, f"{prefix}-user"), Named(context, f"{prefix}-project")

    def ensure_consumer(self, context: Any, user: "Named", project: "Named", consumer_id: str | None = None) -> Any:
        return types.SimpleNamespace(uuid=consumer_id or str(uuid.uuid4()), user=user, project=project)

    def set_allocation(self, context: Any, provider: Provider, consumer: Any, amounts: dict[str, int]) -> None:
        body = {
            "allocations": {provider.uuid: {"resources": amounts}},
            "consumer_generation": None,
            "project_id": consumer.project.external_id,
            "user_id": consumer.user.external_id,
        }
        self._api("PUT", f"/allocations/{consumer.uuid}", body)


class Named:
    """A user, a project or a resource class of Placement's objects."""

    things: Things

    def __init__(self, context: Any, external_id: str | None = None, name: str | None = None) -> None:
        self.external_id = external_id
        self.name = name

    def create(self) -> None:
        if self.name is not None:
            self.things.ensure_rc(None, self.name)


def no_database(conf_fixture: Any, set_config: bool) -> Any:
    """Stand in for the fixture that makes a database of Placement, which nothing would read."""
    conf_fixture.config(group="placement_database", connection="sqlite://")
    return fixtures.Fixture()


def point_at(api: API, things: Things) -> None:
    """Let the fixtures use our API: the service is made anew when one starts."""
    begin = gabbits.APIFixture.start_fixture

    def start(fixture: Any) -> None:
        begin(fixture)
        api.make_anew("secure" if fixture._secure_rbac else "legacy")

    def start_open(fixture: Any) -> None:
        begin(fixture)
        api.make_anew("open")

    def start_cors(fixture: Any) -> None:
        begin(fixture)
        api.make_anew("legacy", "http://valid.example.com")

    gabbits.APIFixture.start_fixture = start
    gabbits.OpenPolicyFixture.start_fixture = start_open
    gabbits.CORSFixture.start_fixture = start_cors
    gabbits.fixtures.Database = no_database
    Named.things = things
    for name, replaced in {
        "tb": things,
        "user_obj": types.SimpleNamespace(User=Named),
        "project_obj": types.SimpleNamespace(Project=Named),
        "rc_obj": types.SimpleNamespace(ResourceClass=Named),
    }.items():
        setattr(gabbits, name, replaced)


class Result(unittest.TestResult):
    """Writes one line per test."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def _write(self, test: Any, status: str, details: str = "") -> None:
        file = type(test).__name__.partition("_")[0]
        name = getattr(test, "test_data", {}).get("name", test.id())
        print(
            json.dumps({"id": f"{file}: {name}", "status": status, "details": details}), file=self._stream, flush=True
        )

    def addSuccess(self, test: Any) -> None:
        self._write(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        self._write(test, "failed", str(err[1])[:2000])

    def addError(self, test: Any, err: Any) -> None:
        self._write(test, "failed", str(err[1])[:2000])

    def addSkip(self, test: Any, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._write(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._write(test, "failed", "It passes, and Placement says that it does not.")


def main() -> None:
    """Run the files whose names match."""
    stream = os.fdopen(os.dup(1), "w")  # the fixtures replace the standard output
    port, only = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    api = API(port)
    point_at(api, Things(api))
    folder = os.path.join(os.path.dirname(os.path.dirname(placement_fixtures.__file__)), "gabbits")
    with tempfile.TemporaryDirectory() as chosen:
        for name in sorted(os.listdir(folder)):
            if re.search(only, name):
                os.symlink(os.path.join(folder, name), os.path.join(chosen, name))
        suite = driver.build_tests(
            chosen,
            unittest.TestLoader(),
            host="127.0.0.1",
            port=port,
            fixture_module=gabbits,
            test_loader_name="placement",
            cert_validate=False,  # else each test loads certificates
        )
        suite.run(Result(stream))


if __name__ == "__main__":
    main()
