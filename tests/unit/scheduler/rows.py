"""Rows of a small cloud, for tests that claim."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from micronova.db import tables
from micronova.db.claims import Claim
from micronova.db.engine import Database
from micronova.objects.scheduling import GroupSpec

CAPACITY = {"VCPU": 4, "MEMORY_MB": 4096, "DISK_GB": 40}
SMALL = {"VCPU": 1, "MEMORY_MB": 1024, "DISK_GB": 10}


async def make_tables(database: Database) -> None:
    """Make the schema."""
    await database.write(_make_tables)


def _make_tables(conn: sa.Connection) -> None:
    tables.metadata.create_all(conn)


def add_host(
    conn: sa.Connection,
    name: str,
    number: int,
    capacity: Mapping[str, int] = CAPACITY,
    now: int = 1,
    **node: Any,
) -> None:
    """Add a compute host with its service, node (uuid: `node-NAME`) and inventory."""
    conn.execute(
        tables.services.insert(),
        {
            "uuid": f"service-{name}",
            "id": number,
            "host": name,
            "binary": "nova-compute",
            "disabled": False,
            "forced_down": False,
            "last_seen_at": now,
            "created_at": now,
        },
    )
    fields: dict[str, Any] = {
        "uuid": f"node-{name}",
        "id": number,
        "host": name,
        "hypervisor_hostname": name,
        "hypervisor_type": "fake",
        "hypervisor_version": 1000,
        "host_ip": "127.0.0.1",
        "created_at": now,
        "changed_at": now,
    }
    conn.execute(tables.compute_nodes.insert(), fields | node)
    conn.execute(
        tables.inventories.insert(),
        [
            {
                "node_uuid": f"node-{name}",
                "resource_class": resource_class,
                "total": amount,
                "capacity": amount,
                "changed_at": now,
            }
            for resource_class, amount in capacity.items()
        ],
    )


def add_instances(conn: sa.Connection, *uuids: str, epoch: int = 1, group: str | None = None) -> None:
    """Add instances that are being built."""
    conn.execute(
        tables.instances.insert(),
        [
            {
                "uuid": uuid,
                "project_id": "p",
                "user_id": "u",
                "reservation_id": "r",
                "display_name": uuid,
                "hostname": uuid,
                "vm_state": "building",
                "epoch": epoch,
                "flavor_id": "1",
                "flavor": {},
                "server_group_id": group,
                "created_at": 1,
                "updated_at": 1,
            }
            for uuid in uuids
        ],
    )


def add_group(conn: sa.Connection, uuid: str, policy: str) -> None:
    """Add a server group."""
    conn.execute(
        tables.server_groups.insert(),
        {"uuid": uuid, "project_id": "p", "user_id": "u", "name": uuid, "policy": policy, "created_at": 1},
    )


def a_claim(consumer: str, host: str, resources: Mapping[str, int] = SMALL, **changes: Any) -> Claim:
    """Make a claim on a host's node."""
    fields: dict[str, Any] = {"consumer_uuid": consumer, "node_uuid": f"node-{host}", "host": host}
    return Claim(**fields, resources=dict(resources), **changes)


def a_group(uuid: str, policy: str, most: int = 1) -> GroupSpec:
    """Make the group of a claim."""
    return GroupSpec(id=uuid, policy=policy, max_server_per_host=most)


def used(conn: sa.Connection, resource_class: str = "VCPU") -> dict[str, int]:
    """Give what is used of a resource class, by host."""
    i = tables.inventories.c
    rows = conn.execute(sa.select(i.node_uuid, i.used).where(i.resource_class == resource_class))
    return {node.removeprefix("node-"): amount for node, amount in rows}
