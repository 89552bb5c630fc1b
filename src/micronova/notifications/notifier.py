"""Tells the world what happens to servers: in Nova's formats, to whoever listens with oslo.messaging.

`make_notifier` gives what a role needs. All methods return at once and never fail; what they are given is encoded
later, and only if somebody listens.
"""

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from micronova.conf.settings import Settings
from micronova.notifications import unversioned, versioned
from micronova.notifications.envelope import Message, messages
from micronova.objects.clock import Clock, micros
from micronova.rpc.contract import Context

if TYPE_CHECKING:
    from micronova.notifications.publisher import Publisher
    from micronova.scheduler.rpcapi import SelectDestinations


class NoNotifications:
    """Sends nothing."""

    def instance(
        self, event: str, row: Mapping[str, Any], *, context: Context, fault: dict[str, Any] | None = None
    ) -> None:
        """Drop it."""

    def scheduler(self, context: Context, event: str, request: "SelectDestinations") -> None:
        """Drop it."""

    def counts(self) -> dict[str, int]:
        """Say what became of notifications so far, for metrics."""
        return {}

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""


class Notifier(NoNotifications):
    """Sends notifications in the formats that have topics."""

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
        """Begin to publish."""
        await self.publisher.start()

    async def stop(self) -> None:
        """Publish what waits, if that is quickly done."""
        await self.publisher.stop()

    def instance(
        self, event: str, row: Mapping[str, Any], *, context: Context, fault: dict[str, Any] | None = None
    ) -> None:
        """Tell of `instance.EVENT`, such as create.start."""
        self.publisher.put(partial(self._instance, event, row, context, fault, micros(self._clock.now())))

    def scheduler(self, context: Context, event: str, request: "SelectDestinations") -> None:
        """Tell of a decision that begins or has ended."""
        self.publisher.put(partial(self._scheduler, context, event, request, micros(self._clock.now())))

    def counts(self) -> dict[str, int]:
        """Say what became of notifications so far: messages sent, and what was dropped or had no listener."""
        made = self.publisher
        return {"sent": made.sent, "dropped": made.dropped, "unheard": made.unheard}

    def _instance(
        self, event: str, row: Mapping[str, Any], context: Context, fault: dict[str, Any] | None, now: int
    ) -> list[Message]:
        if event == "delete.end":
            row = {**row, "vm_state": "deleted", "task_state": None, "terminated_at": now, "deleted_at": now}
        # The host's own agent sends nothing: it has no rights at the broker beyond its orders.
        source, host = ("compute", row["host"]) if row["host"] else ("conductor", self._host)
        failed = event.endswith(".error")
        found: list[Message] = []
        if self._unversioned:
            found += messages(
                self._unversioned,
                f"compute.instance.{event}",
                unversioned.instance_payload(event, row, fault),
                publisher=f"{source}.{host}",
                context=context,
                now=now,
                random=self._random,
                failed=failed,
            )
        if self._versioned:
            found += messages(
                self._versioned,
                f"instance.{event}",
                versioned.instance_payload(event.partition(".")[0], row, context, fault),
                publisher=f"nova-{source}:{host}",
                context=context,
                now=now,
                random=self._random,
                failed=failed,
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
                publisher=f"nova-scheduler:{self._host}",
                context=context,
                now=now,
                random=self._random,
            )
        return found


def make_notifier(settings: Settings, *, host: str, clock: Clock, random: Random) -> NoNotifications:
    """Make what the settings ask for; without a broker, or without a format, nothing is sent and nothing imported."""
    options = settings.notifications
    url = options.transport_url or settings.default.transport_url
    wanted = options.notification_format
    if wanted == "none" or url.startswith("local:"):
        return NoNotifications()
    from micronova.notifications.publisher import Publisher

    return Notifier(
        Publisher(url, settings.default.control_exchange, clock=clock, random=random, name=host),
        host=host,
        clock=clock,
        random=random,
        unversioned_topics=options.topics if wanted in ("unversioned", "both") else (),
        versioned_topics=options.versioned_notifications_topics if wanted in ("versioned", "both") else (),
    )
