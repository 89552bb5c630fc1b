"""Sends notifications in Nova's formats, for consumers that use oslo.messaging.

`make_notifier` returns the notifier of a process. Its methods return at once and do not raise. A notification is
encoded later, and only if its exchange exists at the broker, which means that there are consumers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

from micronova.conf.settings import Settings
from micronova.notifications import unversioned, usage, versioned
from micronova.notifications.envelope import Message, messages
from micronova.notifications.resources import Announcement
from micronova.objects import power_state, states
from micronova.objects.clock import Clock, micros
from micronova.objects.context import Context
from micronova.objects.instance import Fault, InstanceRow
from micronova.objects.service_names import SCHEDULER

if TYPE_CHECKING:
    from micronova.db.instance_changes import InstanceChange
    from micronova.notifications.publisher import Publisher
    from micronova.objects.scheduling import SelectDestinations


API: Final = "nova-api:"
CONDUCTOR: Final = "nova-conductor:"
"""Senders that are services of this process; no host has such a name."""
_VERSIONED_NAMES = {"rebuild.scheduled": "rebuild_scheduled"}
"""Notifications that have another name in the versioned format."""


class Announcer(Protocol):
    """What a role needs to send notifications about other things than instances."""

    enabled: bool  # else nothing that only a notification needs has to be read

    def announce(self, context: Context, make: Callable[[], Announcement]) -> None:
        """Send a notification, without waiting; it is made later, and only if there are consumers."""

    async def wait_for_room(self) -> None:
        """Wait until the queue of notifications has room, so that many of them do not drop the oldest."""

    async def wait_until_sent(self) -> None:
        """Wait until the broker has all notifications so far, for as long as it is away."""


class Notifier(Announcer, Protocol):
    """What a role needs to send notifications about instances as well."""

    def instance(
        self,
        event: str,
        row: InstanceRow,
        *,
        context: Context,
        fault: Fault | None = None,
        details: Mapping[str, Any] | None = None,
        sender: str | None = None,
    ) -> None:
        """Send `instance.EVENT` about an instance, without waiting; `details` are fields that only this event has.

        It is sent in the name of the compute service on the instance's host; else `sender` is another host, or API or
        CONDUCTOR for that service of this process.
        """


class ProcessNotifier(Notifier, Protocol):
    """The notifier of a process: of all its roles."""

    def scheduler(self, context: Context, event: str, request: "SelectDestinations") -> None:
        """Send the notification that the scheduler begins or ends a decision, without waiting."""

    def counts(self) -> dict[str, int]:
        """Return the number of notifications by outcome, for metrics."""
        ...

    async def start(self) -> None:
        """Start to publish."""

    async def stop(self) -> None:
        """Publish what waits, for a short time, and stop."""


class NoNotifications(ProcessNotifier):
    """Discards all notifications."""

    enabled = False

    def announce(self, context: Context, make: Callable[[], Announcement]) -> None:
        """Drop it."""

    async def wait_for_room(self) -> None:
        """Return at once."""

    async def wait_until_sent(self) -> None:
        """Return at once."""

    def instance(
        self,
        event: str,
        row: InstanceRow,
        *,
        context: Context,
        fault: Fault | None = None,
        details: Mapping[str, Any] | None = None,
        sender: str | None = None,
    ) -> None:
        """Drop it."""

    def scheduler(self, context: Context, event: str, request: "SelectDestinations") -> None:
        """Drop it."""

    def counts(self) -> dict[str, int]:
        """Return the number of notifications by outcome, for metrics."""
        return {}

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


class BusNotifier(ProcessNotifier):
    """Sends notifications in each format that has topics."""

    enabled = True

    def __init__(
        self,
        publisher: "Publisher",
        *,
        host: str,
        clock: Clock,
        random: Random,
        unversioned_topics: tuple[str, ...] = (),
        versioned_topics: tuple[str, ...] = (),
    ) -> None:
        self.publisher = publisher
        self._host = host
        self._clock = clock
        self._random = random
        self._unversioned = unversioned_topics
        self._versioned = versioned_topics

    async def start(self) -> None:
        """Start to publish."""
        await self.publisher.start()

    async def stop(self) -> None:
        """Publish what waits, for a short time, and stop."""
        await self.publisher.stop()

    def instance(
        self,
        event: str,
        row: InstanceRow,
        *,
        context: Context,
        fault: Fault | None = None,
        details: Mapping[str, Any] | None = None,
        sender: str | None = None,
    ) -> None:
        """Send `instance.EVENT` about an instance (`create.start`, for example), without waiting."""
        now = micros(self._clock.now())
        self.publisher.put(partial(self._instance, event, row, context, fault, now, details or {}, sender))

    async def wait_for_room(self) -> None:
        """Wait until the queue has room."""
        await self.publisher.wait_for_room()

    async def wait_until_sent(self) -> None:
        """Wait until the broker has all notifications so far."""
        await self.publisher.wait_until_sent()

    def announce(self, context: Context, make: Callable[[], Announcement]) -> None:
        """Send a notification, without waiting."""
        self.publisher.put(partial(self._announce, context, make, micros(self._clock.now())))

    def scheduler(self, context: Context, event: str, request: "SelectDestinations") -> None:
        """Send the notification that the scheduler begins or ends a decision, without waiting."""
        self.publisher.put(partial(self._scheduler, context, event, request, micros(self._clock.now())))

    def counts(self) -> dict[str, int]:
        """Return the number of messages sent, of notifications dropped, and of those without a consumer."""
        publisher = self.publisher
        return {"sent": publisher.sent, "dropped": publisher.dropped, "unheard": publisher.unheard}

    def _instance(
        self,
        event: str,
        row: InstanceRow,
        context: Context,
        fault: Fault | None,
        now: int,
        details: Mapping[str, Any],
        sender: str | None,
    ) -> list[Message]:
        if event == "delete.end":
            row = {
                **row,
                "vm_state": states.DELETED,
                "task_state": None,
                "power_state": power_state.NOSTATE,
                "network_info": [],
                "terminated_at": now,
                "deleted_at": now,
            }
        # The conductor sends it in the name of the compute service: a host's broker user may not publish notifications.
        sender = sender or row["host"] or CONDUCTOR
        source, host = (sender[5:-1], self._host) if sender in (API, CONDUCTOR) else ("compute", sender)
        old_event = unversioned.event_name(event)
        failed = event.endswith(".error")
        found: list[Message] = []
        if self._unversioned and old_event is not None:
            found += messages(
                self._unversioned,
                f"compute.instance.{old_event}",
                unversioned.instance_payload(event, row, fault, details),
                publisher=f"{source}.{host}",
                context=context,
                now=now,
                random=self._random,
                failed=failed,
            )
        if self._versioned:
            found += messages(
                self._versioned,
                f"instance.{_VERSIONED_NAMES.get(event, event)}",
                versioned.instance_payload(event.partition(".")[0], row, context, fault, details),
                publisher=f"nova-{source}:{host}",
                context=context,
                now=now,
                random=self._random,
                failed=failed,
            )
        return found

    def _announce(self, context: Context, make: Callable[[], Announcement], now: int) -> list[Message]:
        made = make()
        found: list[Message] = []
        if self._unversioned and made.old_event:
            publisher = made.old_publisher
            found += messages(
                self._unversioned,
                made.old_event,
                made.old_payload,
                publisher=publisher if "." in publisher else f"{publisher}.{made.host or self._host}",
                context=context,
                now=now,
                random=self._random,
                failed=made.failed,
            )
        if self._versioned:
            found += messages(
                self._versioned,
                made.event,
                made.payload,
                publisher=f"{made.source}:{made.host or self._host}",
                context=context,
                now=now,
                random=self._random,
                failed=made.failed,
            )
        return found

    def _scheduler(self, context: Context, event: str, request: "SelectDestinations", now: int) -> list[Message]:
        spec, instances = request.spec, request.instance_uuids
        found: list[Message] = []
        if self._unversioned:
            found += messages(
                self._unversioned,
                event,
                unversioned.request_spec_payload(spec, instances),
                publisher=f"scheduler.{self._host}",
                context=context,
                now=now,
                random=self._random,
            )
        if self._versioned:
            found += messages(
                self._versioned,
                event,
                versioned.request_spec_payload(spec, instances),
                publisher=f"{SCHEDULER}:{self._host}",
                context=context,
                now=now,
                random=self._random,
            )
        return found


def on_change(
    notifier: Announcer, clock: Clock, *, with_task_states: bool, period: str
) -> "Callable[[InstanceChange], None]":
    """Return the watcher of a database that sends instance.update of each change, in the present audit period."""

    def watch(change: "InstanceChange") -> None:
        states = change.before
        if states.vm_state == change.row["vm_state"] and not with_task_states:
            states = states._replace(task_state=change.row["task_state"])  # as if it had not changed
        now = micros(clock.now())
        present = usage.Period(usage.last_completed(period, now).end, now)
        before = usage.Before(*states)
        notifier.announce(change.context, partial(usage.update, before, change.row, change.context, present))

    return watch


def make_notifier(settings: Settings, *, host: str, clock: Clock, random: Random) -> ProcessNotifier:
    """Return the notifier for the settings; without a broker or a format it is one that discards everything."""
    options = settings.notifications
    url = options.transport_url or settings.default.transport_url
    wanted = options.notification_format
    if wanted == "none" or url.startswith(("local:", "unix:")):
        return NoNotifications()
    from micronova.notifications.publisher import Publisher

    return BusNotifier(
        Publisher(url, settings.default.control_exchange, clock=clock, random=random, name=host),
        host=host,
        clock=clock,
        random=random,
        unversioned_topics=options.topics if wanted in ("unversioned", "both") else (),
        versioned_topics=options.versioned_notifications_topics if wanted in ("versioned", "both") else (),
    )
