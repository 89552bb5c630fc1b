"""The conductor: runs durable operations, hears hosts, and hands their orders out again."""

import asyncio
import logging
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.compute import states
from micronova.conductor import audit, boots
from micronova.conductor.build import Build
from micronova.conductor.consoles import Consoles
from micronova.conductor.delete import Delete
from micronova.conductor.host_keys import HostKeyDesk
from micronova.conductor.host_users import HostUsers
from micronova.conductor.interfaces import AttachInterface, DetachInterface
from micronova.conductor.kinds import HOST, Continue, Ended, HostKind, Tools
from micronova.conductor.operations import Engine, Operation
from micronova.conductor.power import Power
from micronova.conductor.rpcapi import CONSOLE, KEYS, TASKS, GuestEvent, Operations, ReportReply
from micronova.conductor.rpcapi import HOST as HOST_INTERFACE
from micronova.db import instances, nodes, services
from micronova.db import operations as rows
from micronova.objects.clock import micros
from micronova.objects.errors import Unavailable
from micronova.objects.orders import Departed, Heartbeat, HeartbeatReply, HostBeat, HostReply, Report, WorkOrder
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Context
from micronova.rpc.server import Server
from micronova.scheduler.rpcapi import SchedulerAPI

log = logging.getLogger(__name__)

MEND_INTERVAL = 300.0
JUST_SENT = 1_000_000  # microseconds: an order this young is still on its way and is not sent again


