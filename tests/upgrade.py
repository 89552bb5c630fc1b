"""Upgrade a region under load: `python -m tests.upgrade REVISION`.

The code of a revision of this repository is installed into an environment of its own, and runs a region on a private
PostgreSQL and RabbitMQ. While clients create, show and delete servers, `db upgrade` runs with the present code. Then
each process is replaced by one of the present code: a conductor and a scheduler at a time, the API, hosts. If the old
release works with the schema of the new one, that is backed out in the same way, and done again. No request may fail,
no server may end in ERROR, and the audit finds nothing.

If the old release refuses the schema of the new one, the way back is the backup that was made before: all processes are
stopped, the database is restored, and the old release has its servers of then and makes new ones. The region is then
upgraded again, and `audit --repair` removes what the backup does not know.

A new API process is started before the old one is stopped, and clients then call the new one: a proxy does this.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any, Protocol

from micronova.db import schema
from tests.chaos import IMAGE
from tests.cluster import Cluster
from tests.documented import command_with
from tests.services.postgres import Postgres
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

ROOT = Path(__file__).parents[1]
CLIENTS = 4
SETTLE = 120.0
LOAD_BEFORE = 2.0  # seconds of load before the first step, and between steps
SITE = subprocess.run(
    [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
    capture_output=True, text=True, check=True,
).stdout.strip()  # fmt: skip


def install(revision: str, directory: Path) -> Path:
    """Install the code of a revision, with the dependencies of this environment; return its Python."""
    source = directory / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "--extract", "--directory", source], input=archive.stdout, check=True)
    environment = directory / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            site,
            source,
        ],
        check=True,
    )
    # The packages that both use, after the revision's own: `micronova` is found there first.
    Path(site, "dependencies.pth").write_text(f"{SITE}\n")
    found = subprocess.run(
        [python, "-c", "import micronova; print(micronova.__file__)"], capture_output=True, text=True, check=True
    )
    assert str(environment) in found.stdout, f"{found.stdout} is not the code of {revision}"
    return python


def head(python: Path | str) -> str:
    """Return the newest revision of the compute database that the code of an environment knows."""
    code = "from micronova.db import schema; print(schema.head('micronova.db.migrations'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def works_with_ours(python: Path | str) -> bool:
    """Return whether the code of an environment works with the newest schema of the present code."""
    code = "from micronova.db import schema; print(hasattr(schema, 'works_with'))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    known, ours = head(python), head(sys.executable)
    return known == ours or (asked == "True" and known >= schema.works_with("micronova.db.migrations"))


class ComputeAPI(Protocol):
    """What sends requests as an administrator."""

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]: ...


class Clients:
    """Create, show and delete servers, and note every request that fails."""

    def __init__(self, cluster: ComputeAPI, *, keep: int = 3, **server: Any) -> None:
        """Servers have an image that nobody is asked for, and no network, unless `server` says otherwise.

        Of each `keep` servers that a client makes one is left.
        """
        self.cluster = cluster
        self._keep = keep
        self._server = {"imageRef": IMAGE, "flavorRef": "1", "networks": "none", **server}
        self.failed: list[str] = []
        self.requests = 0
        self.kept: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            self.before_each()
            body = {"name": f"upgrade-{client}-{number}", **self._server, "adminPass": "hush-hush"}  # waits encrypted
            made = self._send("POST", "/servers", {"server": body}, 202)
            if made is None:
                continue
            id = made["server"]["id"]
            deadline = time.monotonic() + SETTLE
            while (shown := self._send("GET", f"/servers/{id}", None, 200)) is not None:
                status = shown["server"]["status"]
                if status == "ACTIVE":
                    break
                if status == "ERROR" or time.monotonic() > deadline:
                    self.failed.append(f"server {id} is {status}: {shown['server'].get('fault')}")
                    break
                time.sleep(0.1)
            if number % self._keep == 0:
                self.kept.append(id)
            else:
                self._send("DELETE", f"/servers/{id}", None, 204)

    def before_each(self) -> None:
        """Do something else before the next server."""

    def _send(self, method: str, path: str, body: Any, expected: int) -> Any:
        self.requests += 1
        try:
            status, answer = self.cluster.request(method, path, body)
        except (OSError, urllib.error.URLError) as error:
            self.failed.append(f"{method} {path}: {error}")
            return None
        if status != expected:
            self.failed.append(f"{method} {path}: {status} {answer}")
            return None
        return answer


class Region(Cluster):
    """A cluster whose processes run the code of either release."""

    def __init__(self, directory: Path, database: str, bus: str) -> None:
        super().__init__(
            directory,
            database,
            bus,
            default={"service_down_time": 30.0, "resume_guests_state_on_host_boot": True},
            fake={"hosts": 1},
        )
        self.names = {
            "conductor1": "conductor", "conductor2": "conductor", "scheduler1": "scheduler", "scheduler2": "scheduler",
            "compute1": "compute", "compute2": "compute",
        }  # fmt: skip
        for name, role in self.names.items():
            self.add(name, role, MICRONOVA__DEFAULT__HOST=name)
        self._apis = 0

    def start_api(self) -> str:
        """Start one more API process, on a port of its own; return its name."""
        self._apis += 1
        name, port = f"api{self._apis}", free_port()
        self.add_service(name, "api", port)
        self.start(name)
        return name

    def use_api(self, name: str) -> None:
        """Let clients call this process, once it answers."""
        port = int(self.urls[name].rpartition(":")[2])

        def answers() -> bool:
            import http.client

            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
            try:
                connection.request("GET", "/healthcheck/ready")
                return connection.getresponse().status == 200
            finally:
                connection.close()

        self.wait_until(answers)
        self.port = port

    def end(self, name: str) -> None:
        """Stop a process as an operator does, and wait for its end."""
        process = self.processes[name]
        process.terminate()
        assert process.wait(60) in (0, -15), f"{name} ended with {process.returncode}: {self.log(name)[-2000:]}"

    def replace(self, name: str) -> None:
        """Stop a process, and start it with the present code."""
        self.end(name)
        self.start(name)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            status, body = self.request("GET", "/os-services")
            if status == 200 and any(each["host"] == name and each["state"] == "up" for each in body["services"]):
                return
            time.sleep(0.2)
        raise AssertionError(f"{name} is not up again: {self.log(name)[-2000:]}")


def upgrade(region: Region, python: Path | str) -> None:
    """Replace every process by one of another release, while clients are at work."""
    region.python = str(python)
    old_api = next(name for name in region.urls if name.startswith("api"))
    for name in ("conductor1", "conductor2", "scheduler1", "scheduler2"):
        print(f"  {name}", flush=True)
        region.replace(name)
        time.sleep(LOAD_BEFORE)
    print("  api", flush=True)
    region.use_api(region.start_api())
    time.sleep(1.0)  # requests that the old one has in hand end
    region.end(old_api)
    region.remove(old_api)
    for name in ("compute1", "compute2"):
        print(f"  {name}", flush=True)
        region.replace(name)
        time.sleep(LOAD_BEFORE)


def go_back(region: Region, database: str, dump: Path, python: Path, known: list[str]) -> None:
    """Restore the backup of before the upgrade, and run the old release on it, as docs/operate.md says."""
    old_api = next(name for name in region.urls if name.startswith("api"))
    for name in (*region.names, old_api):
        region.end(name)
    region.remove(old_api)
    _documented("pg_restore", database, dump)
    region.python = str(python)
    region.start(*region.names)
    region.use_api(region.start_api())
    region.wait_ready(hosts=2)
    for id in known:
        status, body = region.request("GET", f"/servers/{id}")
        assert status == 200 and body["server"]["status"] == "ACTIVE", f"{id} after the way back: {status} {body}"
    with Clients(region) as clients:
        time.sleep(LOAD_BEFORE)
    assert not clients.failed, f"{len(clients.failed)} requests failed after the way back: {clients.failed[:10]}"


def _documented(command: str, database: str, dump: Path) -> None:
    """Run a command of docs/operate.md with this database and this file."""
    words = shlex.split(command_with("operate.md", f"{command} "))
    places = {"postgresql://micronova@database.example/micronova": database, "micronova.dump": str(dump)}
    for before, after in places.items():
        assert any(before in word for word in words), f"docs/operate.md names no {before} in {words}"
        words = [word.replace(before, after) for word in words]
    subprocess.run(words, check=True)


def clean_up(region: Region) -> None:
    """Let `audit --repair` make the safe repairs, and remove the guests of servers that only the upgrade has made."""
    unknown = [each["subject"] for each in region.audit() if any(
        repair["name"] == "remove_guest" for repair in each.get("repairs", ()))]  # fmt: skip
    print(f"the audit names {len(unknown)} guests that are newer than the backup", flush=True)
    subprocess.run(
        [sys.executable, "-m", "micronova.cli.main", "audit", "--repair", "--yes",
         *(word for uuid in unknown for word in ("--remove-guest", uuid)),
         "--config", region.config, "--dir", region.directory / "audit"], stdout=subprocess.DEVNULL,
    )  # fmt: skip


def run(revision: str, directory: Path) -> None:
    """Do all of it; raise AssertionError if a request fails."""
    old = install(revision, directory / "old")
    with contextlib.ExitStack() as stack:
        postgres = Postgres.start(directory / "postgres")
        stack.callback(postgres.stop)
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        stack.callback(rabbitmq.stop)
        database, dump = postgres.create_database("upgrade"), directory / "backup.dump"
        region = Region(directory / "cloud", database, rabbitmq.url)
        stack.callback(region.stop)
        region.python = str(old)
        region.start()
        region.use_api(region.start_api())
        region.wait_ready(hosts=2)
        with Clients(region) as clients:
            region.wait_until(lambda: bool(clients.kept))
            known = list(clients.kept)
            _documented("pg_dump", database, dump)
            print(f"{revision} → this release", flush=True)
            migrate(region)
            upgrade(region, sys.executable)
            works = works_with_ours(old)
            if works:
                print(f"this release → {revision}", flush=True)
                upgrade(region, old)
                print(f"{revision} → this release", flush=True)
                upgrade(region, sys.executable)
        assert not clients.failed, f"{len(clients.failed)} requests failed: {clients.failed[:10]}"
        wait_for_clean_audit(region)
        print(f"{clients.requests} requests, none failed; {len(clients.kept)} servers are left, the audit is clean")
        if works:
            return
        print(f"{revision} refuses the schema of this release: back to {revision} by the backup", flush=True)
        go_back(region, database, dump, old, known)
        print(f"{revision} → this release", flush=True)
        migrate(region)
        upgrade(region, sys.executable)
        clean_up(region)
        wait_for_clean_audit(region)
        print(f"{len(known)} servers of the backup are there, the audit is clean")


def migrate(region: Region) -> None:
    """Bring the schema to that of the present code."""
    subprocess.run(
        [sys.executable, "-m", "micronova.cli.main", "db", "upgrade", "--config", region.config,
         "--dir", region.directory / "tool"], check=True,
    )  # fmt: skip


def wait_for_clean_audit(region: Region) -> None:
    """Wait until the audit finds nothing; raise AssertionError if it goes on to find something."""
    deadline = time.monotonic() + SETTLE
    while (findings := region.audit()) and time.monotonic() < deadline:
        time.sleep(1.0)
    assert findings == [], findings


def main() -> None:
    """Run it in a new directory, and remove that if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="release to upgrade from: a tag or a commit")
    revision = parser.parse_args().revision
    directory = Path(tempfile.mkdtemp(prefix="micronova-upgrade-"))
    directory.chmod(0o755)
    began = time.monotonic()
    try:
        run(revision, directory)
    except AssertionError as error:
        sys.exit(f"{error}; its files are in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
