"""`micronova run ROLE…`: some roles as one process; and what `up` shares with it."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from micronova.cli.agent import HOST_ROLES
from micronova.cli.names import HTTP_ROLES, ROLES
from micronova.cli.notify_systemd import ready_service
from micronova.cli.process_name import own_name
from micronova.cli.reload import Reloader, SettingsSource, ends_with_its_terminal, open_log_file
from micronova.cli.service_user import hand_over, service_user
from micronova.cli.state import StateDirectory, default_directory
from micronova.cli.supervisor import run_as_service, runs_qemu
from micronova.cli.workers import READY, WorkerPlace, fork_workers, pulse, worker_count
from micronova.conf.settings import Settings, SettingsError, load
from micronova.http.sockets import listen
from micronova.telemetry.logs import set_up_logging

if TYPE_CHECKING:
    from micronova.cli.agent import AgentLink
    from micronova.cli.wiring import Process
    from micronova.http.server import HTTPServer

log = logging.getLogger(__name__)

_M_ARENA_MAX = -8
"""A parameter of mallopt in malloc.h: how many heaps there may be."""


def run(roles: tuple[str, ...], config: Path | None, directory: Path | None) -> None:
    """Run the roles until SIGTERM or Ctrl-C, in several processes if the settings say so."""
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise SettingsError(f"There is no role {unknown[0]}: choose from {', '.join(ROLES)}.")
    settings = load(config)
    set_up_logging(settings)
    place = StateDirectory(directory or Path(settings.default.state_path or default_directory()))
    sock = _listen(settings, roles)
    worker = WorkerPlace()
    if (count := worker_count(settings, roles)) > 1:
        _make_keys(settings, place)
        import_code(settings, roles)
        forked = fork_workers(count)
        if forked is None:
            return
        worker = forked
        settings = load(config)  # they may have changed since the first worker started
        set_up_logging(settings)
    source = SettingsSource(settings, partial(load, config))

    def main(settings: Settings, roles: Sequence[str], agent: "AgentLink | None") -> None:
        import_code(settings, roles)
        with own_name(settings, roles, worker.number) as name:
            run_until_stopped(
                lambda stopped: _serve(settings, roles, agent, place, sock, worker, stopped, source, name)
            )

    needs_root = "network-agent" in roles or ("compute" in roles and runs_qemu(settings))
    run_as_service(settings, place, roles, main, needs_root=needs_root, guests_stay=True, read_again=source.load)


def _make_keys(settings: Settings, place: StateDirectory) -> None:
    """Make the keys before the workers start: several of them at once would make different ones."""
    user = service_user(settings.default.user)
    if user is None:
        place.create()
        place.keys()
    else:
        hand_over(place, user)


def _listen(settings: Settings, roles: tuple[str, ...]) -> socket.socket | None:
    if not set(roles) & set(HTTP_ROLES):
        return None
    return listen(settings.api.listen, settings.api.port)


async def _serve(
    settings: Settings,
    roles: Sequence[str],
    agent: "AgentLink | None",
    place: StateDirectory,
    sock: socket.socket | None,
    worker: WorkerPlace,
    stopped: asyncio.Event,
    source: SettingsSource,
    name: str,
) -> None:
    from micronova.cli.connections import when_available
    from micronova.cli.wiring import Process
    from micronova.objects.clock import SystemClock

    open_log_file(settings)

    started: list[Process] = []

    async def start() -> None:
        process = Process(settings, roles, place, agent=agent, waits=True, name=name)
        await process.start(sock)
        started.append(process)

    # What is away is waited for; what goes away while the roles start is waited for, too, and then they start anew.
    if not await start_unless_stopped(when_available(start, SystemClock(), random.Random()), stopped):
        return
    [process] = started
    reloader = Reloader(process, source)
    metrics = await _metrics(settings, process, worker.number)
    if "identity" in process.embedded and worker.number == 0:
        _write_clouds(settings, process, place)
    settle_memory()
    log.info("%s: ready", ", ".join(roles))
    reloader.begin()
    if worker.ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed
            os.write(worker.ready_fd, READY)
    try:
        async with ready_service(None if worker.ready_fd is None else partial(pulse, worker.ready_fd, worker.number)):
            await stopped.wait()
        log.info("%s: stopping", ", ".join(roles))
    finally:
        if metrics is not None:
            await metrics.stop()
        await process.stop()


def _write_clouds(settings: Settings, process: "Process", place: StateDirectory) -> None:
    """Write clouds.yaml for the users that the identity service has made at its first start, and say where it is."""
    authority = Path(settings.ssl.ca_file) if settings.ssl.ca_file else None
    try:
        clouds = place.write_clouds(process.url, process.keys, settings.identity.region_name, authority=authority)
    except OSError as error:
        log.warning(
            "cannot write %s (%s): let the user of this process write it; %s has the first passwords of admin and demo",
            place.path / "clouds.yaml",
            error.strerror,
            place.path / "keys.json",
        )
        return
    log.info(
        "%s has the URL and the first passwords of admin and demo, which are also in %s",
        clouds,
        place.path / "keys.json",
    )


async def _metrics(settings: Settings, process: "Process", worker: int) -> "HTTPServer | None":
    """Serve the metrics of a process; each worker has a port of its own, from that of the setting on."""
    place = settings.api.metrics_listen
    if not place:
        return None
    from micronova.cli.control import Control
    from micronova.http.server import HTTPServer

    address, _, port = place.rpartition(":")
    server = HTTPServer(Control(process, metrics_only=True), listen(address or "127.0.0.1", int(port) + worker))
    await server.start()
    return server


def run_until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine that ends when the event is set: by SIGTERM or SIGINT."""

    import uvloop

    raise_descriptor_limit()
    use_one_heap()

    async def guarded() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        # Until there is something to reload, SIGHUP has no effect, instead of ending the process.
        loop.add_signal_handler(signal.SIGHUP, stopped.set if ends_with_its_terminal() else lambda: None)
        await main(stopped)

    uvloop.run(guarded())


