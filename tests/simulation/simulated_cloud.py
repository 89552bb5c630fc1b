"""A simulated cloud: one process with all roles that is started again after each crash, and its users' requests.

As in reality, the database and the guests of the hypervisors survive a crash. Messages in flight are lost with the
process.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.cli.audit import run_audit
from micronova.cli.names import COMPUTE_ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.compute.manager import ComputeManager
from micronova.conf.settings import load
from micronova.db.engine import Database
from micronova.db.tables import allocations, departures, instances, inventories, migrations, operations, topology_claims
from micronova.embedded.image.store import Upload
from micronova.embedded.image.tables import images, properties
from micronova.embedded.network.tables import addresses, ports
from micronova.embedded.volume.backend.files import DIRECTORIES
from micronova.http.client import Answer, ASGITransport
from micronova.objects import migration_states, power_state
from micronova.objects.topology import Assignment
from micronova.rpc.bus import Bus
from tests.simulation.database import InlineDatabase
from tests.simulation.faults import FaultPlan, FaultyBus, FaultyDatabase, ProcessRun, with_faults
from tests.simulation.loop import VirtualClock
from tests.simulation.volumes import Volumes, with_volume_faults

R = TypeVar("R")

IMAGE = "11111111-1111-4111-8111-111111111111"
COMPUTE, VOLUME = "/compute/v2.1", "/volume/v3"
PATIENCE = 900.0  # virtual seconds; what has not happened by then is stuck
HOSTS = 3
HOST_MEMORY = 512 + 4 * 4096  # what is reserved for the host, and four servers of the medium flavor
ADMIN_ACTIONS = frozenset(
    {
        "os-migrateLive",
        "migrate",
        "evacuate",
        "shelveOffload",
        "os-resetState",
        "injectNetworkInfo",
        "addFixedIp",
        "removeFixedIp",
    }
)
ADMIN_BODIES = ADMIN_ACTIONS | {
    "flavor",
    "extra_specs",
    "volume_type",
    "os-reimage",
    "os-reset_status",
    "os-force_delete",
}
OLD_ACTIONS = {
    **dict.fromkeys(("os-getVNCConsole", "os-getSPICEConsole", "os-getSerialConsole"), 5),
    **dict.fromkeys(("addFixedIp", "removeFixedIp", "addFloatingIp", "removeFloatingIp"), 43),
}
"""The last microversions of actions that newer ones do not have."""
REQUESTS = {
    "": {"POST": "create", "DELETE": "delete"},
    "os-interface": {"POST": "attach", "DELETE": "detach"},
    "os-volume_attachments": {"POST": "attach volume", "DELETE": "detach volume", "PUT": "swap volume"},
}
"""What requests are called that are not server actions, by the part of the path after the server and the method."""
DRIVER = (
    "info", "spawn", "destroy", "power_on", "power_off", "reboot", "pause", "unpause", "suspend", "resume",
    "rescue", "unrescue", "set_admin_password", "trigger_crash_dump", "attach_interface", "detach_interface",
    "snapshot", "quiesce", "unquiesce", "rebuild", "attach_volume", "detach_volume", "swap_volume", "extend_volume",
    "resize", "confirm_resize", "revert_resize", "export_disks", "import_guest",
    "check_live_migration", "live_migrate", "rollback_live_migration", "receive_live_guest",
    "get_console_output", "get_vnc_console", "get_serial_console",
)  # fmt: skip


class UnexpectedResult(AssertionError):
    """What a user asked for ended otherwise."""


class Refused(UnexpectedResult):
    """What a user asked for was refused; the message has the answer."""


class NotInTime(UnexpectedResult):
    """What a user waited for has not happened."""


class SimulatedProcess(Process):
    """A process that uses the databases of the simulation."""

    given: dict[str, Database]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uploads: list[Upload] = []

    async def open_database(self, name: str) -> Database:
        return self.given[name]

    def release_locks(self) -> None:
        """Release the locks of files, as the kernel does when a process ends."""
        if self._owner_lock is not None:
            self._owner_lock.close()
            self._owner_lock = None
        for upload in self.uploads:
            with contextlib.suppress(OSError):  # it has ended
                if os.path.samestat(os.fstat(upload._file), upload.path.stat()):  # else the number means another file
                    fcntl.flock(upload._file, fcntl.LOCK_UN)

    def watch_uploads(self) -> None:
        """Note the uploads to the image service, whose files are locked."""
        if "image" in self.embedded:
            store = self.embedded["image"]._store
            open_upload = store.open_upload

            async def noted(image_id: str, upload_id: str) -> Upload:
                self.uploads.append(await open_upload(image_id, upload_id))
                return self.uploads[-1]

            store.open_upload = noted  # type: ignore[method-assign]


def drivers_of(process: Process) -> list[Any]:
    """Return the drivers of the hosts of a process."""
    managers = [role for role in process.started if isinstance(role, ComputeManager)]
    return [agent.host.driver for manager in managers for agent in manager._agents.values()]


def request_headers(body: Any, *, admin: bool = False) -> dict[str, str]:
    """Return the headers of a user's request; an admin of the same project sends what only admins may do."""
    keys = body.keys() if isinstance(body, dict) else set()
    admin = admin or bool(keys & ADMIN_BODIES) or "host" in (body["server"] if "server" in keys else ())
    version = min((OLD_ACTIONS[key] for key in keys if key in OLD_ACTIONS), default=100)
    user = "admin" if admin else "user"
    headers = {"x-auth-token": f"{user}:project", "openstack-api-version": f"compute 2.{version}"}
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    return headers if body is None else {**headers, "content-type": kind}


