"""Changing the password of a server's administrator. The caller waits until the guest has taken it."""

from collections.abc import Awaitable, Callable

from micronova.db.engine import Database
from micronova.db.secrets import Secrets
from micronova.objects import states
from micronova.objects.clock import Clock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, NotSupported, OperationFailed
from micronova.objects.instance import InstanceRow
from micronova.objects.operations import PasswordPayload
from micronova.servers.actions import ServerActions, check_lock, check_state
from micronova.servers.waiting import wait_for_operation

KIND = "change_password"
TIMEOUT = 120.0
"""Seconds after which the operation fails: the caller waits, and a host may lack something for the moment."""


class AdminPasswords:
    """Changes passwords in guests."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        actions: ServerActions,
        check_host: Callable[[InstanceRow], Awaitable[None]],
    ) -> None:
        """`check_host` raises Unavailable if the host of a server does not answer."""
        self._database = database
        self._clock = clock
        self._actions = actions
        self._check_host = check_host

    async def change(self, context: RequestContext, row: InstanceRow, password: str) -> None:
        """Set a password; return when the guest has taken it."""
        action = states.ACTIONS[KIND]
        check_lock(context, row)
        check_state(action, row)
        await self._check_host(row)
        uuid = row["uuid"]
        secrets = Secrets(admin_password=password)
        payload = PasswordPayload(action=KIND)
        operation = await self._actions.begin(context, row, KIND, action, payload, secrets=secrets, timeout=TIMEOUT)
        late = f"The password of instance {uuid} is still being changed: look at its actions later."
        found = await wait_for_operation(self._database, self._clock, operation, late)
        if found is None:
            raise OperationFailed(f"What became of the new password of instance {uuid} is not known any more.")
        if found["result"] == "cancelled":
            raise Conflict(f"The password of instance {uuid} was not changed: a later request took its place.")
        if found["result"] == "error":
            known = PasswordPayload.decode(found["payload"])
            refused = NotSupported if known.error_code == NotSupported.code else Conflict
            raise refused(f"Failed to set admin password on {uuid} because {known.error}")
