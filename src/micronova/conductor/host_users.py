"""Hosts speak only for themselves: who sent a message is what the broker says, not what the message says."""

from micronova.db import services
from micronova.db.engine import Database
from micronova.objects.errors import Forbidden
from micronova.rpc.contract import Context


class HostUsers:
    """Knows which hosts have a broker user of their own."""

    def __init__(self, database: Database, *, required: bool) -> None:
        """`required`: every host must have one, made by `micronova host add`."""
        self._database = database
        self._required = required
        self._names: frozenset[str] = frozenset()

    async def refresh(self) -> None:
        """Look which there are."""
        self._names = await self._database.read(services.host_users)

    def check(self, context: Context, host: str) -> None:
        """Raise Forbidden if the sender may not speak for the host."""
        sender = context.sender
        if sender != host and (self._required or {sender, host} & self._names):
            raise Forbidden(f"{sender or 'Somebody unknown'} may not speak for host {host}.")
        if self._required and host not in self._names:
            raise Forbidden(f"Host {host} is not one of this cloud's: `micronova host add {host}` makes it one.")
