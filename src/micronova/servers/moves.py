"""Resize, cold migration, their confirmation and their revert, evacuation: the checks, and the transaction of each.

A request is accepted when its transaction is committed: the server's task state, the migration, the claims, the quota,
the instance action and the operation together.
"""

from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.db import allocations, instances, nodes, quotas, server_migrations, services
from micronova.db.secrets import Secrets
from micronova.notifications.notifier import API
from micronova.objects import migration_states, states
from micronova.objects.block_device import resized
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Conflict, Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.ids import new_uuid
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import EvacuatePayload, MovePayload, ResizedPayload
from micronova.servers.action_recorder import ActionRecorder
from micronova.servers.actions import check_lock, check_state
from micronova.servers.create_rules import check_disk_config, check_flavor_fits, check_hardware, make_password
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.lookups import check_host, flavor_for, host_exists
from micronova.servers.waiting import wait_for_operation

TYPES = {
    "resize": migration_states.RESIZE,
    "migrate": migration_states.MIGRATION,
    "live_migrate": migration_states.LIVE_MIGRATION,
}
"""Kind of the operation -> type of its migration."""


CHECKS: Final = ("schedule", "prep")
"""Steps of a move in which hosts are chosen and checked."""


class ServerMoves:
    """Accepts moves of servers."""

    def __init__(self, dependencies: RequestDependencies, *, allow_resize_to_same_host: bool) -> None:
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._conductor = dependencies.conductor
        self._notifier = dependencies.notifier
        self._unsupported = dependencies.unsupported
        self._quota_defaults = dependencies.quota_defaults
        self._recorder = ActionRecorder(dependencies)
        self._service_down_time = dependencies.service_down_time
        self._same_host = allow_resize_to_same_host

    async def resize(
        self, context: RequestContext, row: InstanceRow, flavor_id: str, disk_config: str | None = None
    ) -> None:
        """Accept a resize to another flavor."""
        check_lock(context, row)
        check_state(states.ACTIONS["resize"], row)
        flavor = await self._database.read(self._flavor, context, row, flavor_id)
        image = msgspec.convert(row["image"], ImageMeta) if row["image"] else None
        if disk_config is not None:
            check_disk_config(disk_config, image)
        self._unsupported.check_flavor(flavor, image)
        if image is not None:
            check_flavor_fits(image, flavor)
        check_hardware(flavor, image)
        self._unsupported.check_devices(flavor, image)
        await self._begin(context, row, "resize", flavor, MovePayload(migration="", disk_config=disk_config))

    async def migrate(self, context: RequestContext, row: InstanceRow, host: str | None = None) -> None:
        """Accept a cold migration, to this host if one is named."""
        check_lock(context, row)
        check_state(states.ACTIONS["migrate"], row)
        flavor = msgspec.convert(row["flavor"], Flavor)
        await self._begin(context, row, "migrate", flavor, MovePayload(migration="", requested_host=host))

    async def live_migrate(
        self,
        context: RequestContext,
        row: InstanceRow,
        host: str | None = None,
        *,
        forced: bool = False,
        answers_after_checks: bool = False,
    ) -> None:
        """Accept a live migration, to this host if one is named; with `forced` no filter checks that host.

        With `answers_after_checks`, return when hosts have been checked; raise Invalid if none can take the server.
        """
        check_lock(context, row)
        check_state(states.ACTIONS["live_migrate"], row)
        flavor = msgspec.convert(row["flavor"], Flavor)
        payload = MovePayload(
            migration="",
            requested_host=host,
            forced=forced and host is not None,
            answers_after_checks=answers_after_checks,
        )
        operation = await self._begin(context, row, "live_migrate", flavor, payload)
        if answers_after_checks:
            await self._wait_for_checks(row["uuid"], operation)

    async def _wait_for_checks(self, id: str, operation: str) -> None:
        late = f"The hosts of instance {id} do not answer: look at its migrations later."
        found = await wait_for_operation(self._database, self._clock, operation, late, CHECKS)
        if found is not None and found["result"] == "cancelled":
            raise Conflict(f"Instance {id} was not migrated: a later request took its place.")
        if found is None or found["result"] != "error":
            return
        row = await self._database.read(instances.get, id)
        fault = None if row is None else row["fault"]
        raise Invalid("No host could take the server." if fault is None else fault["message"])

    async def confirm(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept the confirmation of a resize."""
        await self._end(context, row, "confirm_resize")

    async def revert(self, context: RequestContext, row: InstanceRow) -> None:
        """Accept the revert of a resize."""
        await self._end(context, row, "revert_resize")

    async def evacuate(
        self,
        context: RequestContext,
        row: InstanceRow,
        *,
        host: str | None,
        forced: bool,
        password: str | None,
        stops: bool,
    ) -> str:
        """Accept the evacuation of a server from a host that is down; return its admin password.

        A lock does not protect from it. With `stops`, a server that was active is stopped when it is built.
        """
        password = password or make_password(self._random)
        operations = await self._database.write(
            self._record_evacuation, context, row["uuid"], host, forced, Secrets(admin_password=password), stops
        )
        self._notifier.instance("evacuate", row, context=context.for_bus(), sender=API)
        await self._conductor.run_operations(context.for_bus(), operations)
        return password

    def _record_evacuation(
        self,
        conn: sa.Connection,
        context: RequestContext,
        id: str,
        host: str | None,
        forced: bool,
        secrets: Secrets,
        stops: bool,
    ) -> tuple[str, ...]:
        now = micros(self._clock.now())
        row = instances.lock_existing(conn, id)
        action = states.ACTIONS["evacuate"]
        check_state(action, row)
        assert row["host"] is not None
        if host is not None and not host_exists(conn, host):
            raise NotFound(f"Compute host {host} not found.")
        if host == row["host"]:
            raise Invalid("The target host can't be the same one.")
        self._check_lost(conn, row["host"], now)
        server_migrations.check_last_copy(conn, row, now, self._service_down_time)
        marks = row["task_state"] is None
        payload = EvacuatePayload(
            migration=new_uuid(self._random),
            requested_host=host,
            forced=forced and host is not None,
            stops=row["vm_state"] == states.STOPPED or (stops and row["vm_state"] != states.ERROR),
            marked=marks,
        )
        # What works on the server goes on until a conductor knows that the host is lost.
        changes: InstanceChanges = {"task_state": action.task_state} if marks else {}
        return self._recorder.record(conn, context, row, "evacuate", changes, payload, secrets=secrets, overtakes=False)

    def _check_lost(self, conn: sa.Connection, host: str, now: int) -> None:
        """Raise Invalid if a host is not lost, as far as the API can tell; a conductor asks again."""
        if services.host_is_up(conn, host, now, self._service_down_time):
            raise Invalid(f"Compute service of {host} is still in use.")
        if not services.host_is_lost(conn, host, now, self._service_down_time):
            raise Invalid(
                f"Compute service of {host} was just stopped and may return: try again in "
                f"{self._service_down_time:g} s, or force the service down if the host is lost."
            )

    # --- resize and migrate ----------------------------------------------------------------------------------

    def _flavor(self, conn: sa.Connection, context: RequestContext, row: InstanceRow, flavor_id: str) -> Flavor:
        """Return the flavor of a resize; raise Invalid if the server cannot get it."""
        flavor = flavor_for(conn, context, flavor_id, present=row["flavor_id"])
        if flavor.id == row["flavor_id"]:
            raise Invalid("When resizing, instances must change flavor!")
        if row["image_ref"] is not None and flavor.disk == 0 and row["flavor"]["disk"] != 0:
            raise Invalid("Server disk was unable to be resized because: Resize to zero disk flavor is not allowed.")
        return msgspec.structs.replace(flavor, root_on_volume=row["flavor"].get("root_on_volume", False))

    async def _begin(
        self, context: RequestContext, row: InstanceRow, kind: str, flavor: Flavor, payload: MovePayload
    ) -> str:
        """Accept a move; return its operation."""
        operations = await self._database.write(self._record, context, row["uuid"], kind, flavor, payload)
        await self._conductor.run_operations(context.for_bus(), operations)
        return operations[0]

    def _record(
        self, conn: sa.Connection, context: RequestContext, id: str, kind: str, flavor: Flavor, payload: MovePayload
    ) -> tuple[str, ...]:
        now = micros(self._clock.now())
        row = instances.lock_existing(conn, id)
        action = states.ACTIONS[kind]
        check_state(action, row)
        if payload.requested_host is not None:
            check_host(conn, payload.requested_host)
        if kind != "live_migrate":  # of which a conductor checks this, as in Nova
            self._check_up(conn, row["host"], now)
            if payload.requested_host == row["host"]:
                raise Invalid("Cannot migrate to the host where the server exists.")
        payload = msgspec.structs.replace(payload, migration=new_uuid(self._random))
        migration = server_migrations.new_row(
            context.for_bus(),
            row,
            msgspec.to_builtins(flavor),
            uuid=payload.migration,
            migration_type=TYPES[kind],
            status=migration_states.ACCEPTED if kind == "live_migrate" else migration_states.PRE_MIGRATING,
            destination=payload.requested_host,
            now=now,
        )
        self._choose_hosts(conn, row, kind, payload)
        changes: InstanceChanges = {"task_state": action.task_state, "progress": 0}
        operations = self._recorder.record(conn, context, row, kind, changes, payload, step="schedule")
        server_migrations.insert(conn, migration)
        allocations.hand_over(conn, id, holder=migration["uuid"])
        if kind == "resize":
            limits = quotas.limits_for(conn, row["project_id"], self._quota_defaults, row["user_id"])
            growth = server_migrations.quota_held(row["flavor"], migration)
            quotas.charge(conn, row["project_id"], growth, limits, row["user_id"])
        return operations

    def _check_up(self, conn: sa.Connection, host: str | None, now: int) -> None:
        if host is None or not services.host_is_up(conn, host, now, self._service_down_time):
            raise Conflict("Service is unavailable at this time.")

    def _choose_hosts(self, conn: sa.Connection, row: InstanceRow, kind: str, payload: MovePayload) -> None:
        """Say in the payload which hosts may be the destination; raise Invalid if there can be none."""
        assert row["host"] is not None
        if kind == "resize" and self._same_host:
            if nodes.lacks(conn, row["node_uuid"], "resize"):
                payload.excluded = [row["host"]]
            elif nodes.lacks(conn, row["node_uuid"], "migrate"):
                payload.requested_host = row["host"]
        else:
            payload.excluded = [row["host"]]
        needed = "live_migrate" if kind == "live_migrate" else "migrate"
        if payload.excluded and nodes.lacks(conn, row["node_uuid"], needed):
            hint = " and allow_resize_to_same_host is off" if kind == "resize" else ""
            refused = f"Cannot '{states.ACTIONS[kind].shown_name}' instance {row['uuid']}"
            raise Invalid(f"{refused}: its host cannot send servers to other hosts{hint}.")

    # --- confirm and revert ----------------------------------------------------------------------------------

    async def _end(self, context: RequestContext, row: InstanceRow, kind: str) -> None:
        check_lock(context, row)
        operations = await self._database.write(self._record_end, context, row["uuid"], kind)
        await self._conductor.run_operations(context.for_bus(), operations)

    def _record_end(self, conn: sa.Connection, context: RequestContext, id: str, kind: str) -> tuple[str, ...]:
        now = micros(self._clock.now())
        row = instances.lock_existing(conn, id)
        check_state(states.ACTIONS[kind], row)
        migration = server_migrations.open_of(conn, id)
        if migration is None or migration["status"] != migration_states.FINISHED:
            raise Invalid("Instance has not been resized.")
        # Each removes one of two guests. The host of the other one has to be up: that guest is all that is left.
        payload = ResizedPayload(migration=migration["uuid"])
        if kind == "confirm_resize":
            self._check_up(conn, migration["source_compute"], now)
            if row["host"] is None or not services.host_is_up(conn, row["host"], now, self._service_down_time):
                raise Conflict(
                    "The server's host does not answer, and a confirmation would remove the other copy of its disks: "
                    "revert the resize, or confirm it when the host is back."
                )
            confirming: InstanceChanges = {"task_state": states.ACTIONS[kind].task_state}
            operations = self._recorder.record(conn, context, row, kind, confirming, payload)
            server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.CONFIRMING})
            return operations
        if not services.host_is_up(conn, migration["source_compute"], now, self._service_down_time):
            raise Conflict(
                "The host that the server would return to does not answer: revert the resize when it is back. "
                "The server stays as it is."
            )
        changes: InstanceChanges = {
            "task_state": states.RESIZE_REVERTING,
            "host": migration["source_compute"],
            "node": migration["source_node"],
            "node_uuid": migration["source_node_uuid"],
            "availability_zone": migration["source_zone"],
            "flavor_id": migration["old_flavor"]["id"],
            "flavor": migration["old_flavor"],
        }
        payload.destination = {name: row[name] for name in ("host", "node", "node_uuid", "availability_zone")}
        operations = self._recorder.record(conn, context, row, kind, changes, payload)
        old, new = (msgspec.convert(migration[key], Flavor) for key in ("old_flavor", "new_flavor"))
        instances.set_flavor(conn, id, old)
        instances.replace_devices(conn, id, resized(instances.devices_of(conn, id), id, new, old))
        server_migrations.update(conn, migration["uuid"], now, {"status": migration_states.REVERTING})
        return operations
