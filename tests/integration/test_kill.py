"""The kill test: every role is killed at random while servers come and go; nothing may be lost, stuck or leaked.

Every host comes back, so no server may end in ERROR.

One seed runs in `make test`, five in `make chaos` (CHAOS_SEEDS). A failure prints its seed; CHAOS_SEED repeats it.
"""

import contextlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import Users, keep_logs, settle
from tests.cluster import Cluster
from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ

SERVERS = 200
RECOVERY = 120.0
ROLES = ["api", "conductor1", "conductor2", "scheduler1", "scheduler2", "compute1", "compute2", "compute3"]

_first = int(os.environ.get("CHAOS_SEED", "1"))
SEEDS = range(_first, _first + int(os.environ.get("CHAOS_SEEDS", "1")))


@pytest.fixture
def durable() -> Iterator[tuple[Path, Postgres, RabbitMQ]]:
    """A PostgreSQL that really syncs, and a broker, both of this test alone: it kills them."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-kill-"))
    directory.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        postgres = Postgres.start(directory / "postgres", durable=True)
        stack.callback(postgres.stop)
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        stack.callback(rabbitmq.stop)
        yield directory, postgres, rabbitmq


class Killer:
    """Kills one thing after the other, in an order that the seed decides, and brings it back."""

    def __init__(self, cluster: Cluster, postgres: Postgres, rabbitmq: RabbitMQ, seed: int) -> None:
        self.cluster, self.postgres, self.rabbitmq = cluster, postgres, rabbitmq
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self.killed: dict[str, int] = {}
        self.left: list[str] = []  # to be killed before the end

    def run(self) -> None:
        """Kill each role at least once, and the database and the broker, while the users are at work."""
        self.left = [*ROLES, "rabbitmq", "postgres"]
        self.random.shuffle(self.left)
        while self.left or not self.stop.is_set():
            target = self.left.pop() if self.left else self.random.choice(ROLES)
            self._kill(target)
            self.revive()
            self.killed[target] = self.killed.get(target, 0) + 1
            if self.stop.wait(self.random.uniform(0.2, 1.2)) and not self.left:
                return

    def give_up(self) -> None:
        """Kill nothing more: the test has failed."""
        self.stop.set()
        self.left.clear()

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
    """Every server ends ACTIVE, or gone as asked; the audit finds nothing."""
    directory, postgres, rabbitmq = durable
    cluster = Cluster(
        directory / "cloud",
        postgres.create_database("kill"),
        rabbitmq.url,
        # A busy machine takes many seconds to start a role again; until then its host is not dead.
        default={"service_down_time": 60.0},
        api={"workers": 2},
        fake={"rules": [{"operation": "spawn", "kind": "delay", "delay": 0.3}]},
    )
    for name in ROLES:
        host = {"MICRONOVA__DEFAULT__HOST": name}
        cluster.add(name, name.rstrip("0123456789"), None, **host)
    users = Users(cluster, seed, SERVERS)
    killer = Killer(cluster, postgres, rabbitmq, seed)
    clients = [threading.Thread(target=users.run, daemon=True) for _ in range(6)]
    chaos = threading.Thread(target=killer.run, daemon=True)
    try:
        cluster.start()
        cluster.wait_ready(hosts=3)
        for thread in [*clients, chaos]:
            thread.start()
        for thread in clients:
            thread.join()
        killer.stop.set()
        chaos.join()
        killer.revive()
        settle(cluster, users, 3, RECOVERY, f"seed {seed}")
        assert set(killer.killed) == {*ROLES, "rabbitmq", "postgres"}
    except BaseException:
        keep_logs(cluster, f"kill-seed-{seed}")
        raise
    finally:
        # A thread that goes on would start the roles again, beside the cloud of the next seed.
        killer.give_up()
        users.gone.set()
        if chaos.ident is not None:
            chaos.join()
        cluster.stop()
