"""Issues the keys with which a host proves itself to other services; the broker says which host asks."""

from micronova.conductor.host_users import HostUsers
from micronova.conductor.rpcapi import HostKeysRequest
from micronova.http.host_keys import HostKeyring
from micronova.objects.clock import Clock
from micronova.objects.context import Context
from micronova.objects.host_keys import HostKeys


class HostKeyIssuer:
    """Handles the messages of hosts that need keys."""

    def __init__(self, users: HostUsers, keyring: HostKeyring, clock: Clock) -> None:
        self._users = users
        self._keyring = keyring
        self._clock = clock

    async def host_keys(self, context: Context, request: HostKeysRequest) -> HostKeys:
        """Return the keys of the host that asks; hosts are re-read first, so that one just removed gets none."""
        with self._users.one_message_of(context.sender):  # whether it is that host is not known yet
            await self._users.refresh()
            self._users.check(context, request.host)
            return self._keyring.issue(request.host, self._clock.now())
