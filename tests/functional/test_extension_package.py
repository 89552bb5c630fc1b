"""A package with API extensions, installed by pip: what it adds works, and what is faulty in it is named.

The package is in tests/extension_package. Answers are compared with the OpenAPI document here as everywhere.
"""

import asyncio
import importlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from micronova.cli.main import main
from micronova.objects.errors import Invalid
from tests.functional.cloud import CloudOptions, OneProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

PACKAGE = Path(__file__).parents[1] / "extension_package"
TITLE = "of micronova-maintenance-windows 1.2"
RULE = "os_compute_api:os-maintenance-windows"
KEY = "os-maintenance:window"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the package into a directory of its own, which this process then looks into."""
    work = tmp_path_factory.mktemp("extension")
    source, target = work / "source", work / "site"
    shutil.copytree(PACKAGE, source)  # a build leaves files beside the source
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    yield target
    sys.path.remove(str(target))
    for name in [name for name in sys.modules if name.startswith("maintenance_windows")]:
        del sys.modules[name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneProcess]:
    found = OneProcess(tmp_path_factory.mktemp("cloud"), CloudOptions(hosts=2))
    reports = _Reports()
    logging.getLogger("micronova").addHandler(reports)
    await found.start()
    logging.getLogger("micronova").removeHandler(reports)
    yield found
    await found.stop()


class _Reports(logging.Handler):
    """Keeps what is reported as an error while the cloud starts."""

    seen: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


async def test_a_resource(cloud: OneProcess) -> None:
    user = cloud.caller()
    listed = (await user.get("/os-maintenance-windows"))["windows"]
    assert {"name": "nights", "hours": "22:00-04:00"} in listed
    assert (await user.get("/os-maintenance-windows?name=frozen"))["windows"] == [{"name": "frozen", "hours": "never"}]
    assert (await user.get("/os-maintenance-windows/weekends"))["window"]["hours"] == "Sat-Sun"
    assert "no maintenance window zork" in await user.refused(404, "GET", "/os-maintenance-windows/zork")
    assert "'colour' was unexpected" in await user.refused(400, "GET", "/os-maintenance-windows?colour=red")


async def test_an_action_with_its_policy_and_its_schema(cloud: OneProcess) -> None:
    user = cloud.caller()
    id = (await user.boot())["id"]
    path, body = f"/servers/{id}/action", {"os-setMaintenanceWindow": {"name": "nights"}}
    assert "os-maintenance-windows:set" in await user.refused(403, "POST", path, body)
    wrong = {"os-setMaintenanceWindow": {"name": "noon"}}
    assert "os-setMaintenanceWindow.name" in await user.admin.refused(400, "POST", path, wrong)
    await user.admin.act(id, "os-setMaintenanceWindow", {"name": "nights"})
    assert (await user.show(id))[KEY] == "nights"
    stranger = cloud.caller()
    assert (await stranger.request("POST", path, body)).status == 404


async def test_a_field_of_servers(cloud: OneProcess) -> None:
    """It is in requests and answers from the microversion on that the extension names; others need not know it."""
    user = cloud.caller()
    server = await user.boot(None, **{KEY: "nights"})
    plain = await user.boot()
    assert (server[KEY], plain[KEY]) == ("nights", None)
    shown = {each["id"]: each[KEY] for each in (await user.get("/servers/detail"))["servers"]}
    assert shown == {server["id"]: "nights", plain["id"]: None}
    changed = await user.put(f"/servers/{server['id']}", {"server": {"name": "late", KEY: "weekends"}})
    assert (changed["server"]["name"], changed["server"][KEY]) == ("late", "weekends")
    assert KEY in await user.refused(400, "POST", "/servers", user.body(None, **{KEY: "noon"}))
    old = user.at(89)
    assert KEY not in await old.show(server["id"])
    assert KEY in await old.refused(400, "POST", "/servers", old.body(None, **{KEY: "nights"}))
    assert (await user.show(server["id"]))[KEY] == "weekends"


async def test_behaviour_of_servers(cloud: OneProcess) -> None:
    user = cloud.caller()
    id = (await user.boot(None, **{KEY: "frozen"}))["id"]
    assert "cannot be deleted" in await user.refused(409, "DELETE", f"/servers/{id}")
    assert "cannot be deleted" in await user.at(2).refused(409, "DELETE", f"/os-volumes_boot/{id}")
    await user.admin.act(id, "os-setMaintenanceWindow", {"name": "nights"})
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def test_clients_see_the_extension(cloud: OneProcess) -> None:
    user = cloud.caller()
    aliases = {each["alias"] for each in (await user.get("/extensions"))["extensions"]}
    assert "os-maintenance-windows" in aliases and "os-greedy" not in aliases
    shown = (await user.get("/extensions/os-maintenance-windows"))["extension"]
    assert shown["description"] == "When an operator may interrupt servers."
    served = await user.get("/openapi.json?microversion=2.90")
    assert served["paths"]["/os-maintenance-windows"]["get"]["x-policy"] == f"{RULE}:index"
    rules = served["paths"]["/servers/{id}/action"]["post"]["x-policy"]
    assert rules["os-setMaintenanceWindow"] == f"{RULE}:set"
    assert KEY in served["components"]["schemas"]["server_create_body.NewServer_WindowField"]["properties"]
    before = await user.get("/openapi.json?microversion=2.89")
    assert KEY not in before["components"]["schemas"]["server_create_body.NewServer"]["properties"]


async def test_a_faulty_extension_is_named_at_the_start(cloud: OneProcess) -> None:
    """It is skipped whole, and what is well works."""
    [unfinished, greedy] = sorted(_Reports.seen, key=lambda error: "greedy" in error)
    assert unfinished.startswith(f"the API extension unfinished {TITLE} is skipped: AttributeError: ")
    assert greedy.startswith(f"the API extension greedy {TITLE} is skipped: GET /servers exists already; mend or")
    assert (await cloud.caller().request("GET", "/greedy")).status == 404


async def test_commands_know_the_extension(installed: Path, tmp_path: Path) -> None:
    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, main, arguments)

    rules = (await run("policy", "check", "--rule", "os_compute_api:os-maintenance")).stdout
    assert "yes   -       os_compute_api:os-maintenance-windows:index" in rules
    assert "-     -       os_compute_api:os-maintenance-windows:set" in rules
    document = json.loads((await run("openapi", "--microversion", "2.90")).stdout)
    assert "/os-maintenance-windows/{id}" in document["paths"] and document["info"]["version"] == "2.90"
    checked = await run("check", "--dir", str(tmp_path / "new"))
    assert f"ok    API extensions: maintenance {TITLE} is used\n" in checked.stdout, checked
    assert f"FAIL  API extensions: greedy {TITLE}: GET /servers exists already. Right: " in checked.stdout
    assert f"FAIL  API extensions: unfinished {TITLE}: AttributeError: " in checked.stdout
    assert checked.exit_code == 1
    settings = tmp_path / "settings.toml"
    settings.write_text('api.required_extensions = ["os-maintenance-windows", "os-greedy"]')
    checked = await run("check", "--dir", str(tmp_path / "new"), "--config", str(settings))
    assert "FAIL  API extensions: api.required_extensions: api.required_extensions names os-greedy" in checked.stdout


async def test_the_api_does_not_start_without_a_required_extension(installed: Path, tmp_path: Path) -> None:
    required = {"api": {"required_extensions": ["os-maintenance-windows", "os-greedy"]}}
    cloud = OneProcess(tmp_path, CloudOptions(hosts=1, settings=required))
    with pytest.raises(Invalid, match="required_extensions names os-greedy, which the API cannot use"):
        await cloud.start()
    await cloud.stop()
