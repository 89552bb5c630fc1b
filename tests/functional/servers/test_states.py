"""The API refuses exactly the actions that Nova refuses, in every state."""

import asyncio
import contextlib
import itertools
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.conductor.operations.engine import Engine
from micronova.db import quotas
from micronova.db.tables import allocations, instances, migrations, operations
from micronova.objects import states
from micronova.servers import interfaces
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud, CloudOptions, SeparateProcesses, only_in_one_process
from tests.functional.servers.embedded_services import image, ok

CLOUD = CloudOptions(hosts=2, roles=("image",))  # the tests write states into the database

OWN_IMAGE = "the server's"
BODIES: dict[str, Any] = {
    "start": {"os-start": None},
    "stop": {"os-stop": None},
    "reboot": {"reboot": {"type": "SOFT"}},
    "reboot_hard": {"reboot": {"type": "HARD"}},
    "pause": {"pause": None},
    "unpause": {"unpause": None},
    "suspend": {"suspend": None},
    "resume": {"resume": None},
    "create_image": {"createImage": {"name": "i"}},
    "create_backup": {"createBackup": {"name": "b", "backup_type": "daily", "rotation": 1}},
    "rescue": {"rescue": {}},
    "unrescue": {"unrescue": None},
    "trigger_crash_dump": {"trigger_crash_dump": None},
    "rebuild": {"rebuild": {"imageRef": OWN_IMAGE}},
    "restore": {"restore": None},
    "resize": {"resize": {"flavorRef": "2"}},
    "migrate": {"migrate": None},
    "confirm_resize": {"confirmResize": None},
    "revert_resize": {"revertResize": None},
    "evacuate": {"evacuate": {}},
    "shelve": {"shelve": None},
    "shelve_offload": {"shelveOffload": None},
    "unshelve": {"unshelve": None},
    "live_migrate": {"os-migrateLive": {"host": None, "block_migration": "auto"}},
}
# The vm states and the task states in which Nova allows an action.
NOVA: dict[str, tuple[set[str], set[str | None]]] = {
    "start": ({"stopped"}, {None}),
    "stop": ({"active", "error"}, {None}),
    "reboot": ({"active"}, {None}),
    "reboot_hard": (
        {"active", "stopped", "paused", "suspended", "error"},
        {None, "rebooting", "rebooting_hard", "pausing", "unpausing", "suspending", "resuming"}
        | {"reboot_pending", "reboot_started"}
        | {"triggering_crash_dump"},  # where Nova has no task state
    ),
    "pause": ({"active"}, {None}),
    "unpause": ({"paused"}, {None}),
    "suspend": ({"active"}, {None}),
    "resume": ({"suspended"}, {None}),
    "rescue": ({"active", "stopped", "error"}, {None}),
    "unrescue": ({"rescued"}, {None}),
    "change_password": ({"active"}, {None}),
    "trigger_crash_dump": ({"active", "paused", "rescued", "resized", "error"}, {None}),
    "rebuild": ({"active", "stopped", "error"}, {None}),
    "restore": ({"soft-delete"}, {None}),
    "attach_interface": ({"active", "paused", "stopped"}, {None}),
    "detach_interface": ({"active", "paused", "stopped"}, {None}),
    **dict.fromkeys(
        ("attach_volume", "detach_volume"),
        ({"active", "paused", "stopped", "resized", "soft-delete", "shelved", "shelved_offloaded"}, {None}),
    ),
    "swap_volume": ({"active", "paused", "resized"}, {None}),
    "extend_volume": ({"active", "paused", "stopped"}, {None}),  # an event, for which Nova has no such table
    "create_image": ({"active", "paused", "stopped", "suspended"}, {None}),
    "create_backup": ({"active", "paused", "stopped", "suspended"}, {None}),
    "resize": ({"active", "stopped"}, {None}),
    "migrate": ({"active", "stopped"}, {None}),
    "live_migrate": ({"active", "paused"}, {None}),
    "confirm_resize": ({"resized"}, {None}),
    "revert_resize": ({"resized"}, {None}),
    "shelve": ({"active", "paused", "stopped", "suspended"}, {None}),
    "shelve_offload": ({"shelved"}, {None}),
    "unshelve": ({"shelved", "shelved_offloaded"}, {None}),
}
# The names in Nova's refusals, where they differ from ours.
LABELS = {
    "reboot_hard": "reboot",
    "change_password": "changePassword",
    "create_image": "createImage",
    "create_backup": "createBackup",
    "live_migrate": "os-migrateLive",
    "confirm_resize": "confirmResize",
    "revert_resize": "revertResize",
    "shelve_offload": "shelveOffload",
}
CHANGEABLE = {"active", "paused", "suspended", "stopped"}
MOVES = ("resize", "migrate", "confirm_resize", "revert_resize", "evacuate", "live_migrate")
BY_ADMINS = (*MOVES, "shelve_offload")
VIF = {"port_id": "p", "network_label": "n", "mac_address": "m", "fixed_ips": []}
TASKS: tuple[str | None, ...] = (
    None, "scheduling", "spawning", "powering-on", "powering-off", "rebooting", "rebooting_hard", "pausing",
    "unpausing", "suspending", "resuming", "rescuing", "unrescuing", "updating_password", "triggering_crash_dump",
    "attaching_interface", "detaching_interface", "attaching_volume", "detaching_volume", "extending_volume",
    "swapping_volume", "deleting", "resize_prep", "migrating", "image_snapshot_pending",
    "image_snapshot", "image_backup", "image_pending_upload", "image_uploading", "rebuilding",
    "rebuild_block_device_mapping", "rebuild_spawning", "soft-deleting", "restoring",
    "resize_migrating", "resize_migrated", "resize_finish", "resize_confirming", "resize_reverting",
    "shelving", "shelving_image_pending_upload", "shelving_image_uploading", "shelving_offloading", "unshelving",
)  # fmt: skip
# Nova would evacuate a server that is being deleted, too: there the delete and the evacuation race.
NOVA["evacuate"] = ({"active", "stopped", "error"}, set(TASKS) - {"deleting", "soft-deleting"})
VM_STATES = sorted({vm_state for status in states.STATUSES for vm_state, _, _ in states.states_of(status)})
T = TypeVar("T")
Place = tuple[str, str | None, str | None]  # vm state, task state and host
PLACES: list[Place] = list(itertools.product(VM_STATES, TASKS, ("a-host", None)))