def action_of(method: str, path: str, body: Any) -> str:
    """Return the action on a server, or on a volume that it has, that a request asks for, or ""."""
    collection, *rest = path.strip("/").split("/")
    if method == "GET":
        return ""
    if collection == "volumes" and rest[1:] == ["action"] and "os-extend" in body:
        return "extend volume"
    if collection != "servers":
        return ""
    if rest[1:] == ["action"]:
        return str(next(iter(body)))
    return REQUESTS[rest[1] if len(rest) > 1 else ""][method]


class SimulatedCloud:
    """The process of the cloud, what starts it again, its databases and its users."""

    patience = PATIENCE
    hosts = HOSTS

    def __init__(
        self,
        directory: Path,
        clock: VirtualClock,
        random: Random,
        fault_plan: FaultPlan,
        *,
        services: tuple[str, ...] = (),
        default: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the cloud; the process also has these embedded services: network, image, volume.

        `default` has settings of the section of this name.
        """
        self._default = default or {}
        self.asked: set[str] = set()  # the actions that were asked for
        self._hosts_here = HOSTS
        self.clock = clock
        self.fault_plan = fault_plan
        self._roles = [*COMPUTE_ROLES, *services]
        self.databases = {name: InlineDatabase() for name in ("compute", *services)}
        self.runs = 0
        self._directory = directory
        self._random = random
        self._process_run = ProcessRun()
        self._up = asyncio.Event()
        self._own: set[asyncio.Task[Any]] = set()  # tasks of the simulation itself, which no crash ends
        self._supervisors: list[asyncio.Task[None]] = []
        self._process: SimulatedProcess | None = None
        self._transport: ASGITransport | None = None
        self.volumes = Volumes(self.rows)
        self._run_twice: set[str] = set()  # servers whose guests ran on two hosts at the same time

    # --- the process -----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start the cloud and the task that starts it again after each crash."""
        mine = asyncio.current_task()
        assert mine is not None
        self._adopt(mine)
        self._supervisors.append(self._adopt(asyncio.create_task(self._supervise())))
        await self._up.wait()
        await self.until(self._all_up, "all hosts to be up")

    def spawn(self, scenario: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a scenario at the same time; a crash of the cloud does not end it."""
        return self._adopt(asyncio.create_task(scenario))

    async def end(self) -> None:
        """Stop the cloud and remove its databases."""
        assert self._process is not None
        await self._process.stop()
        for database in self.databases.values():
            database.dispose()

    def _adopt(self, task: "asyncio.Task[R]") -> "asyncio.Task[R]":
        self._own.add(task)
        return task

    async def _supervise(self) -> None:
        while True:
            self._process_run = ProcessRun()
            self.runs += 1
            starting = asyncio.create_task(self._start(self._process_run))
            if await self._first(starting) and not starting.exception():
                self._up.set()
                if await self._first(asyncio.create_task(self._process_run.stop_requested.wait())):
                    self._up.clear()
                    assert self._process is not None
                    await self._first(asyncio.create_task(self._process.stop()))
            # It was stopped, has crashed, or could not start: start it again, as a service manager does.
            self._process_run.ended.set()
            self._up.clear()
            await self._end_tasks()
            await self.clock.sleep(1.0)

    async def _first(self, task: "asyncio.Task[Any]") -> bool:
        """Wait until a task is done or the process has ended; return whether the task is done."""
        ended = self._adopt(asyncio.create_task(self._process_run.ended.wait()))
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        return task.done() and not task.cancelled()

    async def _start(self, process_run: ProcessRun) -> None:
        def wrap(bus: Bus) -> Bus:
            return FaultyBus(bus, process_run, self.fault_plan, self.clock)

        process = SimulatedProcess(
            load(
                environ={},
                default={
                    "host": "controller",
                    "transport_url": f"local://run-{self.runs}",
                    **self._default,
                },
                api={"auth_strategy": "noauth2"},
                quota={"instances": -1, "cores": -1, "ram": -1},
                fake={
                    "hosts": self._hosts_here,
                    "memory_mb": HOST_MEMORY,
                    "numa_nodes": 2,
                    "cpu_dedicated_set": "24-31,56-63",
                    "rules": [{"operation": "*", "kind": "delay", "delay": (0.0, 2.0)}],
                },
            ),
            self._roles,
            StateDirectory(self._directory),
            clock=self.clock,
            random=self._random,
            wrap_bus=wrap,
        )
        process.given = {
            name: FaultyDatabase(each, process_run, self.fault_plan) for name, each in self.databases.items()
        }
        self._process = process
        await process.start()
        process.watch_uploads()
        for driver in self.drivers():
            for name in DRIVER:
                call = with_faults(getattr(driver, name), process_run, self.fault_plan)
                setattr(driver, name, self.watched(call))
        if (client := process.clients.volume_client()) is not None:
            faulty: Any = with_volume_faults(client._send, process_run, self.fault_plan)
            client._send = faulty  # type: ignore[method-assign]
        self._transport = ASGITransport(process.application(), "cloud:8774")

    async def lose_last_host(self) -> None:
        """Go on without the last host, guests included, until `return_last_host`; return when it counts as down."""
        await self._restart_with(HOSTS - 1)
        await self.clock.sleep(2 * self.process().settings.default.service_down_time)

    async def return_last_host(self) -> None:
        """Bring the last host back, if it is lost."""
        if self._hosts_here < HOSTS:
            await self._restart_with(HOSTS)

    async def _restart_with(self, hosts: int) -> None:
        await self._up.wait()
        run, self._hosts_here = self._process_run, hosts
        run.ended.set()
        await self.until(lambda: self._process_run is not run, "the process to be started again")
        await self._up.wait()

    def process(self) -> SimulatedProcess:
        """Return the process."""
        assert self._process is not None
        return self._process

    def drivers(self) -> list[Any]:
        """Return the drivers of all hosts."""
        return drivers_of(self.process())

    def watched(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a driver's method after which the guests are counted: none may run on two hosts."""

        async def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return await call(*args, **kwargs)
            finally:
                self._count_guests()

        return run

    def _count_guests(self) -> None:
        """Note whose guests run on two hosts. A host that was lost may have one until it learns of its departure."""
        guests = [(driver.host, guest) for driver in self.drivers() for guest in driver._store]
        running = [(host, guest) for host, guest in guests if guest.power_state == power_state.RUNNING]
        if len({guest.uuid for _, guest in running}) < len(running):
            left = {(row["host"], row["instance_uuid"]): row["epoch"] for row in self.rows(sa.select(departures))}
            stay = Counter(guest.uuid for host, guest in running if left.get((host, guest.uuid), -1) < guest.epoch)
            self._run_twice |= {uuid for uuid, count in stay.items() if count > 1}

    async def all_up(self) -> None:
        """Wait until the process runs."""
        await self._up.wait()

    async def _end_tasks(self) -> None:
        """Cancel all tasks of a process that has ended; its drivers write nothing to the guests' file any more."""
        self.process().release_locks()
        for driver in self.drivers():
            driver._store._path = None
        for _ in range(1000):
            left = asyncio.all_tasks() - self._own
            if not left:
                return
            for task in sorted(left, key=_made):  # else the order would not be repeatable
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"these tasks do not end: {left}")

    # --- users -----------------------------------------------------------------------------------------------

    async def request(self, method: str, path: str, body: Any = None, *, service: str = COMPUTE) -> Answer | None:
        """Send a request; return None if a crash broke the connection, so that its result is unknown."""
        await self._up.wait()
        assert self._transport is not None
        self.note_action(method, path, body)
        headers = request_headers(body, admin=action_of(method, path, body) == "swap volume")
        if service == VOLUME:
            headers["openstack-api-version"] = "volume 3.71"
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        asked = asyncio.ensure_future(self._transport.request(method, f"{service}{path}", headers, data))
        await asyncio.wait({asked})  # a task of the process: a crash ends it
        return None if asked.cancelled() else asked.result()

    def note_action(self, method: str, path: str, body: Any) -> None:
        """Count the points from now on for the action of this request, if it is one."""
        action = action_of(method, path, body)
        if action:
            self.fault_plan.action = action
            self.asked.add(action)

    async def insist(self, method: str, path: str, body: Any, *wanted: int, service: str = COMPUTE) -> int:
        """Send a request again until its status is one of these."""
        async with self._patience(f"{method} {path} to be answered"):
            while True:
                answer = await self.request(method, path, body, service=service)
                if answer is not None and answer.status in wanted:
                    return answer.status
                if answer is not None and answer.status not in (409, 503):
                    raise Refused(f"{method} {path} {body}: {answer.status} {answer.body!r}")
                await self.clock.sleep(1.0)

    async def create(
        self, name: str, count: int = 1, flavor: str = "1", networks: Any = "none", **more: Any
    ) -> list[str]:
        """Create servers once: if the answer is lost, look for the servers before asking again.

        Volumes that were reserved for a request that was lost are free after a while.
        """
        server = {
            "name": name,
            "imageRef": IMAGE,
            "flavorRef": flavor,
            "networks": networks,
            "max_count": count,
            **more,
        }
        async with self._patience(f"{name} to be accepted"):
            while True:
                answer = await self.request("POST", "/servers", {"server": {**server, "min_count": count}})
                found = self.servers(name)
                if found:
                    assert len(found) == count
                    return found
                reserved = answer is not None and b"is reserved" in answer.body
                assert answer is None or answer.status == 503 or reserved, f"{answer.status} {answer.body!r}"
                await self.clock.sleep(1.0)

    async def becomes(self, id: str, *states: str) -> str:
        """Wait until a server is in one of these states without a task state."""
        row: Any = None

        def look() -> bool:
            nonlocal row
            row = self.row(id)
            return row is None or (row["task_state"] is None and row["vm_state"] in (*states, "error"))

        await self.until(look, f"{id} to be {states}")
        state = "gone" if row is None else str(row["vm_state"])
        if state not in states:
            raise UnexpectedResult(f"{id} is {state}: {row and row['fault']}")
        return state

    async def gone(self, id: str) -> None:
        """Wait until a server is deleted."""
        await self.until(lambda: self.row(id) is None, f"{id} to be gone")

    # --- reading the databases ----------------------------------------------------------------------

    def rows(self, query: sa.Select[Any], database: str = "compute") -> list[Any]:
        """Read a database."""
        return self.databases[database].read_now(lambda conn: list(conn.execute(query).mappings()))

    def row(self, id: str) -> Any:
        """Return the row of a server, or None."""
        found = self.rows(sa.select(instances).where(instances.c.uuid == id))
        return found[0] if found else None

    def dedicated_cpus(self, id: str) -> set[int]:
        """Return the host CPUs that a server holds for itself."""
        rows = self.rows(sa.select(topology_claims).where(topology_claims.c.consumer_uuid == id))
        held = [msgspec.json.decode(row["assignment"], type=Assignment) for row in rows]
        return {cpu for each in held for cell in each.cells for cpu in cell.pins.values()}

    def servers(self, name: str) -> list[str]:
        """Return the servers whose names start with this."""
        query = sa.select(instances.c.uuid).where(instances.c.display_name.startswith(name))
        return sorted(row["uuid"] for row in self.rows(query))

    def ports(self) -> dict[str, str]:
        """Return the ports of servers, with their servers; none without the network service."""
        found = self.rows(sa.select(ports), "network") if "network" in self.databases else []
        return {row["id"]: row["device_id"] for row in found if row["device_owner"].startswith("compute:")}

    def addresses(self) -> set[str]:
        """Return the fixed addresses of the ports of servers."""
        found = self.rows(sa.select(addresses), "network")
        return {row["address"] for row in found if row["port_id"] in self.ports()}

    def images(self, name: str | None = None) -> dict[str, str]:
        """Return the status of each image, or of those with a name; there are none without the image service."""
        wanted = sa.select(images) if name is None else sa.select(images).where(images.c.name == name)
        found = self.rows(wanted, "image") if "image" in self.databases else []
        return {row["id"]: row["status"] for row in found}

    def images_of(self, server: str, kind: str) -> list[str]:
        """Return the complete images of a server, by their type."""
        of_server, of_kind = (
            sa.select(properties.c.image_id).where(properties.c.name == name, properties.c.value == value)
            for name, value in (("instance_uuid", server), ("image_type", kind))
        )
        found = sa.select(images.c.id).where(images.c.id.in_(of_server), images.c.id.in_(of_kind))
        return [row["id"] for row in self.rows(found.where(images.c.status == "active"), "image")]

    def open_operations(self) -> list[Any]:
        """Return the operations that are not finished."""
        return self.rows(sa.select(operations).where(operations.c.finished_at.is_(None)))

    def guest_images(self, id: str) -> list[str]:
        """Return the images of the guests that the hosts have of a server."""
        return [guest.image for driver in self.drivers() if (guest := driver._store.get(id)) is not None]

    def guest_powers(self, id: str) -> list[int]:
        """Return the power states of the guests that the hosts have of a server."""
        return [guest.power_state for driver in self.drivers() if (guest := driver._store.get(id)) is not None]

    def migration_status(self, id: str) -> str:
        """Return the status of a server's newest migration; "under way" until the source has sent the guest."""
        newest = sa.select(migrations).where(migrations.c.instance_uuid == id).order_by(migrations.c.id.desc()).limit(1)
        status = [str(row["status"]) for row in self.rows(newest)]
        moves = set(migration_states.UNDER_WAY) - {migration_states.POST_MIGRATING}
        return "under way" if moves.issuperset(status) else status[0]

    async def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until the function returns True."""
        async with self._patience(what):
            while not true():
                for supervisor in self._supervisors:
                    if supervisor.done():
                        supervisor.result()  # a fault of the simulation itself, not of the cloud
                await self.clock.sleep(0.5)

    @contextlib.asynccontextmanager
    async def _patience(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.patience):
                yield
        except TimeoutError:
            held = [(row["kind"], row["step"], row["owner"], row["leases"]) for row in self.open_operations()]
            raise NotInTime(f"waited {self.patience:.0f} s for {what}; open: {held}") from None

    def _all_up(self) -> bool:
        return len(self.rows(sa.select(inventories.c.node_uuid).distinct())) == self.hosts

    # --- the invariants --------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Inject no more faults, and assert that nothing is stuck, leaked or oversold."""
        self.fault_plan.armed = False
        while True:  # the last fault may end the process only now
            await self.all_up()
            await self.until(lambda: not self.open_operations(), "all operations to end")
            await self.until(lambda: not self.rows(sa.select(departures)), "the hosts to have cleaned up")
            if "volume" in self.databases:
                await self.until(self.volumes.settled, "the volume service to end its work")
            audit = asyncio.create_task(run_audit(self.process()))
            await asyncio.wait({audit})
            if not audit.cancelled():
                break
        assert audit.result() == []
        assert not self._run_twice
        expected = {row["uuid"]: row["host"] for row in self.rows(sa.select(instances)) if row["host"] is not None}
        guests = {guest.uuid: driver.host for driver in self.drivers() for guest in await driver.list_guests()}
        assert guests == expected
        for driver in self.drivers():
            for guest in driver._store:
                cells = () if guest.assignment is None else guest.assignment.cells
                cpus = {cpu for cell in cells for cpu in cell.pins.values()}
                assert cpus == self.dedicated_cpus(guest.uuid)
        assert not any(guest.frozen for driver in self.drivers() for guest in driver._store)
        assert set(self.images().values()) <= {"active"}
        assert set(self.ports().values()) <= {row["uuid"] for row in self.rows(sa.select(instances))}
        if "volume" in self.databases:
            held = {
                guest.uuid: guest.volumes or () for driver in self.drivers() for guest in await driver.list_guests()
            }
            directory = self._directory / "volumes"
            files = {kind: [each.name for each in (directory / kind).iterdir()] for kind in DIRECTORIES}
            self.volumes.check(held, files)
        for row in self.rows(sa.select(inventories)):
            used = [
                each["used"]
                for each in self.rows(sa.select(allocations))
                if (each["node_uuid"], each["resource_class"]) == (row["node_uuid"], row["resource_class"])
            ]
            assert sum(used) == row["used"] <= row["capacity"]


def _made(task: "asyncio.Task[Any]") -> tuple[int, str]:
    """Return when a task was made, among those that nobody gave a name: Task-9 before Task-10."""
    return len(task.get_name()), task.get_name()


def fresh(template: Path, directory: Path) -> Path:
    """Make the state directory of one simulation, with the template's keys because new ones take long to create."""
    directory.mkdir(parents=True)
    shutil.copy(template / "keys.json", directory / "keys.json")
    return directory
