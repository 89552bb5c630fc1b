"""The traits of compute nodes that follow their services, and not their hosts."""

from pathlib import Path

import sqlalchemy as sa

from micronova.db import node_reports, providers, services, tables
from micronova.db.engine import open_database
from micronova.objects.orders import NodeResources
from micronova.objects.service_names import COMPUTE
from tests.unit.scheduler.rows import make_tables

UUID = "11111111-1111-4111-8111-111111111111"
DISABLED = "COMPUTE_STATUS_DISABLED"
EVERY = ("COMPUTE_NODE", "OWNER_NOVA")  # every compute node has these


def _report(conn: sa.Connection, *traits: str, uuid: str = UUID) -> set[str]:
    node = NodeResources(
        node=uuid,
        node_uuid=uuid,
        hypervisor_type="fake",
        hypervisor_version=1,
        vcpus=4,
        memory_mb=4096,
        local_gb=40,
        traits=traits,
    )
    node_reports.record(conn, {"h": [node]}, 1)
    return _traits(conn, uuid)


def _traits(conn: sa.Connection, uuid: str = UUID) -> set[str]:
    return providers.traits_of(conn, [uuid]).get(uuid, set())


def _set_disabled(conn: sa.Connection, disabled: bool) -> set[str]:
    services.update(conn, services.service_uuid(COMPUTE, "h"), {"disabled": disabled}, 3)
    return _traits(conn)


async def test_nodes_follow_their_service(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db")
    await make_tables(database)

    def follow(conn: sa.Connection) -> None:
        assert _report(conn, "HW_GPU_API_VULKAN") == {*EVERY, "HW_GPU_API_VULKAN"}
        services.heartbeat(conn, COMPUTE, ["h", "other"], 2)
        assert _set_disabled(conn, True) == {*EVERY, "HW_GPU_API_VULKAN", DISABLED}
        assert _report(conn) == {*EVERY, DISABLED}
        # Another node of the host has it from its start; one of another host has it not, whatever its host says.
        assert DISABLED in _report(conn, uuid=UUID.replace("1", "2"))
        assert _set_disabled(conn, False) == set(EVERY)
        assert _report(conn, DISABLED) == set(EVERY)
        assert _traits(conn, UUID.replace("1", "2")) == set(EVERY)

    await database.write(follow)
    await database.close()


async def test_traits_that_a_host_reports_stay_whatever_a_client_sets(tmp_path: Path) -> None:
    """One `openstack resource provider trait set` took them away for good; Nova puts them back."""
    database = open_database(f"sqlite:///{tmp_path}/a.db")
    await make_tables(database)

    def change(conn: sa.Connection) -> None:
        reported = {*EVERY, "HW_GPU_API_VULKAN"}
        _report(conn, "HW_GPU_API_VULKAN")
        services.heartbeat(conn, COMPUTE, ["h"], 2)
        _set_disabled(conn, True)
        providers.set_traits(conn, UUID, {"CUSTOM_GOLD"})
        assert _traits(conn) == {*reported, "CUSTOM_GOLD", DISABLED}
        providers.set_traits(conn, UUID, set())
        assert _traits(conn) == {*reported, DISABLED}
        assert _set_disabled(conn, False) == reported
        # What an earlier version has taken away comes with the next report.
        providers.change_traits(conn, added=(), removed=[(UUID, "HW_GPU_API_VULKAN")])
        assert _report(conn, "HW_GPU_API_VULKAN") == reported

    await database.write(change)
    await database.close()


async def test_a_report_mends_what_another_version_has_left_out(tmp_path: Path) -> None:
    """A version that knows no such trait may disable and enable services meanwhile."""
    database = open_database(f"sqlite:///{tmp_path}/a.db")
    await make_tables(database)

    def mend(conn: sa.Connection) -> None:
        _report(conn)
        services.heartbeat(conn, COMPUTE, ["h"], 2)
        conn.execute(sa.update(tables.services).values(disabled=True))
        assert _report(conn) == {*EVERY, DISABLED}
        conn.execute(sa.update(tables.services).values(disabled=False))
        assert _report(conn) == set(EVERY)

    await database.write(mend)
    await database.close()


async def test_a_removed_host_is_disabled_until_it_is_added_again(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db")
    await make_tables(database)

    def remove(conn: sa.Connection) -> None:
        _report(conn)
        services.heartbeat(conn, COMPUTE, ["h"], 2)
        services.register_host_user(conn, "h", 3)
        assert _traits(conn) == set(EVERY)
        services.forget_host_user(conn, "h", 4)
        assert _traits(conn) == {*EVERY, DISABLED}
        services.register_host_user(conn, "h", 5)
        assert _traits(conn) == set(EVERY)
        # Disabled for another reason, it stays so.
        _set_disabled(conn, True)
        services.register_host_user(conn, "h", 6)
        assert DISABLED in _traits(conn)

    await database.write(remove)
    await database.close()
