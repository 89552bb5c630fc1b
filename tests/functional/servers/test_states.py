"""The API refuses exactly the actions that Nova refuses, in every state."""

import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.conductor.operations.engine import Engine
from micronova.db.tables import instances, operations
from micronova.objects import states
from micronova.servers import interfaces
from tests.functional.cloud import ON_CLUSTER, Caller, Cloud, CloudOptions, SeparateProcesses, only_in_one_process

CLOUD = CloudOptions(hosts=2)  # the tests write states into the database

BODIES: dict[str, Any] = {
    "start": {"os-start": None},
    "stop": {"os-stop": None},
    "reboot": {"reboot": {"type": "SOFT"}},
    "reboot_hard": {"reboot": {"type": "HARD"}},
    "pause": {"pause": None},
    "unpause": {"unpause": None},
    "suspend": {"suspend": None},
    "resume": {"resume": None},
}
# The vm states and the task states in which Nova allows an action.
NOVA: dict[str, tuple[set[str], set[str | None]]] = {
    "start": ({"stopped"}, {None}),
    "stop": ({"active", "error"}, {None}),
    "reboot": ({"active"}, {None}),
    "reboot_hard": (
        {"active", "stopped", "paused", "suspended", "error"},
        {None, "rebooting", "rebooting_hard", "pausing", "unpausing", "suspending", "resuming"}
        | {"reboot_pending", "reboot_started"},
    ),
    "pause": ({"active"}, {None}),
    "unpause": ({"paused"}, {None}),
    "suspend": ({"active"}, {None}),
    "resume": ({"suspended"}, {None}),
    "attach_interface": ({"active", "paused", "stopped"}, {None}),
    "detach_interface": ({"active", "paused", "stopped"}, {None}),
}
VIF = {"port_id": "p", "network_label": "n", "mac_address": "m", "fixed_ips": []}
TASKS: tuple[str | None, ...] = (
    None, "scheduling", "spawning", "powering-on", "powering-off", "rebooting", "rebooting_hard", "pausing",
    "unpausing", "suspending", "resuming", "attaching_interface", "detaching_interface", "deleting", "resize_prep",
    "migrating",
)  # fmt: skip
T = TypeVar("T")
Place = tuple[str, str | None, str | None]  # vm state, task state and host
PLACES: list[Place] = list(itertools.product(states.VM_STATES, TASKS, ("a-host", None)))


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
    id = (await user.boot())["id"]
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
    assert set(BODIES) == set(NOVA) - {"attach_interface", "detach_interface"}
    assert {action.task_state for action in states.ACTIONS.values()} <= set(TASKS)


def _refusal(name: str, vm_state: str, task: str | None, host: str | None) -> str | None:
    """Return the end of the message with which Nova refuses the action, or None if Nova allows it."""
    vm_states, tasks = NOVA[name]
    if vm_state not in vm_states:
        return f"while it is in vm_state {vm_state}"
    if task not in tasks:
        return f"while it is in task_state {task}"
    return None if host else "while it has no host"


def _some(combinations: Sequence[T]) -> Sequence[T]:
    """Return all, or on separate processes, where a request costs more, every seventh: each state occurs among them."""
    return combinations[:: 7 if ON_CLUSTER else 1]


@pytest.mark.parametrize("name", BODIES)
async def test_every_action_in_every_state(cloud: Cloud, user: Caller, server: str, name: str) -> None:
    action = states.ACTIONS[name]
    allowed = [place for place in PLACES if _refusal(name, *place) is None]
    for vm_state, task, host in (*_some(PLACES), *allowed):
        await _put(cloud, server, vm_state, task, host)
        answer = await user.request("POST", f"/servers/{server}/action", BODIES[name])
        reason = _refusal(name, vm_state, task, host)
        where = f"{name} in {vm_state}/{task} on {host}"
        if reason is None:
            assert answer.status == 202, where
            [operation] = await cloud.open_operations()
            assert (await user.show(server))["OS-EXT-STS:task_state"] == action.task_state, where
            await _forget(cloud, operation.id)
        else:
            assert answer.status == 409, where
            assert reason in answer.json()["conflictingRequest"]["message"], where
            assert not await cloud.open_operations(), where


@only_in_one_process("has no network service, and the API does not wait for the end of an attach")
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
        answer = await user.request("DELETE", f"{path}/p")
        assert answer.status == (409 if refused else 202), where
        for operation in await cloud.open_operations():
            assert (await user.show(server))["OS-EXT-STS:task_state"] == "detaching_interface"
            await _forget(cloud, operation.id)
    await _put(cloud, server, "active", None, "a-host", network_info=[])


async def test_delete_is_never_refused(cloud: Cloud, user: Caller, server: str) -> None:
    for vm_state, task, host in _some(PLACES):
        await _put(cloud, server, vm_state, task, host)
        await user.delete(f"/servers/{server}")
        opened = await cloud.open_operations()
        assert len(opened) == (0 if task == "deleting" else 1), "one that is being deleted is as asked"
        for operation in opened:
            await _forget(cloud, operation.id)


@pytest.mark.parametrize("vm_state", states.VM_STATES)
async def test_the_status_of_every_state_is_found_by_it(cloud: Cloud, user: Caller, server: str, vm_state: str) -> None:
    """A filter by status finds the states for which the table shows it."""
    tried = _some(list(itertools.product(states.VM_STATES, TASKS)))
    for task in (task for each, task in tried if each == vm_state):
        await _put(cloud, server, vm_state, task, "a-host")
        status = (await user.show(server))["status"]
        assert status == states.status(vm_state, task)
        if status == "DELETED":
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
