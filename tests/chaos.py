"""Clients that create and delete servers while a cloud is disturbed, and the check that it costs only time."""

import random
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.cluster import Cluster

IMAGE = "11111111-1111-4111-8111-111111111111"
REQUEST_TIMEOUT = 15.0


class Users:
    """Clients that create and delete servers, and remember what they were promised."""

    def __init__(self, cluster: Cluster, seed: int, servers: int) -> None:
        self.cluster = cluster
        self.servers = servers
        self.enough = threading.Event()  # a fifth of the servers were accepted
        self.lock = threading.Lock()
        self.random = random.Random(seed)
        self.wanted: set[str] = set()  # answered 202, never asked to go
        self.unwanted: set[str] = set()  # asked to go and answered 204
        self.unsure: set[str] = set()  # asked to go, the answer was lost
        self.created = 0
        self.gone = threading.Event()  # set when the test is over, whatever has been answered

    def run(self) -> None:
        """Create until there were enough; delete about half of them meanwhile."""
        while not self.gone.is_set():
            with self.lock:
                if self.created >= self.servers:
                    return
                self.created += 1
                number = self.created
            self._create(f"chaos-{number}")
            if number >= self.servers // 5:
                self.enough.set()
            if self.random.random() < 0.5:
                self._delete_one()

    def _create(self, name: str) -> None:
        body = {"server": {"name": name, "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}}
        while not self.gone.is_set():
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
        while not self.gone.is_set():
            status, _ = self._send("DELETE", f"/servers/{server}")
            if status in (204, 404):
                with self.lock:
                    self.unsure.discard(server)
                    self.unwanted.add(server)
                return

    def _send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send until something answers; what is not a success is tried again by the caller."""
        while not self.gone.is_set():
            try:
                status, answer = self.cluster.request(method, path, body, timeout=REQUEST_TIMEOUT)
            except OSError:
                time.sleep(0.1)  # the API is being restarted
                continue
            if status >= 500:
                time.sleep(0.1)
            return status, answer
        return 0, None


def settle(cluster: Cluster, users: Users, hosts: int, seconds: float, what: str) -> None:
    """Wait until every server is ACTIVE or gone as requested; then the audit must find nothing."""
    cluster.wait_ready(hosts=hosts)
    deadline = time.monotonic() + seconds
    while True:
        problems = _problems(cluster, users)
        if not problems:
            break
        # A server that is in ERROR stays there.
        final = [problem for problem in problems if " is ERROR/None " in problem]
        assert not final, f"{what}: {len(final)} servers are in ERROR: {final[:10]}"
        assert time.monotonic() < deadline, f"{what}: {len(problems)} problems after {seconds:.0f} s: {problems[:10]}"
        time.sleep(0.5)
    findings = cluster.audit()
    while findings and time.monotonic() < deadline:  # e.g. a guest that a record has just told its host to destroy
        time.sleep(1)
        findings = cluster.audit()
    assert findings == [], what


def _problems(cluster: Cluster, users: Users) -> list[str]:
    try:
        servers = _all_servers(cluster)
    except OSError as error:
        return [f"the API does not answer: {error}"]
    problems = [f"{id} was accepted and is missing" for id in users.wanted - servers.keys()]
    problems += [f"{id} was deleted and is {servers[id]['status']}" for id in users.unwanted & servers.keys()]
    for id, server in servers.items():
        if server["status"] != "ACTIVE" or server["OS-EXT-STS:task_state"] is not None:
            fault = server.get("fault", {}).get("message", "")
            problems.append(f"{id} is {server['status']}/{server['OS-EXT-STS:task_state']} {fault}")
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


def keep_logs(cluster: Cluster, what: str) -> None:
    """Copy the logs of a cloud to a place where they stay, and print where."""
    place = Path(tempfile.gettempdir()) / f"micronova-{what}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(cluster.directory, place)
    print(f"the logs of the cloud are in {place}")
