"""The functional tests of OpenStack's own clients, unmodified, against a cloud of ours: `make client-suites`.

The clients are installed from their source distributions, which have the tests. The cloud runs on the fake driver with
three hosts, and has what the tests expect of DevStack: clouds, users and an image of its names. Each
failure and each skip is listed with its reason.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import stestr
from tests.command import UpCloud
from tests.osc import OpenStackClient
from tests.peers import peer

SDISTS = {
    "openstacksdk": "4.22.0",
    "python-novaclient": "18.13.1",
    "python-glanceclient": "4.13.0",
    "python-openstackclient": "10.5.0",
}
NEEDED_BY_TESTS = (
    "ddt", "fixtures", "jsonschema", "keyring", "oslotest", "osprofiler", "prometheus-client", "python-subunit",
    "requests-mock", "statsd", "stestr", "tempest", "testscenarios", "testtools",
)  # fmt: skip
SUITES = {
    "openstacksdk": ("openstacksdk", "openstack.tests.functional"),
    "novaclient": ("python-novaclient", "novaclient.tests.functional"),
    "glanceclient": ("python-glanceclient", "glanceclient.tests.functional.v2"),
    "openstackclient": ("python-openstackclient", "openstackclient.tests.functional"),
}
"""The source distribution and the package of the tests of each suite."""
SETTINGS = """
[quota]
instances = 200
cores = 400
ram = 1000000
"""
CLOUDS = ".config/openstack/clouds.yaml"
IMAGE = "cirros-0.6.3-x86_64-disk"
EXAMPLES = {"image_name": IMAGE, "flavor_name": "m1.tiny"}
"""What the examples of openstacksdk use."""


def main() -> int:
    """Run the suites one after the other; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="only this suite (repeatable)")
    parser.add_argument("--only", metavar="REGEX", default="", help="run only the tests whose id matches")
    parser.add_argument("--processes", type=int, default=1, help="tests that run at once (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the results and micronova.log here")
    arguments = parser.parse_args()
    requirements = [f"{name}=={version}" for name, version in SDISTS.items()]
    environment = peer("client-suites", f"--no-binary={','.join(SDISTS)}", *requirements, *NEEDED_BY_TESTS)
    sources = _sources(environment)
    failed = 0
    for name in arguments.suite or SUITES:
        sdist, package = SUITES[name]
        [source] = sources.glob(f"{sdist.replace('-', '_')}-{SDISTS[sdist]}/")
        folder = Path(tempfile.mkdtemp(prefix="mn-clients-"))
        try:
            with _cloud(folder), _programs(environment, folder / "bin"):
                print(f"{name}:", flush=True)
                results = _run(environment, folder, source, package, arguments.only, arguments.processes)
            if arguments.keep:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"{name}.json").write_text(json.dumps(results, indent=1))
                shutil.copy(folder / "cloud" / "micronova.log", arguments.keep / f"{name}.log")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed |= stestr.report(results, package=package)
    return failed


