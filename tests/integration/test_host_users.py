"""A host speaks only for itself: the broker says who sent a message, and the conductor refuses what is not his."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conductor.rpcapi import HEARTBEAT, REPORT
from micronova.conf.settings import load
from micronova.db import schema, services
from micronova.db.engine import open_database
from micronova.db.tables import metadata
from micronova.objects.clock import SystemClock
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden
from micronova.objects.orders import Heartbeat, HostBeat, PowerChange, RemovedGuest, Report
from micronova.rpc.amqp.bus import AmqpBus
from micronova.rpc.amqp.session import PREFIX
from micronova.rpc.bus import Bus, connect
from micronova.rpc.envelope import OutgoingRequest, encode
from tests.functional.cloud import CloudOptions, OneProcess, one_process
from tests.services.rabbitmq import RabbitMQ

TO = REPORT.interface.target()
SHUTDOWN = 4


class Voice:
    """Somebody with a broker user, who says whatever he likes."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.bus: Bus = connect(url, clock=SystemClock(), random=Random(), name=name)

    async def beats_for(self, host: str) -> None:
        beat = Heartbeat(hosts=(HostBeat(host=host),), number=1 << 60)
        await self.bus.call(TO, HEARTBEAT, beat, context=Context(sender=host), timeout=10)

    async def reports(self, operation: Any, host: str) -> bool:
        """Say that a host has done what an operation asks for; return whether that counts."""
        report = Report(
            operation_id=operation.id, epoch=operation.epoch, instance_uuid=operation.instance_uuid, host=host,
            outcome="done", power_state=1,
        )  # fmt: skip
        return (await self.bus.call(TO, REPORT, report, context=Context(sender=host), timeout=10)).accepted

    async def floods(self, kind: str, number: int) -> None:
        """Send as many messages as the broker takes, and wait for no answer."""
        assert isinstance(self.bus, AmqpBus) and self.bus._connection is not None
        channel, reply_to = self.bus._connection.unconfirmed, self.bus._connection.reply_to
        for n in range(number):
            beat = Heartbeat(hosts=(HostBeat(host=self.name, removed_guests=(RemovedGuest("none", n),)),), number=n)
            report = Report(operation_id="none", epoch=1, instance_uuid="none", host=self.name, outcome="done")
            method, params = (HEARTBEAT, beat) if kind == "heartbeat" else (REPORT, report)
            id = f"{n:032x}"
            request = OutgoingRequest(
                id, "call", method.name, method.interface.namespace, method.since, Context(), params
            )
            body = b"unreadable" if kind == "unreadable" else encode(request)
            channel.publish(
                "", f"{PREFIX}{TO.topic}:{method.interface.namespace}", body, message_id=id, reply_to=reply_to
            )
        await self.bus.probe()  # the broker reads a connection in order: it has all of them

    async def tells(self, host: str, uuid: str, power_state: int) -> None:
        told = HostBeat(host=host, power_changes=(PowerChange(uuid, 1, power_state),))
        beat = Heartbeat(hosts=(told,), number=1 << 60)
        await self.bus.call(TO, HEARTBEAT, beat, context=Context(sender=host), timeout=10)


@pytest.fixture
def users(rabbitmq: RabbitMQ, amqp_url: str) -> Iterator[list[Voice]]:
    """Two hosts with broker users of their own, and somebody with the cloud's."""
    vhost = amqp_url.rpartition("/")[2]
    names = [f"{word}-{uuid.uuid4().hex[:6]}" for word in ("honest", "wicked")]
    yield [*(Voice(name, rabbitmq.add_user(name, "secret", vhost)) for name in names), Voice("guest", amqp_url)]


@contextlib.asynccontextmanager
async def heard(users: list[Voice]) -> AsyncIterator[None]:
    for user in users:
        await user.bus.start()
    try:
        yield
    finally:
        for user in users:
            await user.bus.stop()


async def _register(directory: Path, *hosts: str) -> None:
    """What `micronova host add` does with the database."""
    database = open_database(StateDirectory(directory).database_url("compute"))
    await schema.upgrade(database, metadata, "micronova.db.migrations")
    for host in hosts:
        await database.write(services.register_host_user, host, 0)
    await database.close()


