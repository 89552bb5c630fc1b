"""Fills the database of a cloud with hosts and servers, by copies of one real server that PostgreSQL makes itself."""

from collections.abc import Mapping

import asyncpg
import sqlalchemy as sa

from micronova.db import tables
from tests.perf.fleet_agents import FULL_DISK, host_name, node_uuid

PROJECTS = 1_000
CHUNK = 100_000
DAY = 86_400_000_000  # microseconds


class Filler:
    """Adds rows; everything is like the template, a server that is ACTIVE, except for what is named."""

    def __init__(self, connection: asyncpg.Connection, template: str) -> None:
        self._connection = connection
        self._template = template

    async def hosts(self, first: int, last: int) -> None:
        """Add hosts with their services and nodes, which are full as soon as they have FULL_DISK servers each."""
        numbers = list(range(first, last))
        await self._connection.execute("CREATE TEMP TABLE fleet (number int, host text, node text)")
        await self._connection.copy_records_to_table(
            "fleet", records=[(number, host_name(number), node_uuid(number)) for number in numbers]
        )
        base = "(SELECT coalesce(max(id), 0) FROM {table})"
        await self._copy(
            tables.services,
            "FROM fleet, (SELECT * FROM services s WHERE s.\"binary\" = 'nova-compute' LIMIT 1) t",
            {"uuid": "md5('s' || number)", "host": "fleet.host", "id": base.format(table="services") + " + number + 1"},
        )
        await self._copy(
            tables.compute_nodes,
            "FROM fleet, (SELECT * FROM compute_nodes LIMIT 1) t",
            {
                "uuid": "node",
                "host": "fleet.host",
                "hypervisor_hostname": "fleet.host",
                "id": base.format(table="compute_nodes") + " + number + 1",
            },
        )
        await self._copy(
            tables.inventories,
            "FROM fleet, inventories t WHERE t.node_uuid = (SELECT uuid FROM compute_nodes ORDER BY id LIMIT 1)",
            {"node_uuid": "node", "used": "0"},
        )
        await self._connection.execute(
            "UPDATE inventories i SET total = $1, capacity = $1 FROM fleet"
            " WHERE i.node_uuid = fleet.node AND resource_class = 'DISK_GB'",
            FULL_DISK,
        )

    async def living(self, count: int) -> None:
        """Add servers that run on the hosts that were added, with all that belongs to them."""
        hosts = await self._connection.fetchval("SELECT count(*) FROM fleet")
        first = await self._connection.fetchval("SELECT min(number) FROM fleet")
        if count > hosts * FULL_DISK:
            raise ValueError(f"{hosts} hosts take {hosts * FULL_DISK} servers, not {count}")
        for begin in range(0, count, CHUNK):
            number = f"(SELECT n FROM generate_series({begin}, {min(begin + CHUNK, count) - 1}) n) AS s"
            place = f"JOIN fleet ON fleet.number = {first} + s.n % {hosts}"
            key, source = self._key("n", "l"), f"FROM {number} {place}, {self._one('instances', 'uuid')}"
            await self._copy(
                tables.instances,
                source,
                {
                    **self._owner("n"),
                    "uuid": key,
                    "host": "fleet.host",
                    "node": "fleet.host",
                    "node_uuid": "fleet.node",
                },
            )
            of = f"FROM {number}, "
            await self._copy(
                tables.request_specs, of + self._one("request_specs", "instance_uuid"), {"instance_uuid": key}
            )
            await self._copy(
                tables.allocations,
                f"FROM {number} {place}, {self._one('allocations', 'consumer_uuid')}",
                {"consumer_uuid": key, "node_uuid": "fleet.node"},
            )
            await self._copy(
                tables.operations,
                of + self._one("operations", "instance_uuid"),
                {"id": self._key("n", "o"), "instance_uuid": key, "batch_id": "'r-' || n"},
            )
            await self._actions(number, key, "create")
        await self._connection.execute(
            "UPDATE inventories i SET used = a.used FROM (SELECT node_uuid, resource_class, sum(used)::int AS used FROM"
            " allocations GROUP BY 1, 2) a WHERE a.node_uuid = i.node_uuid AND a.resource_class = i.resource_class"
        )
        await self._connection.execute(
            "INSERT INTO quota_usages (project_id, user_id, resource, in_use)"
            " SELECT project_id, '', r.resource, sum(CASE r.resource WHEN 'instances' THEN 1 WHEN 'cores'"
            " THEN (flavor->>'vcpus')::int ELSE (flavor->>'ram')::int END)"
            " FROM instances, (VALUES ('instances'), ('cores'), ('ram')) r (resource)"
            " WHERE project_id LIKE 'fleet%' GROUP BY 1, 3"
        )

    async def deleted(self, count: int) -> None:
        """Add servers that were deleted in the course of a year, with their actions."""
        for begin in range(0, count, CHUNK):
            number = f"(SELECT n FROM generate_series({begin}, {min(begin + CHUNK, count) - 1}) n) AS s"
            key = self._key("n", "d")
            gone = f"(t.created_at - n::bigint * {365 * DAY // max(count, 1)})"
            await self._copy(
                tables.deleted_instances,
                f"FROM {number}, {self._one('instances', 'uuid')}",
                {
                    **self._owner("n"),
                    "uuid": key,
                    "vm_state": "'deleted'",
                    "power_state": "0",
                    "created_at": f"{gone} - {DAY}",
                    "updated_at": gone,
                    "terminated_at": gone,
                    "deleted_at": gone,
                },
            )
            await self._actions(number, key, "create")
            await self._actions(number, key, "delete")

    async def vacuum(self) -> None:
        """Do what autovacuum and the checkpointer would do later, while something is measured."""
        await self._connection.execute("VACUUM (ANALYZE)")
        await self._connection.execute("CHECKPOINT")

    async def _actions(self, number: str, key: str, action: str) -> None:
        request = self._key("n", action)
        await self._copy(
            tables.instance_actions,
            f"FROM {number}, {self._one('instance_actions', 'instance_uuid')}",
            {"request_id": f"'req-' || {request}", "instance_uuid": key, "action": f"'{action}'"},
        )
        await self._copy(
            tables.instance_action_events,
            f"FROM {number}, {self._one('instance_action_events', 'instance_uuid')}",
            {"request_id": f"'req-' || {request}", "instance_uuid": key},
        )

    def _one(self, table: str, column: str) -> str:
        return f"(SELECT * FROM {table} WHERE {column} = '{self._template}') t"

    @staticmethod
    def _key(number: str, kind: str) -> str:
        return f"md5('{kind}' || {number})::uuid::text"

    @staticmethod
    def _owner(number: str) -> dict[str, str]:
        return {
            "project_id": f"'fleet' || {number} % {PROJECTS}",
            "user_id": "'fleet'",
            "reservation_id": f"'r-' || {number}",
            "display_name": f"'fleet-' || {number}",
            "hostname": f"'fleet-' || {number}",
            "created_at": f"t.created_at - {number}::bigint * 100000",
        }

    async def _copy(self, table: sa.Table, source: str, values: Mapping[str, str]) -> None:
        names = [column.name for column in table.c]
        columns = ", ".join(f'"{name}"' for name in names)
        expressions = ", ".join(values.get(name, f't."{name}"') for name in names)
        await self._connection.execute(f"INSERT INTO {table.name} ({columns}) SELECT {expressions} {source}")
