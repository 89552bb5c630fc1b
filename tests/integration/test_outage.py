"""Long outages of the broker and of the database while servers come and go: they cost time and nothing else.

`make test` runs short outages, which are still longer than the time after which hosts and leases count as dead. `make
chaos` sets OUTAGE_SECONDS=300 and then uses the default times of the product.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import Users, keep_logs, settle
from tests.cluster import Cluster
from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ

OUTAGE = float(os.environ.get("OUTAGE_SECONDS", "9"))
LONG = OUTAGE >= 60
SERVERS = 200 if LONG else 60
RECOVERY = 300.0 if LONG else 90.0
HOSTS = 3
ROLES = ["api", "conductor1", "conductor2", "scheduler1", "scheduler2", "compute1", "compute2", "compute3"]

# What is away, and how: it stands still and goes on, or it is killed and started again.
STAGES = [(away, how) for how in ("still", "killed") for away in ("broker", "database", "both")]
SHORT_STAGES = [("broker", "still"), ("database", "still"), ("both", "killed")]


class Region:
    """A cloud of separate processes, with a database that really syncs and a broker of its own."""

    def __init__(self, directory: Path, postgres: Postgres, rabbitmq: RabbitMQ) -> None:
        self.postgres, self.rabbitmq = postgres, rabbitmq
        settings: dict[str, dict[str, Any]] = {
            "api": {"workers": 2},
            "fake": {"vcpus": 512, "rules": [{"operation": "spawn", "kind": "delay", "delay": 2.0}]},
        }
        if LONG:
            settings["default"] = {"report_interval": 5.0, "service_down_time": 20.0}
            settings["conductor"] = {"lease": 20.0, "sweep_interval": 2.0}
        database = self.postgres.create_database("outage")
        self.cluster = Cluster(directory / "cloud", database, self.rabbitmq.url, **settings)
        for name in ROLES:
            self.cluster.add(name, name.rstrip("0123456789"), None, MICRONOVA__DEFAULT__HOST=name)

    def begin_outage(self, away: str, how: str) -> Callable[[], None]:
        """Take services away; return the function that brings them back."""
        services: list[Postgres | RabbitMQ] = []
        if away != "database":
            services.append(self.rabbitmq)
        if away != "broker":
            services.append(self.postgres)
        for service in services:
            service.pause() if how == "still" else service.kill()

        def end_outage() -> None:
            for service in services:
                service.resume() if how == "still" else service.restart()

        return end_outage

    def stop(self) -> None:
        """Let services that stand still go on, and stop the processes."""
        for service in (self.rabbitmq, self.postgres):
            if service.process is not None:
                service.resume()
        self.cluster.stop()


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    """The region of all outages."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-outage-"))
    directory.chmod(0o755)  # PostgreSQL has a user of its own
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        postgres = Postgres.start(directory / "postgres", durable=True)
        stack.callback(postgres.stop)
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        stack.callback(rabbitmq.stop)
        made = Region(directory, postgres, rabbitmq)
        stack.callback(made.stop)
        made.cluster.start()
        made.cluster.wait_ready(hosts=HOSTS)
        yield made


@pytest.mark.timeout(900 + 4 * OUTAGE)
@pytest.mark.parametrize(("away", "how"), STAGES if LONG else SHORT_STAGES)
def test_an_outage_costs_only_time(region: Region, away: str, how: str) -> None:
    """Servers are created and deleted before, during and after the outage; none is in ERROR, and the audit is clean."""
    cluster, what = region.cluster, f"outage-{away}-{how}"
    users = Users(cluster, 1, SERVERS)
    clients = [threading.Thread(target=users.run) for _ in range(8)]
    try:
        for thread in clients:
            thread.start()
        assert users.enough.wait(120), "the clients get no answers"
        end_outage = region.begin_outage(away, how)
        begun = time.monotonic()
        try:
            time.sleep(OUTAGE)  # the outage itself
        finally:
            end_outage()
            ended = time.monotonic()
        for thread in clients:
            thread.join()
        settle(cluster, users, HOSTS, RECOVERY, what)
        print(
            f"{what}: {ended - begun:.0f} s away; {len(users.wanted)} servers ACTIVE and {len(users.unwanted)} deleted "
            f"{time.monotonic() - ended:.0f} s after its end; the audit is clean"
        )
        for name, process in cluster.processes.items():
            assert process.poll() is None, f"{name} ended"
    except BaseException:
        keep_logs(cluster, what)
        raise
