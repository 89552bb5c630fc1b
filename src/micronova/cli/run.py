"""`micronova run ROLE…`: some roles as one process; and what `up` shares with it."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from micronova.cli.names import HTTP_ROLES, ROLES
from micronova.cli.own_command import own_command
from micronova.cli.service_user import hand_over, service_user
from micronova.cli.state import StateDirectory, default_directory
from micronova.cli.supervisor import run_as_service, runs_qemu
from micronova.conf.settings import Settings, SettingsError, load
from micronova.http.sockets import listen
from micronova.telemetry.logs import set_up_logging

if TYPE_CHECKING:
    from micronova.cli.agent import AgentLink
    from micronova.cli.wiring import Process
    from micronova.http.server import HTTPServer

log = logging.getLogger(__name__)


def run(roles: tuple[str, ...], config: Path | None, fd: int | None, directory: Path | None) -> None:
    """Run the roles until SIGTERM or Ctrl-C."""
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise SettingsError(f"There is no role {unknown[0]}: choose from {', '.join(ROLES)}.")
    settings = load(config)
    set_up_logging(settings)
    place = StateDirectory(directory or Path(settings.default.state_path or default_directory()))
    if fd is None and settings.api.workers > 1 and set(roles) <= set(HTTP_ROLES):
        _supervise(settings, roles, config, place)
        return
    sock = socket.socket(fileno=fd) if fd is not None else _listen(settings, roles)

    def main(settings: Settings, roles: Sequence[str], agent: "AgentLink | None") -> None:
        run_until_stopped(lambda stopped: _serve(settings, roles, agent, place, sock, stopped))

    needs_root = "network-agent" in roles or ("compute" in roles and runs_qemu(settings))
    run_as_service(settings, place, roles, main, needs_root=needs_root)


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
    stopped: asyncio.Event,
) -> None:
    from micronova.cli.wiring import Process

    process = Process(settings, roles, place, agent=agent)
    await process.start(sock)
    metrics = await _metrics(settings, process)
    settle_memory()
    log.info("%s: ready", ", ".join(roles))
    try:
        await stopped.wait()
        log.info("%s: stopping", ", ".join(roles))
    finally:
        if metrics is not None:
            await metrics.stop()
        await process.stop()


async def _metrics(settings: Settings, process: "Process") -> "HTTPServer | None":
    place = settings.api.metrics_listen
    if not place:
        return None
    from micronova.cli.control import Control
    from micronova.http.server import HTTPServer

    address, _, port = place.rpartition(":")
    server = HTTPServer(Control(process, metrics_only=True), listen(address or "127.0.0.1", int(port)))
    await server.start()
    return server


def run_until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine that ends when the event is set: by SIGTERM or SIGINT."""

    import uvloop

    raise_descriptor_limit()

    async def guarded() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await main(stopped)

    uvloop.run(guarded())


def raise_descriptor_limit() -> None:
    """Let this process open as many files and sockets as the system allows it, because each client has one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def settle_memory() -> None:
    """Return memory that only the start needed (hashing passwords takes megabytes), and collect garbage rarely.

    Rows and answers are freed by reference counting, and imported modules are never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _supervise(settings: Settings, roles: tuple[str, ...], config: Path | None, place: StateDirectory) -> None:
    """Run several workers on one socket; a worker that dies is started again."""
    sock = listen(settings.api.listen, settings.api.port)
    os.set_inheritable(sock.fileno(), True)
    # Before the workers start: several of them at once would make different keys.
    user = service_user(settings.default.user)
    if user is None:
        place.create()
        place.keys()
    else:
        hand_over(place, user)
    command = own_command(
        "run",
        *roles,
        "--fd",
        str(sock.fileno()),
        "--dir",
        str(place.path),
        *(["--config", str(config)] if config else []),
    )
    workers = [subprocess.Popen(command, pass_fds=[sock.fileno()]) for _ in range(settings.api.workers)]
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while True:
        pid, status = os.wait()
        number = next((n for n, worker in enumerate(workers) if worker.pid == pid), None)
        if number is None:
            continue
        workers[number].returncode = os.waitstatus_to_exitcode(status)
        if stopping:
            if all(worker.returncode is not None for worker in workers):
                return
        elif workers[number].returncode == 1:
            stop()  # a setting is wrong; the next worker would fail as well
            sys.exit(1)
        else:
            log.warning(
                "worker process %d ended with exit code %s and is started again", pid, workers[number].returncode
            )
            workers[number] = subprocess.Popen(command, pass_fds=[sock.fileno()])