async def start_unless_stopped(start: Coroutine[Any, Any, None], stopped: asyncio.Event) -> bool:
    """Run a start, which may wait for something, until the event is set; return whether it has ended."""
    starting, stopping = asyncio.create_task(start), asyncio.create_task(stopped.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return False
    await starting
    return True


def import_code(settings: Settings, roles: Iterable[str]) -> None:
    """Import what the roles need; nothing is connected or started.

    Modules are never freed. So garbage is not looked for meanwhile, and what is there then is not looked at again:
    that takes a tenth of a start, and a worker would get copies of the pages that it shares with others.
    """
    gc.disable()
    try:
        import uvloop  # noqa: F401

        from micronova.cli.wiring import role_module

        for role in roles:
            role_module(role)
        if set(roles) - set(HOST_ROLES):
            import micronova.cli.process_record
            import micronova.db.schema

            if settings.database.connection.startswith("postgres"):
                import micronova.db.postgres
        if set(roles) & set(HTTP_ROLES):
            import micronova.http.server
        if settings.default.transport_url.startswith("amqp"):
            import micronova.rpc.amqp.bus  # noqa: F401
        gc.freeze()
    finally:
        gc.enable()


def raise_descriptor_limit() -> None:
    """Let this process open as many files and sockets as the system allows it, because each client has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def use_one_heap() -> None:
    """Let all threads allocate from one heap of the C library: each would have one of its own, mostly empty.

    Few of them allocate at the same time, because of Python's global lock. For processes without threads yet.
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def settle_memory() -> None:
    """Return memory that only the start needed (hashing passwords takes megabytes), and collect garbage rarely.

    Rows and answers are freed by reference counting, and imported modules are never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