@pytest_asyncio.fixture
async def cloud(tmp_path: Path, amqp_url: str, users: list[Voice]) -> AsyncIterator[OneProcess]:
    """A cloud with two simulated hosts of its own, which knows the two hosts with users."""
    await _register(tmp_path, *(user.name for user in users[:2]))
    wanted = CloudOptions(hosts=2, settings={"default": {"transport_url": amqp_url, "control_users": ["guest"]}})
    async with one_process(tmp_path, wanted) as made, heard(users):
        yield made


async def test_reports_on_what_another_host_has(cloud: OneProcess, users: list[Voice]) -> None:
    _, wicked, _ = users
    user = cloud.caller()
    async with cloud.faults({"operation": "spawn", "kind": "hang"}):
        id = await user.create()
        await user.wait_for(id, "BUILD", task="spawning")
        host = await user.host_of(id)
        [operation] = await cloud.open_operations()
        with pytest.raises(Forbidden, match=f"{wicked.name} may not send messages of host {host}"):
            await wicked.reports(operation, host)
        assert not await wicked.reports(operation, wicked.name), "it is not that host's operation"
        [same] = await cloud.open_operations()
        assert (same.owner, same.epoch, same.step) == (f"host:{host}", operation.epoch, operation.step)
        assert (await user.show(id))["OS-EXT-STS:task_state"] == "spawning"
        await user.delete(f"/servers/{id}")
        await user.gone(id)
    await cloud.assert_clean()


async def test_heartbeats_of_other_hosts(cloud: OneProcess, users: list[Voice]) -> None:
    honest, wicked, common = users
    admin = cloud.caller().admin
    await honest.beats_for(honest.name)
    for liar, host in ((wicked, honest.name), (wicked, "fake-1"), (common, honest.name)):
        with pytest.raises(Forbidden, match=f"{liar.name} may not send messages of host {host}"):
            await liar.beats_for(host)
    await common.beats_for("fake-1")  # which has no user of its own
    known = {service["host"] for service in (await admin.get("/os-services?binary=nova-compute"))["services"]}
    assert known == {honest.name, "fake-1", "fake-2"}


@pytest.mark.parametrize("kind", ["heartbeat", "report", "unreadable"])
async def test_a_flood_of_one_host_does_not_delay_the_heartbeats_of_others(
    cloud: OneProcess, users: list[Voice], kind: str
) -> None:
    """Thousands of its messages are in the queue before the heartbeat of another host, which has ten seconds."""
    honest, wicked, _ = users
    await honest.beats_for(honest.name)
    await wicked.floods(kind, 5_000)
    await honest.beats_for(honest.name)


async def test_power_states_of_guests_of_other_hosts(cloud: OneProcess, users: list[Voice]) -> None:
    _, wicked, _ = users
    user = cloud.caller()
    server = await user.boot()
    host = await user.host_of(server["id"])
    with pytest.raises(Forbidden, match=f"{wicked.name} may not send messages of host {host}"):
        await wicked.tells(host, server["id"], SHUTDOWN)
    await wicked.tells(wicked.name, server["id"], SHUTDOWN)
    assert (await user.show(server["id"]))["status"] == "ACTIVE"


async def test_where_every_host_must_have_a_user(
    tmp_path: Path, amqp_url: str, users: list[Voice], caplog: pytest.LogCaptureFixture
) -> None:
    honest, wicked, common = users
    await _register(tmp_path, honest.name)
    settings = load(
        environ={}, default={"transport_url": amqp_url, "host": "controller"}, conductor={"require_host_users": True}
    )
    process = Process(settings, ["conductor"], StateDirectory(tmp_path))
    await process.start()
    assert "default.control_users is empty: every user of the broker may give orders" in caplog.text
    try:
        async with heard(users):
            await honest.beats_for(honest.name)
            with pytest.raises(Forbidden, match=f"Host {wicked.name} is not one of this cloud's"):
                await wicked.beats_for(wicked.name)
            with pytest.raises(Forbidden, match="guest may not send messages of host anybody"):
                await common.beats_for("anybody")
    finally:
        await process.stop()
