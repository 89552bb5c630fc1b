"""Tells that a service has registered."""

from functools import partial

from micronova.db import services
from micronova.db.engine import Database
from micronova.notifications import resources
from micronova.notifications.notifier import Announcer
from micronova.objects.context import Context


async def announce(database: Database, notifier: Announcer, binary: str, host: str) -> None:
    """Send service.create about the service of a host."""
    if notifier.enabled:
        row = await database.read(services.find, host, binary)
        notifier.announce(Context(), partial(resources.service, "create", row))
