"""Fixtures that every kind of test may use: real services, started on demand and once per run."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ


def pytest_configure() -> None:
    """Let SIGTERM end the run like Ctrl-C does, so that the services we started are stopped.

    Examples have no deadline: the machines are shared, and speed is what benchmarks are for.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings.register_profile("micronova", deadline=None)
    settings.load_profile("micronova")
    gc.disable()


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, and not again and again at modules and collected tests."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs PostgreSQL, mostly tests that run on SQLite as well, so that a quick run can leave it out."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if "postgresql" in parameters or "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.postgresql)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test of real guests that cannot run fail, unless MICRONOVA_WITHOUT_GUESTS says to do without."""
    report = yield
    wanted = item.get_closest_marker("e2e") is not None and not os.environ.get("MICRONOVA_WITHOUT_GUESTS")
    if report.skipped and wanted and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{reason}\nTo do without what this machine cannot run: make test WITHOUT_GUESTS=1"
    return report


@pytest.fixture(scope="session")
def services_dir() -> Iterator[Path]:
    """Return a directory that unprivileged users can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-tests-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_services() -> Path | None:
    """Return the directory of a pair started by `python -m tests.services up`, if we are told of one."""
    urls = os.environ.get("MICRONOVA_TEST_SERVICES")
    return Path(urls).parent if urls else None


@pytest.fixture(scope="session")
def postgres(shared_services: Path | None, request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """Return the run's PostgreSQL. Tests share it: make databases in it, and do not stop it."""
    if shared_services:
        yield Postgres.attach(shared_services / "postgres")
        return
    server = Postgres.start(request.getfixturevalue("services_dir") / "postgres")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq(shared_services: Path | None, request: pytest.FixtureRequest) -> Iterator[RabbitMQ]:
    """Return the run's RabbitMQ. Tests share it: make vhosts in it, and do not stop it."""
    if shared_services:
        yield RabbitMQ.attach(shared_services / "rabbitmq")
        return
    broker = RabbitMQ.start(request.getfixturevalue("services_dir") / "rabbitmq")
    yield broker
    broker.stop()


@pytest.fixture
def database_url(postgres: Postgres) -> Iterator[str]:
    """Return the URL of an empty PostgreSQL database of this test's own."""
    yield from _database(postgres)


@pytest.fixture(scope="module")
def module_database_url(postgres: Postgres) -> Iterator[str]:
    """Return the URL of an empty PostgreSQL database that this module's tests share."""
    yield from _database(postgres)


@pytest.fixture(scope="session")
def session_database_url(postgres: Postgres) -> Iterator[str]:
    """Return the URL of an empty PostgreSQL database that all tests of this run share."""
    yield from _database(postgres)


@pytest.fixture
def amqp_url(rabbitmq: RabbitMQ) -> Iterator[str]:
    """Return the URL of an empty RabbitMQ vhost of this test's own."""
    yield from _vhost(rabbitmq)


@pytest.fixture(scope="module")
def module_amqp_url(rabbitmq: RabbitMQ) -> Iterator[str]:
    """Return the URL of an empty RabbitMQ vhost that this module's tests share."""
    yield from _vhost(rabbitmq)


@pytest.fixture(scope="session")
def session_amqp_url(rabbitmq: RabbitMQ) -> Iterator[str]:
    """Return the URL of an empty RabbitMQ vhost that all tests of this run share."""
    yield from _vhost(rabbitmq)


def _database(postgres: Postgres) -> Iterator[str]:
    name = f"t{uuid4().hex[:12]}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


def _vhost(rabbitmq: RabbitMQ) -> Iterator[str]:
    name = f"t{uuid4().hex[:12]}"
    yield rabbitmq.add_vhost(name)
    rabbitmq.delete_vhost(name)
