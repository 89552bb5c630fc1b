"""Rows that other roles would have written: hosts, nodes, servers, actions."""

import uuid
from typing import Any

import sqlalchemy as sa

from micronova.db import node_reports, services
from micronova.db.tables import deleted_instances, instances
from micronova.objects.clock import micros
from micronova.objects.orders import NodeResources
from tests.functional.api.resources import Cloud


async def add_host(cloud: Cloud, host: str, **more: Any) -> str:
    """Let a compute host report once; return its node's uuid."""
    node = str(uuid.uuid5(services.NAMESPACE, f"node {host}"))
    resources = {
        "node": f"{host}.example", "node_uuid": node, "hypervisor_type": "fake", "hypervisor_version": 2,
        "vcpus": 8, "memory_mb": 8192, "local_gb": 100, "reserved": {"MEMORY_MB": 512}, "cpu_info": {"arch": "x86_64"},
        "disk_available_gb": 90, **more,
    }  # fmt: skip
    now = micros(cloud.clock.now())
    await cloud.database.write(services.heartbeat, "nova-compute", [host], now)
    await cloud.database.write(node_reports.record, {host: [NodeResources(**resources)]}, now)
    return node


async def add_service(cloud: Cloud, binary: str, host: str) -> None:
    """Let another service report once."""
    await cloud.database.write(services.heartbeat, binary, [host], micros(cloud.clock.now()))


def server_row(cloud: Cloud, **more: Any) -> dict[str, Any]:
    """Return the least that a server's row has."""
    now = micros(cloud.clock.now())
    return {
        "uuid": str(uuid.uuid4()), "project_id": "red", "user_id": "ada", "reservation_id": "r-1",
        "display_name": "vm", "hostname": "vm", "vm_state": "active", "flavor_id": "1",
        "flavor": {"id": "1", "name": "f", "ram": 512, "vcpus": 1, "disk": 1, "ephemeral": 0},
        "created_at": now, "updated_at": now, **more,
    }  # fmt: skip


async def add_server(cloud: Cloud, **more: Any) -> str:
    """Put a server into the database; return its uuid."""
    row = server_row(cloud, **more)
    await cloud.database.write(lambda conn: conn.execute(sa.insert(instances).values(**row)))
    return str(row["uuid"])


async def add_deleted_server(cloud: Cloud, **more: Any) -> str:
    """Put a server that is no more into the history; return its uuid."""
    row = server_row(cloud, vm_state="deleted", deleted_at=micros(cloud.clock.now()), **more)
    await cloud.database.write(lambda conn: conn.execute(sa.insert(deleted_instances).values(**row)))
    return str(row["uuid"])
