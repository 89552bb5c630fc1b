"""Checks that a host sends messages only in its own name, and few at once: the broker says who sent a message."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from micronova.db import services
from micronova.db.engine import Database
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden, Unavailable

MOST_IN_PROGRESS = 100
"""Messages of one host, except heartbeats, that a conductor works on at once; the host repeats the others later."""


class HostUsers:
    """Knows which hosts have, or had, a broker user of their own."""

    def __init__(self, database: Database, *, required: bool, own: Mapping[str, str] | None = None) -> None:
        """With `required`, every host must have a user, made by `micronova host add`.

        `own` are hosts that need no such user, because this process knows who sends their messages
        (rpc/unix/gate.py), each with its console address.
        """
        self._own = dict(own or {})
        self._database = database
        self._required = required
        self._names: frozenset[str] = frozenset(self._own)  # with those that were removed
        self._removed: frozenset[str] = frozenset()
        self._mark: services.HostUsersMark | None = None
        self._in_progress: Counter[str] = Counter()  # messages, by host

    async def refresh(self) -> None:
        """Read them from the database, if they have changed."""
        mark, names = await self._database.read(services.host_users_unless, self._mark)
        if names is not None:
            self._mark = mark
            self._names = names.registered | names.removed | frozenset(self._own)
            self._removed = names.removed - frozenset(self._own)

    async def console_address(self, host: str) -> str | None:
        """Return the only address at which proxies may look for a host's consoles; None for the one that it reports.

        The address is "" for a host without a registered one, and for a host that was removed. A host that uses the
        broker user of the control services, such as that of a one-process cloud, reports its own.
        """
        if host in self._own:
            return self._own[host]
        found = await self._database.read(services.console_address, host)
        return "" if found is None and self._required else found

    def check(self, context: Context, host: str) -> None:
        """Raise Forbidden if the sender may not send messages of the host, or the host was removed."""
        sender = context.sender
        if sender != host and (self._required or {sender, host} & self._names):
            raise Forbidden(f"{sender or 'An unknown user'} may not send messages of host {host}.")
        if host in self._removed or (self._required and host not in self._names):
            raise Forbidden(f"Host {host} is not one of this cloud's: `micronova host add {host}` makes it one.")

    @contextlib.contextmanager
    def one_message_of(self, host: str) -> Iterator[None]:
        """Raise Unavailable if too many messages of the host are in progress: it must not crowd out others."""
        if self._in_progress[host] >= MOST_IN_PROGRESS:
            raise Unavailable(f"{MOST_IN_PROGRESS} messages of host {host} are in progress: repeat it later.")
        self._in_progress[host] += 1
        try:
            yield
        finally:
            self._in_progress[host] -= 1
            if not self._in_progress[host]:
                del self._in_progress[host]
