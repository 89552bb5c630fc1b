"""The synthetic fleet as rows of the database, which a scheduler reads when it starts."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from micronova.db import tables
from micronova.db.engine import open_database
from micronova.objects.clock import micros
from micronova.objects.service_names import COMPUTE
from micronova.objects.topology import CellUse, HostCell, MemoryPages, NodeTopology, TopologyUse, encode
from tests.perf.scheduler import fleet

_AT_ONCE = 2_000  # hosts

Progress = Callable[[int], None]


def topology_texts(host: Mapping[str, Any]) -> tuple[str, str]:
    """Return a host's NUMA cells, and what is held of them, as they are stored."""
    cells = tuple(
        HostCell(
            id=cell["id"],
            memory_mb=cell["memory_mb"],
            shared=tuple(cell["shared"]),
            dedicated=tuple(cell["dedicated"]),
            siblings=tuple(tuple(core) for core in cell["siblings"]),
            pages=tuple(MemoryPages(size_kib=size, total=total, reserved=kept) for size, total, kept in cell["pages"]),
            socket=cell["socket"],
        )
        for cell in host["cells"]
    )
    held = {
        id: CellUse(memory_mb=use["memory_mb"], pinned=tuple(use["pinned"]), pages=dict(use["pages"]))
        for id, use in host["held"].items()
        if use["memory_mb"]
    }
    return encode(NodeTopology(cells=cells, cpu_allocation_ratio=4.0)), encode(TopologyUse(cells=held))


async def fill(url: str, count: int, progress: Progress) -> None:
    """Make the tables of an empty database and add hosts."""
    database = open_database(url)
    try:
        await database.write(tables.metadata.create_all)
        made = fleet.hosts(count)
        aggregates: dict[str, int] = {}
        for first in range(0, count, _AT_ONCE):
            part = list(itertools.islice(made, _AT_ONCE))
            await database.write(_add, first, part, aggregates)
            aggregates |= _numbered(aggregates, part)
            progress(first + len(part))
    finally:
        await database.close()


def _numbered(known: Mapping[str, int], hosts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the ids of all aggregates, the known ones and those of the hosts."""
    found = dict(known)
    for host in hosts:
        for name, _ in host["aggregates"]:
            found.setdefault(name, len(found) + 1)
    return found


def _add(conn: sa.Connection, first: int, hosts: list[dict[str, Any]], known: Mapping[str, int]) -> None:
    now = micros(fleet.NOW)
    ids = _numbered(known, hosts)
    metadata = {name: properties for host in hosts for name, properties in host["aggregates"]}

    def insert(table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
        if listed := list(rows):
            conn.execute(table.insert(), listed)

    insert(
        tables.services,
        (
            {
                "uuid": f"s{host['node_uuid'][1:]}",
                "id": number,
                "host": host["host"],
                "binary": COMPUTE,
                "last_seen_at": micros(host["last_seen"]),
                "created_at": now,
            }
            for number, host in enumerate(hosts, first + 1)
        ),
    )
    insert(tables.compute_nodes, (_node(number, host, now) for number, host in enumerate(hosts, first + 1)))
    insert(
        tables.inventories,
        (
            {
                "node_uuid": host["node_uuid"],
                "resource_class": name,
                "total": host["total"][name],
                "capacity": capacity,
                "used": host["used"][name],
                "changed_at": now,
            }
            for host in hosts
            for name, capacity in host["capacity"].items()
        ),
    )
    insert(
        tables.node_topologies,
        (
            dict(zip(("topology", "held"), topology_texts(host), strict=True))
            | {"node_uuid": host["node_uuid"], "changed_at": now}
            for host in hosts
        ),
    )
    insert(
        tables.provider_traits,
        ({"provider_uuid": host["node_uuid"], "trait": trait} for host in hosts for trait in host["traits"]),
    )
    insert(
        tables.aggregates,
        (
            {"id": id, "uuid": fleet.server_uuid(id), "name": name, "metadata": metadata[name], "created_at": now}
            for name, id in ids.items()
            if name not in known
        ),
    )
    insert(
        tables.aggregate_hosts,
        ({"aggregate_id": ids[name], "host": host["host"]} for host in hosts for name, _ in host["aggregates"]),
    )


def _node(number: int, host: Mapping[str, Any], now: int) -> dict[str, Any]:
    same = ("host", "hypervisor_type", "hypervisor_version", "host_ip", "cpu_info", "supported", "capabilities")
    return {name: host[name] for name in (*same, "failed_builds", "metrics")} | {
        "uuid": host["node_uuid"],
        "id": number,
        "hypervisor_hostname": host["node"],
        "running_vms": host["num_instances"],
        "current_workload": host["num_io_ops"],
        "created_at": now,
        "changed_at": now,
    }