def _sources(environment: Path) -> Path:
    """Return the directory with the unpacked source distributions; they are fetched once."""
    directory = environment / "sources"
    if not (directory / "complete").exists():
        shutil.rmtree(directory, ignore_errors=True)
        names = [f"{name}=={version}" for name, version in SDISTS.items()]
        download = ("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(directory))
        subprocess.run([environment / "bin" / "pip", *download, *names], check=True)
        for archive in directory.glob("*.tar.gz"):
            shutil.unpack_archive(archive, directory, filter="data")
        (directory / "complete").touch()
    return directory


@contextlib.contextmanager
def _cloud(folder: Path) -> Iterator[None]:
    """Start a cloud with what DevStack has, and write a clouds.yaml with DevStack's names."""
    cloud = UpCloud(folder / "cloud", "--hosts", "3", settings=SETTINGS)
    cloud.up()
    try:
        client = OpenStackClient(cloud.directory / "clouds.yaml")
        try:
            _prepare(client, folder)
        finally:
            client.close()
        given = yaml.safe_load((cloud.directory / "clouds.yaml").read_text())["clouds"]
        (folder / ".config" / "openstack").mkdir(parents=True)
        (folder / CLOUDS).write_text(yaml.safe_dump({"clouds": _clouds(given), "functional": EXAMPLES}))
        yield
    finally:
        cloud.down()


def _prepare(client: OpenStackClient, folder: Path) -> None:
    shown = client.json("image show", "test-image")
    client("image save", "--file", str(folder / "image"), shown["id"])
    client("image create", "--file", str(folder / "image"), "--public", "--disk-format", shown["disk_format"],
           "--container-format", shown["container_format"], IMAGE)  # fmt: skip
    client("project create", "alt_demo")
    client("user create", "--project", "alt_demo", "--password", "secret-of-alt", "alt_demo")
    for role in ("member", "reader"):
        client("role add", "--project", "alt_demo", "--user", "alt_demo", role)
    client("role add", "--system", "all", "--user", "admin", "admin")


def _clouds(given: dict[str, Any]) -> dict[str, Any]:
    """Return the clouds under the names that the tests look for."""

    def named(auth: dict[str, Any]) -> dict[str, Any]:
        return {"region_name": "RegionOne", "identity_api_version": "3", "auth": auth}

    def auth(cloud: str, **changes: str) -> dict[str, Any]:
        kept = {name: value for name, value in given[cloud]["auth"].items() if not name.endswith("_domain_name")}
        return {**kept, "user_domain_id": "default", "project_domain_id": "default", **changes}

    admin = auth("micronova")
    system = {name: value for name, value in admin.items() if not name.startswith("project_")}
    return {
        "devstack": named(auth("micronova-demo")),
        "devstack-alt": named(
            auth("micronova-demo", username="alt_demo", password="secret-of-alt", project_name="alt_demo")
        ),
        "devstack-admin": named(admin),
        "functional_admin": named(admin),
        "devstack-system-admin": named({**system, "system_scope": "all"}),
    }


@contextlib.contextmanager
def _programs(environment: Path, directory: Path) -> Iterator[None]:
    """Make a directory with the clients' programs, which a process that has loaded the clients runs."""
    here, python = Path(__file__).parent, environment / "bin" / "python"
    directory.mkdir()
    for name in ("openstack", "nova", "glance"):
        program = directory / name
        program.write_text(f"#!{python} -SE\n{(here / 'program.py').read_text()}")
        program.chmod(0o755)
    home = {"HOME": str(directory.parent), "XDG_CONFIG_HOME": str(directory.parent / ".config")}
    server = subprocess.Popen(
        [python, here / "program_server.py", directory / "server.socket"],
        env={**os.environ, **home}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == "ready"
        yield
    finally:
        server.kill()
        server.communicate()


def _run(
    environment: Path, folder: Path, source: Path, package: str, only: str, processes: int
) -> list[dict[str, Any]]:
    (folder / ".stestr.conf").write_text(
        f"[DEFAULT]\ntest_path={source / package.replace('.', '/')}\ntop_dir={source}\n"
        "group_regex=([^\\.]*\\.)*\n"  # the tests of a class run one after the other
    )
    for entry in source.iterdir():  # tests upload files of their project
        if not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    programs = str(folder / "bin")
    variables = {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "PATH": f"{programs}:{environment / 'bin'}:/usr/bin:/bin",
        "OS_CLIENT_CONFIG_FILE": str(folder / CLOUDS),
        "OS_NOVACLIENT_EXEC_DIR": programs,
        "OS_GLANCECLIENT_EXEC_DIR": programs,
        "OS_NOVACLIENT_NETWORK": "private",
        "OPENSTACKSDK_EXAMPLE_CONFIG_KEY": "functional",
        "OPENSTACKSDK_IMAGE": IMAGE,
        "OS_TEST_TIMEOUT": "600",
        "TOX_ENV_DIR": str(environment),
    }
    return stestr.run(environment, folder, package, only, variables=variables, processes=processes)


if __name__ == "__main__":
    sys.exit(main())
