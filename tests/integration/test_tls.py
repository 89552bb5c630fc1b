"""PostgreSQL and RabbitMQ over TLS, with the certificates of `micronova region init --tls`."""

import random
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from micronova.cli.connections import open_and_ask, start_bus
from micronova.cli.private_services.postgres import PrivatePostgres
from micronova.cli.private_services.rabbitmq import PrivateRabbitMQ
from micronova.conf.settings import SettingsError
from micronova.db.engine import Database
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Unavailable
from micronova.rpc.bus import connect
from tests.command import ok
from tests.services.process import free_port


@pytest.fixture(scope="module")
def tls(services_dir: Path) -> Path:
    """The certificates of a region; `other` beside them is those of another one."""
    for name in ("region", "other"):
        ok("region", "init", "--tls", "--dir", services_dir / name)
    return services_dir / "region" / "etc" / "tls"


@pytest.fixture(scope="module")
def database(tls: Path, services_dir: Path) -> Iterator[str]:
    server = PrivatePostgres(services_dir / f"tls-{uuid4().hex}", free_port())
    server.create("micronova", password="secret", durable=False, tls=(tls / "certificate.pem", tls / "key.pem"))
    server.launch()
    yield f"postgresql://micronova:secret@127.0.0.1:{server.port}/postgres"
    server.stop()


def _other(tls: Path) -> Path:
    return tls.parents[2] / "other" / "etc" / "tls" / "ca.pem"


@pytest.mark.parametrize("query", ["sslmode=verify-full&sslrootcert={ca}", "sslrootcert={ca}", "sslmode=require"])
async def test_postgresql_encrypts(tls: Path, database: str, query: str) -> None:
    opened = await open_and_ask(f"{database}?{query.format(ca=tls / 'ca.pem')}", None, 2)
    try:
        asked = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert await opened.read(lambda conn: conn.exec_driver_sql(asked).scalar()) is True
    finally:
        await opened.close()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sslmode=verify-full&sslrootcert={other}", "its certificate is not valid .* sslrootcert"),
        ("sslmode=verify-full", "its certificate is not valid"),
        ("sslrootcert=/nowhere/ca.pem", "a file that it names cannot be used"),
        ("sslcert={certificate}&sslkey={key}", "its certificate is not valid"),  # by the system's authorities
        ("sslmode=always", "sslmode is one of disable"),
    ],
)
async def test_settings_with_which_postgresql_is_not_used(tls: Path, database: str, query: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        files = {"other": _other(tls), "certificate": tls / "certificate.pem", "key": tls / "key.pem"}
        await open_and_ask(f"{database}?{query.format(**files)}", None, 2)


async def test_an_authority_that_is_taken_out_of_the_file_is_not_trusted_after_a_reload(
    tls: Path, database: str, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes((tls / "ca.pem").read_bytes())
    opened = await open_and_ask(f"{database}?sslrootcert={file}", None, 2)

    async def connect_again() -> None:
        with pytest.raises(Unavailable):
            await opened.read(lambda conn: conn.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())").all())
        assert await opened.read(lambda conn: conn.exec_driver_sql("SELECT 1").scalar()) == 1

    try:
        for wanted in (file.read_bytes(), _other(tls).read_bytes() + file.read_bytes()):
            file.write_bytes(wanted)
            _reload(opened)
            await connect_again()
        file.write_bytes(_other(tls).read_bytes())
        _reload(opened)
        with pytest.raises(Unavailable):
            await connect_again()
    finally:
        await opened.close()


def _reload(database: Database) -> None:
    use = database.read_certificates()
    assert use is not None
    use()


async def test_the_broker_over_tls(tls: Path, services_dir: Path) -> None:
    """Of several brokers in the URL, the first one is away."""
    broker = PrivateRabbitMQ(services_dir / f"tls-{uuid4().hex}", free_port(), free_port(), free_port())
    broker.create((tls / "ca.pem", tls / "certificate.pem", tls / "key.pem"))
    broker.launch()
    url = f"amqps://guest:guest@127.0.0.1:{free_port()},127.0.0.1:{broker.port}/"
    try:
        bus = connect(f"{url}?cafile={tls / 'ca.pem'}", clock=SystemClock(), random=random.Random(1))
        await start_bus(bus)
        assert (await bus.probe()).broker.connected
        await bus.stop()
        wrong = connect(f"{url}?cafile={_other(tls)}", clock=SystemClock(), random=random.Random(1))
        with pytest.raises(SettingsError, match="certificate"):
            await start_bus(wrong)
        await wrong.stop()
    finally:
        broker.stop()