@contextlib.contextmanager
def _no_conductors(cloud: Cloud) -> Iterator[None]:
    """Stop the conductors while the context is open: operations that are accepted do not run."""
    if isinstance(cloud, SeparateProcesses):
        conductors = [process for name, process in cloud.cluster.processes.items() if name.startswith("conductor")]
        for process in conductors:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in conductors:
                process.send_signal(signal.SIGCONT)
        return

    async def nothing(engine: Engine, ids: Sequence[str]) -> None:
        """Run no operation."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "lease_and_run", nothing)
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def server(cloud: Cloud, user: Caller) -> AsyncIterator[str]:
    """A server whose state the tests change; afterwards it is reset, so that it can be deleted."""
    id = (await user.boot(imageRef=await image(user)))["id"]
    home = await user.host_of(id)
    with _no_conductors(cloud):
        yield id
        await _put(cloud, id, "active", None, home)


async def _put(cloud: Cloud, id: str, vm_state: str, task: str | None, host: str | None, **more: Any) -> None:
    values = {"vm_state": vm_state, "task_state": task, "host": host, **more}
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(sa.update(instances).where(instances.c.uuid == id).values(**values))
    )


async def test_the_tables_cover_what_the_api_offers() -> None:
    assert set(NOVA) == set(states.ACTIONS)
    assert set(BODIES) == set(NOVA) - {
        "attach_interface",
        "detach_interface",
        "change_password",
        "attach_volume",
        "detach_volume",
        "extend_volume",
        "swap_volume",
    }
    assert {task for action in states.ACTIONS.values() for task in (action.task_state, *action.then)} <= set(TASKS)


def _refusal(name: str, vm_state: str, task: str | None, host: str | None) -> str | None:
    """Return the end of the message with which Nova refuses the action, or None if Nova allows it."""
    vm_states, tasks = NOVA[name]
    if vm_state not in vm_states:
        return f"while it is in vm_state {vm_state}"
    if task not in tasks:
        return f"while it is in task_state {task}"
    return None if host or vm_state == "shelved_offloaded" else "while it has no host"


def _some(combinations: Sequence[T]) -> Sequence[T]:
    """Return all, or on separate processes, where a request costs more, every seventh: each state occurs among them."""
    return combinations[:: 7 if ON_CLUSTER else 1]


async def _put_migration(cloud: Cloud, row: Any, status: str) -> None:
    """Write the migration of a server that was resized."""
    flavor = {"id": "1", "vcpus": 1, "ram": 512}
    values = {
        "uuid": str(uuid.uuid4()), "instance_uuid": row.uuid, "migration_type": "resize", "status": status,
        "source_compute": row.host, "source_node": row.node, "source_node_uuid": row.node_uuid,
        "dest_compute": row.host, "old_flavor": row.flavor, "new_flavor": {**row.flavor, **flavor},
        "old_vm_state": "active", "user_id": "u", "project_id": "p", "request_id": "r", "created_at": 1,
    }  # fmt: skip
    assert cloud.process.database is not None
    await cloud.process.database.write(lambda conn: conn.execute(migrations.insert().values(values)))


async def _forget_migrations(cloud: Cloud, id: str) -> None:
    assert cloud.process.database is not None
    await cloud.process.database.write(
        lambda conn: conn.execute(sa.delete(migrations).where(migrations.c.instance_uuid == id))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", BODIES)
async def test_every_action_in_every_state(cloud: Cloud, user: Caller, server: str, name: str) -> None:
    action = states.ACTIONS[name]
    allowed = [place for place in PLACES if _refusal(name, *place) is None]
    body = BODIES[name]
    if name == "rebuild":
        body = {"rebuild": {"imageRef": (await user.show(server))["image"]["id"]}}
    [made] = await cloud.read(sa.select(instances).where(instances.c.uuid == server))
    held = await cloud.read(sa.select(allocations).where(allocations.c.consumer_uuid == server))
    for vm_state, task, place in (*_some(PLACES), *allowed):
        # The source of a move must be up, that of an evacuation down.
        host = made.host if place and name in MOVES and name != "evacuate" else place
        await _put(cloud, server, vm_state, task, host)
        if name in MOVES:
            await _forget_migrations(cloud, server)
            if vm_state == "resized":
                await _put_migration(cloud, made, "finished")
        caller = user.admin if name in BY_ADMINS else user
        answer = await caller.request("POST", f"/servers/{server}/action", body)
        reason = _refusal(name, vm_state, task, host)
        where = f"{name} in {vm_state}/{task} on {host}"
        if reason is None:
            assert answer.status == {"confirm_resize": 204, "evacuate": 200, "rescue": 200}.get(name, 202), where
            [operation] = await cloud.open_operations()
            # Other work goes on until a conductor knows that the host is lost.
            shown = {action.task_state, task} if name == "evacuate" and task is not None else {action.task_state}
            assert (await user.show(server))["OS-EXT-STS:task_state"] in shown, where
            await _forget(cloud, operation.id)
            if name in ("create_image", "create_backup", "shelve"):
                await ok(user, "DELETE", f"/image/v2/images/{operation.id}")
        else:
            assert answer.status == 409, where
            told = f"Cannot '{LABELS.get(name, name)}' instance {server} {reason}"
            assert answer.json()["conflictingRequest"]["message"] == told, where
            assert not await cloud.open_operations(), where
    if name in MOVES:
        await _forget_migrations(cloud, server)
        await _put_back(cloud, made, held)


async def _put_back(cloud: Cloud, made: Any, held: Sequence[Any]) -> None:
    """Give a server its claim and its flavor back, which moves that never ran have taken, and count the quota."""
    assert cloud.process.database is not None

    def write(conn: sa.Connection) -> None:
        nodes = {row.node_uuid for row in held}
        conn.execute(sa.delete(allocations).where(allocations.c.node_uuid.in_(nodes)))
        conn.execute(allocations.insert(), [dict(row._mapping) for row in held])
        values = {"flavor_id": made.flavor_id, "flavor": made.flavor}
        conn.execute(sa.update(instances).where(instances.c.uuid == made.uuid).values(values))
        quotas.recount(conn, made.project_id)

    await cloud.process.database.write(write)


@pytest.mark.thorough
async def test_changes_of_the_password_in_every_state(cloud: Cloud, user: Caller, server: str) -> None:
    """The answer comes when the operation has ended: here it is cancelled."""
    body = {"changePassword": {"adminPass": "x"}}

    async def begun() -> Any:
        return (await cloud.open_operations()) or None

    home = (await user.admin.show(server))["OS-EXT-SRV-ATTR:host"]
    for vm_state, task, host in _some(PLACES):
        refused = _refusal("change_password", vm_state, task, host)
        refused = refused and f"Cannot 'changePassword' instance {server} {refused}"
        await _put(cloud, server, vm_state, task, home if host else None)
        asking = asyncio.ensure_future(user.request("POST", f"/servers/{server}/action", body))
        if refused is None:
            [operation] = await cloud.until(begun, "the operation")
            assert (await user.show(server))["OS-EXT-STS:task_state"] == "updating_password"
            await _forget(cloud, operation.id)
            refused = "a later request took its place"
        answer = await asking
        assert answer.status == 409, (vm_state, task, host)
        assert refused in answer.json()["conflictingRequest"]["message"], (vm_state, task, host)


@only_in_one_process("has no network service, and the API does not wait for the end of an attach")
@pytest.mark.thorough
async def test_interfaces_in_every_state(
    cloud: Cloud, user: Caller, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "WAIT", 0.0)
    path = f"/servers/{server}/os-interface"
    for vm_state, task, host in PLACES:
        await _put(cloud, server, vm_state, task, host, network_info=[VIF])
        refused = _refusal("attach_interface", vm_state, task, host)
        where = f"{vm_state}/{task} on {host}"
        answer = await user.request("POST", path, {"interfaceAttachment": {}})
        assert answer.status == (409 if refused else 501), where  # there is no network service here
        if refused:
            told = f"Cannot 'attach_interface' instance {server} {refused}"
            assert answer.json()["conflictingRequest"]["message"] == told, where
        answer = await user.request("DELETE", f"{path}/p")
        assert answer.status == (409 if refused else 202), where
        if refused:
            told = f"Cannot 'detach_interface' instance {server} {refused}"
            assert answer.json()["conflictingRequest"]["message"] == told, where
        for operation in await cloud.open_operations():
            assert (await user.show(server))["OS-EXT-STS:task_state"] == "detaching_interface"
            await _forget(cloud, operation.id)
    await _put(cloud, server, "active", None, "a-host", network_info=[])


async def test_names_of_actions_in_refusals(cloud: Cloud, user: Caller, server: str) -> None:
    await _put(cloud, server, "building", None, "a-host")
    for name, body in BODIES.items():
        if name == "rebuild":
            body = {"rebuild": {"imageRef": (await user.show(server))["image"]["id"]}}
        told = await user.admin.refused(409, "POST", f"/servers/{server}/action", body)
        assert told == f"Cannot '{LABELS.get(name, name)}' instance {server} while it is in vm_state building"


@pytest.mark.parametrize("vm_state", VM_STATES)
async def test_metadata_and_tags_in_every_state(cloud: Cloud, user: Caller, server: str, vm_state: str) -> None:
    path = f"/servers/{server}"
    await _put(cloud, server, vm_state, "powering-off", None, metadata={"k": "v"}, tags=["t"])
    changes: list[tuple[str, str, Any, str]] = [
        ("POST", "metadata", {"metadata": {"k": "v"}}, "update metadata"),
        ("PUT", "metadata", {"metadata": {"k": "v"}}, "update metadata"),
        ("PUT", "metadata/k", {"meta": {"k": "w"}}, "update metadata"),
        ("DELETE", "metadata/k", None, "delete metadata"),
        ("PUT", "tags/t", None, "update tag"),
        ("PUT", "tags", {"tags": ["t", "u"]}, "update tags"),
        ("DELETE", "tags/t", None, "delete tag"),
        ("DELETE", "tags", None, "delete tags"),
    ]
    for method, where, body, verb in changes:
        if vm_state in CHANGEABLE:  # and in every task state
            answer = await user.request(method, f"{path}/{where}", body)
            assert answer.status < 300, (method, where, answer.body)
        else:
            told = await user.refused(409, method, f"{path}/{where}", body)
            assert told == f"Cannot '{verb}' instance {server} while it is in vm_state {vm_state}"


@pytest.mark.thorough
async def test_delete_is_never_refused(cloud: Cloud, user: Caller, server: str) -> None:
    for vm_state, task, host in _some(PLACES):
        await _put(cloud, server, vm_state, task, host)
        await user.delete(f"/servers/{server}")
        opened = await cloud.open_operations()
        assert len(opened) == (0 if task == "deleting" else 1), "one that is being deleted is as asked"
        for operation in opened:
            await _forget(cloud, operation.id)


@pytest.mark.parametrize("vm_state", VM_STATES)
async def test_the_status_of_every_state_is_found_by_it(cloud: Cloud, user: Caller, server: str, vm_state: str) -> None:
    """A filter by status finds the states for which the table shows it."""
    tried = _some(list(itertools.product(VM_STATES, TASKS)))
    for task in (task for each, task in tried if each == vm_state):
        await _put(cloud, server, vm_state, task, "a-host")
        status = (await user.show(server))["status"]
        assert status == states.status(vm_state, task)
        if status in ("DELETED", "SOFT_DELETED"):  # lists leave them out
            continue
        for other in {"ACTIVE", "BUILD", "ERROR", "REBOOT", "HARD_REBOOT", "SHUTOFF", "RESIZE", status}:
            found = (await user.get(f"/servers?status={other}"))["servers"]
            assert [each["id"] for each in found] == ([server] if other == status else []), (vm_state, task, other)


async def _forget(cloud: Cloud, id: str) -> None:
    assert cloud.process.database is not None
    values = {"finished_at": 1, "result": "cancelled"}
    await cloud.process.database.write(
        lambda conn: conn.execute(sa.update(operations).where(operations.c.id == id).values(**values))
    )
