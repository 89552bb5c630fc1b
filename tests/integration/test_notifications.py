"""A real oslo.messaging listener receives notifications; without one, or without a broker, servers still work."""

import asyncio
import functools
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from micronova.notifications.envelope import Message
from micronova.notifications.publisher import QUEUE_LIMIT, Publisher
from micronova.objects.clock import SystemClock
from tests.functional.cloud import CloudOptions, one_process
from tests.oslo.listener import listening
from tests.services.rabbitmq import RabbitMQ

pytestmark = pytest.mark.timeout(180)


def _settings(database_url: str, amqp_url: str, **sections: Any) -> dict[str, Any]:
    return {"database": {"connection": database_url}, "default": {"transport_url": amqp_url}, **sections}


async def test_a_server_is_notified_of_in_both_formats(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    wanted = CloudOptions(hosts=2, settings=_settings(database_url, amqp_url))
    async with listening(amqp_url) as listener, one_process(tmp_path, wanted) as cloud:
        user = cloud.caller()
        server = await user.boot(name="notified", metadata={"colour": "blue"})
        id = server["id"]
        await user.act(id, "os-stop")
        await user.wait_for(id, "SHUTOFF")
        await user.delete(f"/servers/{id}")
        await user.gone(id)
        told = [f"instance.{each}" for each in ("create.start", "create.end", "power_off.end", "delete.end")]
        told += [f"compute.{each}" for each in told]
        await listener.until(lambda: all(listener.of(event, id) for event in told))

        for event in told:
            assert len(listener.of(event, id)) == 1, event
        [legacy] = listener.of("compute.instance.create.end", id)
        assert legacy["priority"] == "info"
        assert legacy["publisher_id"] == f"compute.{legacy['payload']['host']}"
        assert (legacy["payload"]["state"], legacy["payload"]["message"]) == ("active", "Success")
        assert legacy["context"]["project_id"] == user.project
        assert legacy["metadata"]["message_id"] and legacy["metadata"]["timestamp"]
        [new] = listener.of("instance.create.end", id)
        assert new["payload"]["nova_object.name"] == "InstanceCreatePayload"
        data = new["payload"]["nova_object.data"]
        assert (data["state"], data["power_state"], data["host"]) == ("active", "running", legacy["payload"]["host"])
        assert data["metadata"] == {"colour": "blue"}
        assert data["launched_at"]
        assert data["request_id"] == legacy["context"]["request_id"] != ""
        [start] = listener.of("instance.create.start", id)
        assert start["payload"]["nova_object.data"]["state"] == "building"
        [gone] = listener.of("instance.delete.end", id)
        assert gone["payload"]["nova_object.data"]["deleted_at"]


async def test_a_decision_and_a_failure_are_notified(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    wanted = CloudOptions(hosts=2, settings=_settings(database_url, amqp_url, fake={"memory_mb": 4096}))
    async with listening(amqp_url) as listener, one_process(tmp_path, wanted) as cloud:
        user = cloud.caller()
        id = await user.create(flavorRef="5")
        await user.wait_for(id, "ERROR")
        gave_up = "compute_task.build_instances.error"
        await listener.until(lambda: len(listener.of(gave_up, id)) > 0)
        [failed] = listener.of(gave_up, id)
        assert failed["priority"] == "error"
        reason = failed["payload"]["nova_object.data"]["reason"]["nova_object.data"]
        assert "No valid host" in reason["exception_message"]
        starts = listener.of("scheduler.select_destinations.start", id)
        assert {each["publisher_id"] for each in starts} == {"scheduler.controller", "nova-scheduler:controller"}


# --- the publisher by itself ---------------------------------------------------------------------------------------


def _note(number: int) -> tuple[Message, ...]:
    body = f'{{"oslo.version": "2.0", "oslo.message": "{{\\"event_type\\": \\"note\\", \\"payload\\": {number}, '
    return (Message("notifications.info", (body + '\\"priority\\": \\"INFO\\"}"}').encode()),)


def _publisher(url: str) -> Publisher:
    return Publisher(url, "nova", clock=SystemClock(), random=random.Random(), name="test")


async def _until(publisher: Publisher, enough: Any) -> None:
    async with asyncio.timeout(30):
        while not enough():
            await asyncio.sleep(0.02)  # the publisher has no event to wait for


async def test_without_a_listener_nothing_is_encoded(amqp_url: str, rabbitmq: RabbitMQ) -> None:
    encoded: list[int] = []
    publisher = _publisher(amqp_url)
    await publisher.start()

    def encode() -> Sequence[Message]:
        encoded.append(1)
        return _note(1)

    publisher.put(encode)
    await _until(publisher, lambda: publisher.unheard == 1)
    await publisher.stop()
    assert encoded == []
    vhost = amqp_url.rpartition("/")[2]
    assert "nova" not in rabbitmq.ctl("list_exchanges", "-p", vhost, "name").split()


async def test_a_new_listener_receives_what_happens_from_then_on(amqp_url: str) -> None:
    publisher = _publisher(amqp_url)
    await publisher.start()
    publisher.put(lambda: _note(1))
    await _until(publisher, lambda: publisher.unheard == 1)
    async with listening(amqp_url) as listener:
        publisher.put(lambda: _note(2))
        await listener.until(lambda: len(listener.of("note")) == 1)
        assert [each["payload"] for each in listener.of("note")] == [2]
        assert (publisher.sent, publisher.dropped, publisher.unheard) == (1, 0, 1)
        await publisher.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RabbitMQ]:
    """A broker of our own, to be killed."""
    made = RabbitMQ.start(tmp_path / "broker")
    yield made
    made.stop()


async def test_while_the_broker_is_down_the_newest_wait_and_the_oldest_are_dropped(
    broker: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = _publisher(broker.url)
    await publisher.start()
    async with listening(broker.url) as listener:
        publisher.put(lambda: _note(-1))
        await listener.until(lambda: len(listener.of("note")) == 1)
        await asyncio.to_thread(broker.kill)
        publisher.put(lambda: _note(-2))
        await _until(publisher, lambda: not publisher.takes_bursts)
        with caplog.at_level(logging.WARNING):
            for number in range(QUEUE_LIMIT + 50):
                publisher.put(functools.partial(_note, number))
            assert publisher.dropped == 50
        assert "dropped" in caplog.text
        await asyncio.to_thread(broker.restart)
        last = QUEUE_LIMIT + 49
        await listener.until(lambda: any(each["payload"] == last for each in listener.of("note")))
        received = {each["payload"] for each in listener.of("note")}
        assert set(range(50, last + 1)) <= received
    await publisher.stop()


async def test_a_burst_is_sent_whole(amqp_url: str) -> None:
    """A transaction that changes thousands of servers puts its notifications at once."""
    number = 2 * QUEUE_LIMIT
    publisher = _publisher(amqp_url)
    await publisher.start()
    async with listening(amqp_url) as listener:
        publisher.put(lambda: _note(-1))
        await listener.until(lambda: len(listener.of("note")) == 1)
        for each in range(number):
            publisher.put(functools.partial(_note, each))
        await _until(publisher, lambda: publisher.sent == number + 1)
    assert publisher.dropped == publisher.unheard == 0
    await publisher.stop()


async def test_a_notification_that_cannot_be_made_harms_no_other(amqp_url: str) -> None:
    def broken() -> Sequence[Message]:
        raise ZeroDivisionError

    publisher = _publisher(amqp_url)
    await publisher.start()
    async with listening(amqp_url) as listener:
        publisher.put(broken)
        publisher.put(lambda: _note(7))
        await listener.until(lambda: len(listener.of("note")) == 1)
    await publisher.stop()
