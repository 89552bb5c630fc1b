"""Keys for hosts, at the conductor: it is the one that knows who asks, because the broker says so."""

from micronova.conductor.host_users import HostUsers
from micronova.conductor.rpcapi import HostQuestion
from micronova.http.host_keys import HostKeyring
from micronova.objects.clock import Clock
from micronova.objects.host_keys import HostKeys
from micronova.rpc.contract import Context


class HostKeyDesk:
    """Handles the messages of hosts that need keys."""

    def __init__(self, users: HostUsers, keyring: HostKeyring, clock: Clock) -> None:
        self._users = users
        self._keyring = keyring
        self._clock = clock

    async def host_keys(self, context: Context, params: HostQuestion) -> HostKeys:
        """Give a host its keys, and nobody else's; who was added or removed just now counts."""
        await self._users.refresh()
        self._users.check(context, params.host)
        return self._keyring.issue(params.host, self._clock.now())
