"""Recording an action on a server in the transaction that accepts its request."""

import sqlalchemy as sa

from micronova.db import operations as operation_rows
from micronova.db.secrets import Secrets
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.ids import new_uuid
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import Payload, Step
from micronova.servers.dependencies import RequestDependencies


class ActionRecorder:
    """Records an action that is accepted: the operation, the instance action and the change of the server."""

    def __init__(self, dependencies: RequestDependencies) -> None:
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._secrets = dependencies.secrets
        self._timeout = dependencies.operation_timeout

    def record(
        self,
        conn: sa.Connection,
        context: RequestContext,
        row: InstanceRow,
        kind: str,
        changes: InstanceChanges,
        payload: Payload | None,
        *,
        step: Step = "new",
        timeout: float | None = None,
        endless: bool = False,
        secrets: Secrets | None = None,
        operation_id: str | None = None,
        deferred_for: float = 0.0,
        overtakes: bool = True,
    ) -> tuple[str, ...]:
        """Record an action on a server, whose row is locked, and change the server.

        The operation begins at `step`. It fails if it has not ended after `timeout` seconds
        (`RequestDependencies.operation_timeout`), unless it is `endless`. `secrets` are stored encrypted until it ends.
        `operation_id` is its id, if the caller has made one. With `deferred_for`, no conductor takes it for that many
        seconds, or until `start_deferred`. `overtakes` is as in `accept_action`. Return the id of the operation, and
        the ids of earlier ones that a conductor has to end.
        """
        now = self._clock.now()
        id = operation_id or new_uuid(self._random)
        to_end = operation_rows.accept_action(
            conn,
            row,
            changes,
            id=id,
            kind=kind,
            context=context.for_bus(),
            payload=payload,
            now=micros(now),
            deadline=operation_rows.NO_DEADLINE if endless else micros(now + (timeout or self._timeout)),
            deferred_until=micros(now + deferred_for) if deferred_for else 0,
            step=step,
            secrets=None if secrets is None else self._secrets.seal(secrets, id),
            overtakes=overtakes,
        )
        return (id, *to_end)
