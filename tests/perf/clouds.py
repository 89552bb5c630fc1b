"""The clouds that are measured: one process on SQLite, and separate processes on PostgreSQL and RabbitMQ."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import yaml

from micronova.cli.private_services.process import end, tail
from tests.cluster import Cluster, toml
from tests.perf.actions import ActionBench
from tests.perf.client import BenchError, Client, Endpoint
from tests.perf.phases import Bench, Sizes, Target
from tests.perf.processes import cpu_seconds
from tests.services.postgres import Postgres
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

HOSTS = 20
PATIENCE = 60.0
UNLIMITED = {"instances": -1, "cores": -1, "ram": -1}
VOLUMES = {"quota_volumes": -1, "quota_gigabytes": -1}
UPLOADS = {"uploads_per_project": 0, "image_count_total": 0}  # no limit, as Nova is measured without an image service


class Start(msgspec.Struct, frozen=True):
    """How long a cloud took from the start of its processes to the first server ACTIVE, and what it cost."""

    seconds: float
    cpu_s: float
    answers_s: float  # until the API answered


class Cloud(Protocol):
    """What can be measured."""

    title: str

    def launch(self) -> None:
        """Start the processes, and return without waiting for them."""

    def roots(self) -> Mapping[int, str]:
        """Return the processes whose trees are the cloud."""

    async def target(self) -> Target:
        """Find out, as a user would, what to boot; raises OSError while the cloud does not answer."""

    def halt(self) -> None:
        """Stop the processes; their state stays."""

    def logs(self) -> str:
        """Return the last words of all processes."""

    def close(self) -> None:
        """Stop everything and leave nothing behind."""


async def start(cloud: Cloud) -> tuple[Start, Target]:
    """Start a cloud and boot a server as soon as it lets us; the server is gone again at the end."""
    begin = time.perf_counter()
    cloud.launch()
    before = sum(cpu_seconds(cloud.roots()).values())  # a database and a broker may run for long
    target = await _answering(cloud, begin)
    answers = time.perf_counter() - begin
    control = Client(target.endpoint())
    while True:
        server = (await control.json("POST", "/servers", target.server("first")))["server"]["id"]
        status = await _status(control, server)
        if status == "ACTIVE":
            break
        await control.json("DELETE", f"/servers/{server}")  # no host was there yet
        if time.perf_counter() - begin > PATIENCE:
            raise BenchError(f"the first server ended in {status}")
    seconds = time.perf_counter() - begin
    took = Start(seconds, sum(cpu_seconds(cloud.roots()).values()) - before, answers)
    await control.json("DELETE", f"/servers/{server}")
    control.close()
    await _all_hosts(target)
    return took, target


async def _answering(cloud: Cloud, begin: float) -> Target:
    while True:
        try:
            return await cloud.target()
        except (OSError, LookupError):
            if time.perf_counter() - begin > PATIENCE:
                raise
            await asyncio.sleep(0.01)


async def _status(control: Client, server: str) -> str:
    while True:
        status: str = (await control.json("GET", f"/servers/{server}"))["server"]["status"]
        if status != "BUILD":
            return status
        await asyncio.sleep(0.005)


async def _all_hosts(target: Target) -> None:
    control = Client(target.endpoint())
    deadline = time.perf_counter() + PATIENCE
    while time.perf_counter() < deadline:
        services = (await control.json("GET", "/os-services?binary=nova-compute"))["services"]
        if sum(service["state"] == "up" for service in services) >= HOSTS:
            control.close()
            return
        await asyncio.sleep(0.1)
    raise BenchError(f"fewer than {HOSTS} hosts came up")


async def measure(cloud: Cloud, sizes: Sizes) -> dict[str, Any]:
    """Measure the starts and all phases of one cloud."""
    first, _ = await start(cloud)
    cloud.halt()
    again, target = await start(cloud)
    await asyncio.sleep(2.0)  # what a start leaves to do is no part of the memory and CPU of a cloud at rest
    figures = await phases(target, sizes)
    return {"title": cloud.title, "start": msgspec.to_builtins(first), "restart": msgspec.to_builtins(again), **figures}


async def measure_actions(cloud: Cloud, sizes: Sizes) -> dict[str, Any]:
    """Measure nothing but the actions of one cloud."""
    _, target = await start(cloud)
    return {"title": cloud.title, **await ActionBench(target, sizes).run()}


async def phases(target: Target, sizes: Sizes) -> dict[str, Any]:
    """Run all phases against a cloud that runs."""
    figures, actions = await Bench(target, sizes).run(), await ActionBench(target, sizes).run()
    return {**figures, **actions, "problems": [*figures["problems"], *actions["problems"]]}


class OneProcess:
    """`micronova up --driver fake --hosts 20` on SQLite."""

    def __init__(self, *, tokens: bool) -> None:
        self.title = "one process" + (", tokens and a network" if tokens else "")
        self.program = [str(Path(sys.executable).with_name("micronova"))]
        self._tokens = tokens
        self._place = Path(tempfile.mkdtemp(prefix="micronova-bench-"))
        self._port = free_port()
        self.volumes = f"http://127.0.0.1:{self._port}/volume/v3"
        strategy = "keystone" if tokens else "noauth2"
        self._config = self._place / "settings.toml"
        settings: dict[str, dict[str, Any]] = {
            "api": {"auth_strategy": strategy},
            "quota": UNLIMITED,
            "image": UPLOADS,
            "volume": VOLUMES,
        }
        self._config.write_text(toml(settings))
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start it."""
        command = [*self.program, "up", "--dir", str(self._place / "cloud")]
        command += ["--driver", "fake", "--hosts", str(HOSTS), "--port", str(self._port), "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def roots(self) -> Mapping[int, str]:
        """Return the one process."""
        assert self._process is not None
        return {self._process.pid: "micronova"}

    async def target(self) -> Target:
        """Log in, if there is something to log in to, and look for the image and the network."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise BenchError(f"micronova up ended: {tail(self._log)}")
        url = f"http://127.0.0.1:{self._port}"
        token = await self._login(url) if self._tokens else "admin:admin"
        return Target(
            url=f"{url}/compute/v2.1",
            token=token,
            image=(await _get(f"{url}/image", token, "/v2/images"))["images"][0]["id"],
            networks=await self._network(url, token) if self._tokens else "none",
            floor=f"{url}/compute",
            roots=self.roots(),
        )

    async def _network(self, url: str, token: str) -> str:
        found = await _get(f"{url}/network", token, "/v2.0/networks?name=private")
        network: str = found["networks"][0]["id"]
        return network

    async def _login(self, url: str) -> str:
        file = self._place / "cloud" / "clouds.yaml"
        auth = yaml.safe_load(file.read_text())["clouds"]["micronova"]["auth"]
        domain = {"name": "Default"}
        user = {"name": auth["username"], "password": auth["password"], "domain": domain}
        body = {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": {"name": auth["project_name"], "domain": domain}},
            }
        }
        client = Client(Endpoint(f"{url}/identity", {}))
        await client.json("POST", "/v3/auth/tokens", body)
        token = client.header("x-subject-token")
        client.close()
        return token

    def halt(self) -> None:
        """Stop it."""
        end(self._process, signal.SIGTERM)

    def logs(self) -> str:
        """Return the end of its log."""
        return tail(self._log)

    def close(self) -> None:
        """Stop it and remove its directory."""
        self.halt()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._place / "log"


class Apart:
    """2 API workers, 2 conductors, 2 schedulers, an agent with 20 hosts and the images, each a process of its own."""

    title = "PostgreSQL and RabbitMQ"

    def __init__(self, conductor: Mapping[str, Any] | None = None) -> None:
        # As in production, where the tests are in more of a hurry.
        self._conductor = {"lease": 20.0, "sweep_interval": 2.0, **(conductor or {})}
        self.metrics: dict[str, int] = {}  # the port of each process that has one
        self._place = Path(tempfile.mkdtemp(prefix="micronova-bench-"))
        self._place.chmod(0o755)  # the user postgres has to get through
        self.postgres = Postgres.start(self._place / "postgres", durable=True)
        try:
            self.rabbitmq = RabbitMQ.start(self._place / "rabbitmq")
            try:
                self.cluster = self._make_cluster()
            except BaseException:
                self.rabbitmq.stop()
                raise
        except BaseException:
            self.postgres.stop()
            raise

    def _make_cluster(self) -> Cluster:
        images = free_port()
        self._images = f"http://127.0.0.1:{images}/image"
        self.database = self.postgres.create_database("micronova")
        cluster = Cluster(
            self._place / "cloud",
            self.database,
            self.rabbitmq.url,
            default={"report_interval": 5.0, "service_down_time": 20.0},
            conductor=self._conductor,
            api={"workers": 2},
            quota=UNLIMITED,
            image=UPLOADS,
            glance={"endpoint_override": self._images, "ticket_key": "5a" * 32},
            fake={"hosts": HOSTS},
        )
        self._add_control(cluster, images)
        cluster.add("compute", "compute", None, **self._metrics("compute"))
        return cluster

    def _add_control(self, cluster: Cluster, images: int) -> None:
        cluster.add("image", "image", MICRONOVA__API__PORT=str(images), MICRONOVA__API__WORKERS="1")
        cluster.add("api", "api")
        for number in (1, 2):
            for role in ("conductor", "scheduler"):
                name = f"{role}{number}"
                cluster.add(name, role, None, MICRONOVA__DEFAULT__HOST=name, **self._metrics(name))

    def _metrics(self, name: str) -> dict[str, str]:
        self.metrics[name] = free_port()
        return {"MICRONOVA__API__METRICS_LISTEN": f"127.0.0.1:{self.metrics[name]}"}

    def launch(self) -> None:
        """Start our processes; database and broker run already."""
        self.cluster.start()

    def roots(self) -> Mapping[int, str]:
        """Return all processes, by role."""
        assert self.postgres.process is not None and self.rabbitmq.process is not None
        assert self.rabbitmq.epmd is not None
        services = {
            self.postgres.process.pid: "postgres",
            self.rabbitmq.process.pid: "rabbitmq",
            self.rabbitmq.epmd.pid: "rabbitmq",
        }
        return {pid: name.rstrip("12") for pid, name in self.cluster.pids().items()} | services

    async def target(self) -> Target:
        """Look for the image."""
        for name, process in self.cluster.processes.items():
            if process.poll() is not None:
                raise BenchError(f"{name} ended: {self.cluster.log(name)[-2000:]}")
        url, token = f"http://127.0.0.1:{self.cluster.port}/compute", "admin:admin"
        image = (await _get(self._images, token, "/v2/images"))["images"][0]["id"]
        await _get(url, token, "/v2.1/flavors/1")
        return Target(url=f"{url}/v2.1", token=token, image=image, floor=url, roots=self.roots())

    def halt(self) -> None:
        """Stop our processes."""
        self.cluster.stop()

    def logs(self) -> str:
        """Return the end of each log."""
        return "\n".join(f"--- {name}\n{self.cluster.log(name)[-2000:]}" for name in self.cluster.processes)

    def close(self) -> None:
        """Stop everything and remove it."""
        self.cluster.stop()
        self.rabbitmq.stop()
        self.postgres.stop()
        shutil.rmtree(self._place, ignore_errors=True)


class SmallRegion(Apart):
    """The control node of a small region (docs/region.md): one unit with 2 workers, each with all roles; and a host."""

    title = "PostgreSQL and RabbitMQ, one unit of 2 workers"

    def _add_control(self, cluster: Cluster, images: int) -> None:
        self._images = f"http://127.0.0.1:{cluster.port}/image"
        cluster.add("control", "api image conductor scheduler", None, MICRONOVA__GLANCE__ENDPOINT_OVERRIDE=self._images)


async def _get(url: str, token: str, path: str) -> Any:
    """Ask once; what is not there yet is a LookupError."""
    client = Client(Endpoint(url, {"X-Auth-Token": token}))
    try:
        status, body = await client.send(client.endpoint.encode("GET", path))
    finally:
        client.close()
    if status != 200:
        raise LookupError(f"GET {url}{path}: {status} {body[:200]!r}")
    return json.loads(body)
