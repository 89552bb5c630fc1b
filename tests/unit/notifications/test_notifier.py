"""What is sent, to which topic, in which envelope; and what is not sent at all."""

import random
from typing import Any

import msgspec
import pytest

from micronova.conf.settings import load
from micronova.notifications.envelope import Message
from micronova.notifications.notifier import API, CONDUCTOR, BusNotifier, NoNotifications, make_notifier
from micronova.notifications.publisher import Notification
from micronova.objects.clock import SystemClock
from micronova.objects.flavor import Flavor
from micronova.objects.scheduling import RequestSpec, SelectDestinations
from tests.unit.notifications.samples import CONTEXT, FAULT, UUID, server


class Kept:
    """Keeps what would be published."""

    def __init__(self) -> None:
        self.notifications: list[Notification] = []

    def put(self, notification: Notification) -> None:
        self.notifications.append(notification)

    def messages(self) -> list[Message]:
        return [message for notification in self.notifications for message in notification()]


class Fixed(SystemClock):
    def now(self) -> float:
        return 1_351_518_133.25


def notifier(**topics: tuple[str, ...]) -> tuple[BusNotifier, Kept]:
    kept = Kept()
    chosen = topics or {"unversioned_topics": ("notifications",), "versioned_topics": ("versioned_notifications",)}
    made = BusNotifier(
        kept,  # type: ignore[arg-type]
        host="controller",
        clock=Fixed(),
        random=random.Random(1),
        **chosen,
    )
    return made, kept


def opened(body: bytes) -> dict[str, Any]:
    envelope = msgspec.json.decode(body)
    assert set(envelope) == {"oslo.version", "oslo.message"}
    assert envelope["oslo.version"] == "2.0"
    message: dict[str, Any] = msgspec.json.decode(envelope["oslo.message"])
    return message


def test_an_event_goes_out_in_both_formats() -> None:
    sender, kept = notifier()
    sender.instance("create.start", server(), context=CONTEXT)
    legacy, new = kept.messages()
    assert (legacy.routing_key, new.routing_key) == ("notifications.info", "versioned_notifications.info")
    first, second = opened(legacy.body), opened(new.body)
    assert (first["event_type"], first["publisher_id"]) == ("compute.instance.create.start", "compute.compute-1")
    assert (second["event_type"], second["publisher_id"]) == ("instance.create.start", "nova-compute:compute-1")
    for message in (first, second):
        assert message["priority"] == "INFO"
        assert message["timestamp"] == "2012-10-29 13:42:13.250000"
        assert message["_context_request_id"] == CONTEXT.request_id
        assert (message["_context_user_id"], message["_context_project_id"]) == ("ada", "engines")
    assert first["message_id"] != second["message_id"]
    assert first["_unique_id"] != second["_unique_id"]


def test_an_error_has_its_own_queue() -> None:
    sender, kept = notifier()
    sender.instance("create.error", server(host=None), context=CONTEXT, fault=FAULT)
    legacy, new = kept.messages()
    assert (legacy.routing_key, new.routing_key) == ("notifications.error", "versioned_notifications.error")
    assert opened(new.body)["priority"] == "ERROR"
    assert opened(new.body)["publisher_id"] == "nova-conductor:controller"


def test_the_end_of_a_delete_shows_a_deleted_server() -> None:
    sender, kept = notifier(versioned_topics=("versioned_notifications",))
    sender.instance("delete.end", server(task_state="deleting"), context=CONTEXT)
    [message] = kept.messages()
    data = opened(message.body)["payload"]["nova_object.data"]
    assert (data["state"], data["task_state"], data["power_state"]) == ("deleted", None, "pending")
    assert data["ip_addresses"] == []
    assert data["deleted_at"] == data["terminated_at"] == "2012-10-29T13:42:13Z"


def test_the_sender_may_be_another_host_or_a_service_of_this_process() -> None:
    sender, kept = notifier()
    sender.instance("resize_prep.start", server(), context=CONTEXT, sender="compute-2", details={})
    sender.instance("evacuate", server(), context=CONTEXT, sender=API)
    found = [opened(message.body)["publisher_id"] for message in kept.messages()]
    assert found == ["compute.compute-2", "nova-compute:compute-2", "api.controller", "nova-api:controller"]


@pytest.mark.parametrize("event", ["lock", "unlock", "interface_attach.start", "interface_detach.end"])
def test_some_have_only_the_new_format(event: str) -> None:
    sender, kept = notifier()
    sender.instance(event, server(), context=CONTEXT)
    [message] = kept.messages()
    assert opened(message.body)["event_type"] == f"instance.{event}"


def test_the_scheduler_notifies_of_decisions() -> None:
    sender, kept = notifier()
    flavor = Flavor(id="1", name="m1.tiny", ram=512, vcpus=1, disk=1)
    spec = RequestSpec(project_id="engines", user_id="ada", flavor=flavor)
    request = SelectDestinations(spec=spec, instance_uuids=(UUID,))
    sender.scheduler(CONTEXT, "scheduler.select_destinations.end", request)
    legacy, new = (opened(message.body) for message in kept.messages())
    assert legacy["event_type"] == new["event_type"] == "scheduler.select_destinations.end"
    assert (legacy["publisher_id"], new["publisher_id"]) == ("scheduler.controller", "nova-scheduler:controller")


def test_several_topics_get_a_message_each() -> None:
    sender, kept = notifier(unversioned_topics=("one", "two"))
    sender.instance("reboot.end", server(), context=CONTEXT)
    assert [message.routing_key for message in kept.messages()] == ["one.info", "two.info"]


@pytest.mark.parametrize(
    ("sections", "sends"),
    [
        ({}, False),
        ({"default": {"transport_url": "amqp://broker/"}}, True),
        ({"default": {"transport_url": "amqp://broker/"}, "notifications": {"notification_format": "none"}}, False),
        ({"notifications": {"transport_url": "rabbit://broker/"}}, True),
    ],
)
async def test_without_a_broker_or_a_format_nothing_is_sent(sections: dict[str, Any], sends: bool) -> None:
    settings = load(environ={}, **sections)
    made = make_notifier(settings, host="h", clock=SystemClock(), random=random.Random(1))
    assert isinstance(made, BusNotifier) is sends
    assert isinstance(made, NoNotifications) is not sends
    await made.start()
    await made.stop()


def test_a_rebuild_has_its_own_payload_and_names() -> None:
    sender, kept = notifier()
    sender.instance("rebuild.scheduled", server(), context=CONTEXT, sender=CONDUCTOR)
    sender.instance("rebuild.start", server(), context=CONTEXT)
    found = [opened(message.body) for message in kept.messages()]
    assert [(message["event_type"], message["publisher_id"].partition(":")[0]) for message in found] == [
        ("compute.instance.rebuild.scheduled", "conductor.controller"),
        ("instance.rebuild_scheduled", "nova-conductor"),
        ("compute.instance.rebuild.start", f"compute.{server()['host']}"),
        ("instance.rebuild.start", "nova-compute"),
    ]
    for message in found[1::2]:
        payload = message["payload"]
        assert (payload["nova_object.name"], payload["nova_object.version"]) == ("InstanceActionRebuildPayload", "1.10")
        assert "trusted_image_certificates" in payload["nova_object.data"]
    assert all("image_name" in message["payload"] for message in found[::2])
