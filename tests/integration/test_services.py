"""The services that the tests start for themselves: they work, and what they kept survives a crash."""

from pathlib import Path

import aio_pika
import asyncpg
import pytest

from micronova.cli.private_services.process import accepts
from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ


async def test_postgres_keeps_commits_when_it_crashes(services_dir: Path) -> None:
    server = Postgres.start(services_dir / "postgres-crash", durable=True)
    try:
        url = server.create_database("crash")
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE t (n int)")
        await connection.execute("INSERT INTO t VALUES (1)")
        server.kill()
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await connection.execute("INSERT INTO t VALUES (2)")
        server.restart()
        connection = await asyncpg.connect(url)
        assert await connection.fetchval("SELECT sum(n) FROM t") == 1
        await connection.close()
    finally:
        server.stop()
    assert not accepts(server.port)


async def test_rabbitmq_keeps_confirmed_messages_when_it_crashes(services_dir: Path) -> None:
    broker = RabbitMQ.start(services_dir / "rabbitmq-crash")
    try:
        url = broker.add_user("someone", "secret", vhost=broker.add_vhost("crash").rpartition("/")[2])
        connection = await aio_pika.connect(url)
        channel = await connection.channel(publisher_confirms=True)
        queue = await channel.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
        message = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, routing_key=queue.name)
        broker.kill()
        assert not accepts(broker.port)
        broker.restart()
        connection = await aio_pika.connect(url)
        queue = await (await connection.channel()).get_queue("q")
        assert (await queue.get(timeout=10)).body == b"kept"
        await connection.close()
    finally:
        broker.stop()
    assert not accepts(broker.port)


async def test_a_test_gets_a_database_of_its_own(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    await connection.execute("CREATE TABLE t (n int)")
    await connection.close()


@pytest.mark.parametrize("test", ["first", "second"])
async def test_a_test_gets_a_vhost_of_its_own(amqp_url: str, test: str) -> None:
    """A durable queue that another test declared is not there."""
    connection = await aio_pika.connect(amqp_url)
    channel = await connection.channel()
    with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
        await channel.declare_queue("q", passive=True)
    await (await connection.channel()).declare_queue("q", durable=True)
    await connection.close()
