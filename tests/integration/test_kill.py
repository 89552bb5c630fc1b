"""The kill test: every role is killed at random while servers come and go; nothing may be lost, stuck or leaked.

One seed runs in `make test`, five in `make chaos` (CHAOS_SEEDS). A failure prints its seed; CHAOS_SEED repeats it.
"""

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ

SERVERS = 200
RECOVERY = 60.0
IMAGE = "11111111-1111-4111-8111-111111111111"
ROLES = ["api", "conductor1", "conductor2", "scheduler1", "scheduler2", "compute1", "compute2", "compute3"]

_first = int(os.environ.get("CHAOS_SEED", "1"))
SEEDS = range(_first, _first + int(os.environ.get("CHAOS_SEEDS", "1")))


@pytest.fixture
def durable() -> Iterator[tuple[Path, Postgres, RabbitMQ]]:
    """A PostgreSQL that really syncs, and a broker, both of this test alone: it kills them."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-kill-"))
    directory.chmod(0o755)
    postgres = Postgres.start(directory / "postgres", durable=True)
    rabbitmq = RabbitMQ.start(directory / "rabbitmq")
    yield directory, postgres, rabbitmq
    rabbitmq.stop()
    postgres.stop()
    shutil.rmtree(directory, ignore_errors=True)


class Users:
    """Clients that create and delete servers, and remember what they were promised."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.lock = threading.Lock()
        self.random = random.Random(seed)
        self.wanted: set[str] = set()  # answered 202, never asked to go
        self.unwanted: set[str] = set()  # asked to go and answered 204
        self.unsure: set[str] = set()  # asked to go, the answer was lost
        self.created = 0

    def run(self) -> None:
        """Create until there were enough; delete about half of them meanwhile."""
        while True:
            with self.lock:
                if self.created >= SERVERS:
                    return
                self.created += 1
                number = self.created
            self._create(f"kill-{number}")
            if self.random.random() < 0.5:
                self._delete_one()

    def _create(self, name: str) -> None:
        body = {"server": {"name": name, "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}}
        while True:
            status, answer = self._send("POST", "/servers", body)
            if status == 202:
                with self.lock:
                    self.wanted.add(answer["server"]["id"])
                return

    def _delete_one(self) -> None:
        with self.lock:
            if not self.wanted:
                return
            server = self.random.choice(sorted(self.wanted))
            self.wanted.discard(server)
            self.unsure.add(server)
        while True:
            status, _ = self._send("DELETE", f"/servers/{server}")
            if status in (204, 404):
                with self.lock:
                    self.unsure.discard(server)
                    self.unwanted.add(server)
                return

    def _send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send until something answers; what is not a success is tried again by the caller."""
        while True:
            try:
                status, answer = self.cluster.request(method, path, body, timeout=15)
            except OSError:
                time.sleep(0.1)  # the API is being restarted
                continue
            if status >= 500:
                time.sleep(0.1)
            return status, answer


class Killer:
    """Kills one thing after the other, in an order that the seed decides, and brings it back."""

    def __init__(self, cluster: Cluster, postgres: Postgres, rabbitmq: RabbitMQ, seed: int) -> None:
        self.cluster, self.postgres, self.rabbitmq = cluster, postgres, rabbitmq
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self.killed: dict[str, int] = {}

    def run(self) -> None:
        """Kill each role at least once, and the database and the broker, while the users are at work."""
        targets = [*ROLES, "rabbitmq", "postgres"]
        self.random.shuffle(targets)
        while targets or not self.stop.is_set():
            target = targets.pop() if targets else self.random.choice(ROLES)
            self._kill(target)
            self.revive()
            self.killed[target] = self.killed.get(target, 0) + 1
            if self.stop.wait(self.random.uniform(0.2, 1.2)) and not targets:
                return

    def revive(self) -> None:
        """Start again what ended by itself: a role that finds no broker at its start says so and exits."""
        for name in ROLES:
            if self.cluster.processes[name].poll() is not None:
                self.cluster.start(name)

    def _kill(self, target: str) -> None:
        if target in ("rabbitmq", "postgres"):
            service = self.rabbitmq if target == "rabbitmq" else self.postgres
            service.kill()
            service.restart()
            return
        self.cluster.kill(target)
        self.stop.wait(self.random.uniform(0.0, 0.5))
        self.cluster.start(target)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_when_everything_is_killed(durable: tuple[Path, Postgres, RabbitMQ], seed: int) -> None:
    """Every server ends ACTIVE, ERROR with a fault, or gone as asked; the audit finds nothing."""
    directory, postgres, rabbitmq = durable
    cluster = Cluster(
        directory / "cloud",
        postgres.create_database("kill"),
        rabbitmq.url,
        api={"workers": 2},
        fake={"rules": [{"operation": "spawn", "kind": "delay", "delay": 0.3}]},
    )
    for name in ROLES:
        host = {"MICRONOVA__DEFAULT__HOST": name}
        cluster.add(name, name.rstrip("0123456789"), **host)
    try:
        cluster.start()
        cluster.wait_ready(hosts=3)
        users = Users(cluster, seed)
        killer = Killer(cluster, postgres, rabbitmq, seed)
        clients = [threading.Thread(target=users.run) for _ in range(6)]
        chaos = threading.Thread(target=killer.run)
        for thread in [*clients, chaos]:
            thread.start()
        for thread in clients:
            thread.join()
        killer.stop.set()
        chaos.join()
        killer.revive()
        _settle(cluster, users, seed)
        assert set(killer.killed) == {*ROLES, "rabbitmq", "postgres"}
    except BaseException:
        _keep_logs(cluster, seed)
        raise
    finally:
        cluster.stop()


def _settle(cluster: Cluster, users: Users, seed: int) -> None:
    cluster.wait_ready(hosts=3)
    deadline = time.monotonic() + RECOVERY
    while True:
        problems = _problems(cluster, users)
        if not problems:
            break
        assert time.monotonic() < deadline, f"seed {seed}: after {RECOVERY:.0f} s: {problems[:10]}"
        time.sleep(0.5)
    findings = cluster.audit()
    while findings and time.monotonic() < deadline:  # e.g. a guest that a record has just told its host to destroy
        time.sleep(1)
        findings = cluster.audit()
    assert findings == [], f"seed {seed}"


def _problems(cluster: Cluster, users: Users) -> list[str]:
    try:
        servers = _all_servers(cluster)
    except OSError as error:
        return [f"the API does not answer: {error}"]
    problems = [f"{id} was accepted and is missing" for id in users.wanted - servers.keys()]
    problems += [f"{id} was deleted and is {servers[id]['status']}" for id in users.unwanted & servers.keys()]
    for id, server in servers.items():
        settled = server["OS-EXT-STS:task_state"] is None and server["status"] in ("ACTIVE", "ERROR")
        if not settled:
            problems.append(f"{id} is {server['status']}/{server['OS-EXT-STS:task_state']}")
        elif server["status"] == "ERROR" and not server.get("fault", {}).get("message"):
            problems.append(f"{id} is in ERROR without a fault")
    return problems


def _all_servers(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = {}
    marker = ""
    while True:
        status, page = cluster.request("GET", f"/servers/detail?limit=500{marker}")
        if status != 200:
            raise ConnectionError(f"status {status}")
        found.update((server["id"], server) for server in page["servers"])
        if len(page["servers"]) < 500:
            return found
        marker = f"&marker={page['servers'][-1]['id']}"


def _keep_logs(cluster: Cluster, seed: int) -> None:
    place = Path(tempfile.gettempdir()) / f"micronova-kill-seed-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(cluster.directory, place)
    print(f"the logs of the cloud are in {place}")