class ConductorManager:
    """A role: the server end of the conductor's messages."""

    def __init__(
        self,
        *,
        bus: Bus,
        tools: Tools,
        host: str,
        report_interval: float,
        ratios: dict[str, float],
        max_attempts: int,
        host_users: HostUsers,
        host_keys: HostKeyDesk,
    ) -> None:
        self._bus = bus
        self._tools = tools
        self.engine: Engine = tools.engine
        self._host = host
        self._report_interval = report_interval
        self._ratios = ratios
        self._consoles = Consoles(self.engine.database, tools.compute, self.engine.clock)
        self._host_users = host_users
        self._host_keys = host_keys
        self._servers: list[Server] = []
        self._loops: list[asyncio.Task[None]] = []
        self._kinds: dict[str, HostKind] = {}
        for kind in (
            Build(tools, SchedulerAPI(bus), max_attempts),
            Delete(tools),
            Power(tools, "stop", "compute_stop_instance"),
            Power(tools, "start", "compute_start_instance"),
            Power(tools, "reboot", "compute_reboot_instance"),
            Power(tools, "pause", "compute_pause_instance"),
            Power(tools, "unpause", "compute_unpause_instance"),
            Power(tools, "suspend", "compute_suspend_instance"),
            Power(tools, "resume", "compute_resume_instance"),
            AttachInterface(tools),
            DetachInterface(tools),
        ):
            self._kinds[kind.name] = kind
            self.engine.add(kind)

    async def start(self) -> None:
        """Serve messages and sweep."""
        await self._host_users.refresh()
        await self.engine.start()
        self._servers = [
            await self._bus.serve(TASKS, self),
            await self._bus.serve(HOST_INTERFACE, self),
            await self._bus.serve(CONSOLE, self._consoles),
            await self._bus.serve(KEYS, self._host_keys),
        ]
        self._loops = [
            asyncio.create_task(self._beat_forever(), name="conductor-heartbeat"),
            asyncio.create_task(self._mend_forever(), name="conductor-mend"),
            asyncio.create_task(self._consoles.purge_forever(), name="conductor-consoles"),
        ]

    async def stop(self) -> None:
        """Stop serving and give the leases back."""
        for loop in self._loops:
            loop.cancel()
        for server in self._servers:
            await server.stop()
        await self.engine.stop()

    async def _beat_forever(self) -> None:
        while True:
            try:
                now = self.engine.now()
                await self.engine.database.write(services.heartbeat, "nova-conductor", [self._host], now)
                await self._host_users.refresh()
            except Exception as error:
                log.warning("heartbeat: %s", error)
            await self.engine.clock.sleep(self._report_interval)

    async def _mend_forever(self) -> None:
        while True:
            await self.engine.clock.sleep(MEND_INTERVAL)
            try:
                for what in await self.engine.database.write(audit.mend, self.engine.now()):
                    log.warning("mended: %s", what)
            except Exception as error:
                log.warning("mending: %s", error)

    # --- messages from the API -------------------------------------------------------------------------------

    async def build_instances(self, context: Context, params: Operations) -> None:
        """Build the instances of these operations."""
        await self.engine.take(params.ids)

    async def run_operations(self, context: Context, params: Operations) -> None:
        """Run these operations."""
        await self.engine.take(params.ids)

    # --- messages from hosts ---------------------------------------------------------------------------------

    async def report(self, context: Context, params: Report) -> ReportReply:
        """Take the end of an order: refuse it if it is stale, else finish or continue the operation."""
        self._host_users.check(context, params.host)
        found = await self._database(self._report, params)
        if found is None:
            return ReportReply(accepted=False)
        kind, operation, result = found
        for event, row, fault in result.events:
            kind.notify(event, operation, row, fault)
        if isinstance(result, Continue):
            self.engine.stepped(kind.name, result.operation.step)
            self.engine.run([result.operation])
            return ReportReply(accepted=True)
        if result.built:
            for _, row, _ in result.events:
                self._tools.hooks.post("build_instance", row, operation.context, row)
        return ReportReply(accepted=result.accepted, destroy=result.destroy)

    def _report(self, conn: sa.Connection, report: Report) -> tuple[HostKind, Operation, Continue | Ended] | None:
        row = rows.get(conn, report.operation_id)
        if row is None:
            # Purged long ago, or never ours: the guest of a build goes if the instance is not on this host.
            return None
        kind = self._kinds[row["kind"]]
        return kind, Operation.of(row), kind.apply_report(conn, row, report)

    async def heartbeat(self, context: Context, params: Heartbeat) -> HeartbeatReply:
        """Renew the leases of what hosts have in hand; tell them what they should have and do not."""
        for beat in params.hosts:
            self._host_users.check(context, beat.host)
        now = self.engine.clock.now()  # before the transaction looks: orders issued earlier are in the reply
        replies, given_back = await self._database(self._heartbeat, params)
        for operation in given_back:
            self.engine.stepped(operation.kind, operation.step)
            self.engine.run([operation])
        hosts = [await self._with_plugs(host) for host in replies]
        return HeartbeatReply(hosts=tuple(hosts), now=now)

    async def _with_plugs(self, reply: HostReply) -> HostReply:
        """An agent that gets an order again may have missed events: wait only for what is not plugged yet."""
        networks = self._tools.networks
        if networks is None or not any(order.wait_for_plugs for order in reply.orders):
            return reply
        orders = []
        for order in reply.orders:
            if order.wait_for_plugs:
                try:
                    found = await networks.network_info(order.instance.uuid)
                except Unavailable:
                    continue  # the next heartbeat asks again
                waiting = tuple(vif.port_id for vif in found if vif.status != "ACTIVE")
                order = msgspec.structs.replace(order, wait_for_plugs=waiting, network_info=found)
            orders.append(order)
        return msgspec.structs.replace(reply, orders=tuple(orders))

    def _heartbeat(self, conn: sa.Connection, params: Heartbeat) -> tuple[list[HostReply], list[Operation]]:
        now, until = self.engine.now(), self.engine.until()
        names = [beat.host for beat in params.hosts]
        alive = [beat.host for beat in params.hosts if not beat.stopping]
        services.heartbeat(conn, "nova-compute", alive, now)
        stopping = [beat.host for beat in params.hosts if beat.stopping]
        # Who says goodbye is down at once: no scheduler need wait to find out.
        services.heartbeat(conn, "nova-compute", stopping, now - micros(self._tools.service_down_time) - 1)
        owned: dict[str, list[Any]] = {}
        for row in rows.owned(conn, [HOST + name for name in names]):
            owned.setdefault(row["owner"], []).append(row)
        leaving: dict[str, list[Departed]] = {}
        for row in rows.departures_of(conn, names):
            leaving.setdefault(row["host"], []).append(Departed(row["instance_uuid"], row["epoch"]))
        boots_again = boots.hear(conn, params.hosts, now)
        known = nodes.hosts_with_nodes(conn, names)
        replies = [
            self._beat_of(
                conn, beat, owned.get(HOST + beat.host, []), leaving.get(beat.host, []), until, beat.host in known
            )
            for beat in params.hosts
        ]
        if boots_again:
            replies = [msgspec.structs.replace(each, boots_again=boots_again.get(each.host, ())) for each in replies]
        return replies, self._goodbye(conn, [row for host in stopping for row in owned.get(HOST + host, [])])

    def _goodbye(self, conn: sa.Connection, owned: list[Any]) -> list[Operation]:
        """Take from hosts that stop what can go on without them; the rest they get again when they come back."""
        taken = []
        for row in sorted(owned, key=lambda row: str(row["instance_uuid"])):  # the order in which all lock
            kind = self._kinds.get(row["kind"])
            if kind is not None and row["version"] <= kind.version:
                result = kind.host_stops(conn, Operation.of(row))
                if result is not None:
                    taken.append(result.operation)
        return taken

    def _beat_of(
        self, conn: sa.Connection, beat: HostBeat, owned: list[Any], leaving: list[Departed], until: int, known: bool
    ) -> HostReply:
        if beat.nodes:
            nodes.upsert(conn, beat.host, beat.nodes, self.engine.now(), ratios=self._ratios)
        for gone in beat.departed:
            rows.departed(conn, beat.host, gone.instance_uuid, gone.epoch)
        for change in beat.power_changes:
            self._power_change(conn, beat.host, change.instance_uuid, change.epoch, change.power_state)
        if beat.stopping:
            return HostReply(host=beat.host)
        in_hand = {each.operation_id: each.epoch for each in beat.in_hand}
        mine = {row["id"]: row for row in owned}
        rows.renew_of_host(conn, list(mine), HOST + beat.host, self.engine.now(), until)
        missing = [row for id, row in mine.items() if in_hand.get(id) != row["epoch"]]
        orders = [order for row in missing if (order := self._order_again(conn, row)) is not None]
        acknowledged = {(gone.instance_uuid, gone.epoch) for gone in beat.departed}
        return HostReply(
            host=beat.host,
            orders=tuple(orders),
            drop=tuple(id for id, epoch in in_hand.items() if id not in mine and _overtaken(conn, id, epoch)),
            departures=tuple(each for each in leaving if (each.instance_uuid, each.epoch) not in acknowledged),
            resend_nodes=not known and not beat.nodes,
        )

    def _order_again(self, conn: sa.Connection, row: Any) -> WorkOrder | None:
        operation = Operation.of(row)
        instance = instances.get(conn, operation.instance_uuid)
        if instance is None or instance["host"] is None or instance["epoch"] != operation.epoch:
            return None
        if operation.deadline < self.engine.now() or instance["updated_at"] > self.engine.now() - JUST_SENT:
            return None
        return self._kinds[operation.kind].order(conn, operation, instance)

    async def guest_event(self, context: Context, params: GuestEvent) -> None:
        """A guest changed by itself: show it, unless an operation is at work on the server."""
        self._host_users.check(context, params.host)
        await self._database(self._power_change, params.host, params.instance_uuid, params.epoch, params.power_state)

    def _power_change(self, conn: sa.Connection, host: str, uuid: str, epoch: int, power_state: int) -> None:
        row = instances.get(conn, uuid)
        if row is None or row["host"] != host or row["epoch"] < epoch:
            return
        if row["task_state"] is not None and row["task_state"] not in states.CHANGES_INTERFACES:
            return
        if row["power_state"] == power_state:
            return
        values = {"power_state": power_state, "vm_state": states.seen(row["vm_state"], power_state)}
        instances.update(conn, row["uuid"], self.engine.now(), values, epoch=row["epoch"])

    async def _database(self, fn: Any, *args: Any) -> Any:
        try:
            return await self.engine.database.write(fn, *args)
        except Unavailable:
            self.engine.disturbed()
            raise


def _overtaken(conn: sa.Connection, id: str, epoch: int) -> bool:
    """Say whether a host works on something that is no longer its own; one that just ended well is not that."""
    row = rows.get(conn, id)
    return row is None or row["epoch"] != epoch or row["result"] in ("cancelled", "error")
