"""`micronova up` and `micronova down`: the whole cloud; with real guests, their agents in a process of their own."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click
import msgspec

from micronova.cli.own_command import own_command
from micronova.cli.state import StateDirectory, default_directory, open_trusted
from micronova.conf.settings import Settings, load
from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from micronova.cli.agent import AgentLink
    from micronova.cli.reload import SettingsSource

MOST_READ = 65_536  # bytes at the end of the log that are read for the reason of a failed start


def up(
    directory: Path | None,
    driver: str,
    hosts: int | None,
    listen: str | None,
    port: int | None,
    config: Path | None,
    detach: bool,
) -> None:
    """Start a cloud and, unless detached, stay until Ctrl-C."""
    place = StateDirectory((directory or default_directory()).absolute())
    if place.running_pid() is not None:
        raise MicronovaError(
            f"A cloud runs in {place.path} already: stop it with `micronova down`, or choose another --dir."
        )

    def settings_for(driver: str) -> Settings:
        return load(
            config,
            api={"listen": listen, "port": port},
            default={"state_path": str(place.path)},
            compute={"compute_driver": driver},
            fake={"hosts": hosts},
        )

    from micronova.cli.reload import SettingsSource
    from micronova.cli.supervisor import probe, without_links

    notice = ""
    settings = settings_for("fake" if driver == "fake" else "libvirt")
    if driver != "fake":
        obstacle = probe(settings)
        if obstacle is not None and driver == "libvirt":
            raise MicronovaError(obstacle)
        if obstacle is not None:
            notice = f"Real guests are not possible here. {obstacle}"
            settings = settings_for("fake")
    chosen = [
        name
        for name in ("resume_guests_state_on_host_boot", "allow_resize_to_same_host")
        if getattr(settings.default, name) is None
    ]
    if chosen:
        default = msgspec.structs.replace(settings.default, **dict.fromkeys(chosen, True))
        settings = msgspec.structs.replace(settings, default=default)
    settings, lack = without_links(settings)
    notice = notice or lack
    read_again = partial(settings_for, settings.compute.compute_driver)
    source = SettingsSource(read_again(), read_again)
    starter, new = os.getpid(), not place.path.exists()
    remover = _start_remover(place) if new and not detach else None
    try:
        if detach:
            _detach(place, sys.argv[1:])
        else:
            _run(settings, place, notice, source)
    except BaseException:
        # A cloud that came up has clouds.yaml. Root's process removes what its child, who may not, has made.
        if new and os.getpid() == starter and not (place.path / "clouds.yaml").exists():
            shutil.rmtree(place.path, ignore_errors=True)
            if remover is not None:
                remover.communicate()
        raise


def _start_remover(place: StateDirectory) -> "subprocess.Popen[bytes] | None":
    """Start a process of root's that removes DIR, if it is empty, when this one ends, which may be root no more."""
    if os.geteuid() != 0:
        return None
    command = ["sh", "-c", 'read -r end; rmdir -- "$1" 2>/dev/null', "sh", str(place.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)


def _run(settings: Settings, place: StateDirectory, notice: str, source: "SettingsSource") -> None:
    from micronova.cli.names import ROLES
    from micronova.cli.service_user import sudo_user
    from micronova.cli.supervisor import run_as_service, runs_network_agent, runs_qemu
    from micronova.http.sockets import listen
    from micronova.telemetry.logs import limited_log, set_up_logging

    set_up_logging(settings)
    sock = listen(settings.api.listen, settings.api.port)  # first: a port in use should cost nothing else
    pid = os.getpid()
    person = sudo_user()
    left_out = {"identity": settings.api.auth_strategy == "noauth2", "network-agent": not runs_network_agent(settings)}
    roles = [role for role in ROLES if not left_out.get(role)]

    def main(settings: Settings, roles: Sequence[str], agent: "AgentLink | None") -> None:
        from micronova.cli.run import import_code, run_until_stopped

        import_code(settings, roles)

        async def work(stopped: asyncio.Event) -> None:
            async with limited_log(log_file(place), settings.default.log_file_max_size):
                await _up(settings, roles, agent, place, sock, notice, pid, person, stopped, source)

        run_until_stopped(work)

    run_as_service(settings, place, roles, main, needs_root=runs_qemu(settings), read_again=source.load)
    if os.getpid() == pid:  # else this is the child, and root's process has more to stop
        click.echo("stopped", err=True)


async def _up(
    settings: Settings,
    roles: Sequence[str],
    agent: "AgentLink | None",
    place: StateDirectory,
    sock: socket.socket,
    notice: str,
    pid: int,
    person: int | None,
    stopped: asyncio.Event,
    source: "SettingsSource",
) -> None:
    from micronova.cli.control import Control
    from micronova.cli.notify_systemd import ready_service
    from micronova.cli.reload import Reloader, open_log_file
    from micronova.cli.run import settle_memory
    from micronova.cli.service_user import share_clouds
    from micronova.cli.wiring import Process
    from micronova.http.server import HTTPServer
    from micronova.http.sockets import listen_unix

    place.create()
    place.write("micronova.pid", str(pid).encode())
    open_log_file(settings)
    process = Process(settings, roles, place, agent=agent)
    reloader = Reloader(process, source)
    control = HTTPServer(Control(process), listen_unix(place.control))
    try:
        await process.start(sock)
        if process.gate is not None and not await _comes_first(process.gate.ready, stopped):
            return  # the agents could not start, and have said why
        clouds = place.write_clouds(process.url, process.keys, settings.identity.region_name, guests_of(settings))
        await control.start()
        reloader.begin()
        settle_memory()
        if person is not None and not share_clouds(place, person):
            lack = f"{clouds} is readable by root only: its file system has no access control lists."
            notice = f"{notice}\n{lack}".strip()
        _greet(process.url, place.path, clouds, notice, settings)
        async with ready_service():
            await stopped.wait()
        click.echo("stopping…", err=True)
    finally:
        with contextlib.suppress(Exception):
            await control.stop()
        await process.stop()
        place.control.unlink(missing_ok=True)
        place.pid_file.unlink(missing_ok=True)


def guests_of(settings: Settings) -> str:
    """Return what the guests of a cloud are."""
    if settings.compute.compute_driver != "libvirt":
        return "simulated"
    return "real" if settings.libvirt.interfaces_linked else "without a network"


async def _comes_first(event: asyncio.Event, other: asyncio.Event) -> bool:
    """Wait for one of two events; return whether it is the first of them."""
    waiting = [asyncio.create_task(each.wait()) for each in (event, other)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return event.is_set()


def _greet(url: str, directory: Path, clouds: Path, notice: str, settings: Settings) -> None:
    if settings.compute.compute_driver == "libvirt":
        click.echo(f"Micronova is up at {url}; guests are real (libvirt).")
    else:
        hosts = settings.fake.hosts
        simulated = f"{hosts} simulated host{'s' if hosts > 1 else ''}"
        click.echo(f"Micronova is up at {url} with {simulated} (fake driver: guests are simulated, none is real).")
    if notice:
        click.secho(notice, fg="yellow")
    click.echo("In another terminal:\n")
    click.echo(f"  export OS_CLIENT_CONFIG_FILE={quote(str(clouds))} OS_CLOUD=micronova-demo")
    click.echo(f"  export MICRONOVA_DIR={quote(str(directory))}\n")
    click.echo("then e.g. `openstack server list`. OS_CLOUD=micronova is the admin.")
    click.echo("Ctrl-C stops the cloud; its state stays.")
    sys.stdout.flush()


def log_file(place: StateDirectory) -> Path:
    """Return the log of a detached cloud."""
    return place.path / "micronova.log"


def _detach(place: StateDirectory, arguments: list[str]) -> None:
    """Start the same command without --detach in the background, and wait until it answers."""
    place.create()
    command = own_command(*(a for a in arguments if a != "--detach"))
    logfile = log_file(place)
    try:  # DIR may belong to the service user already, who then owns the log and can keep it below a size
        if not os.path.lexists(logfile):
            place.write(logfile.name, b"")
        stream = open(logfile, "ab", opener=lambda _, flags: open_trusted(logfile, flags))  # noqa: SIM115
    except OSError as error:
        raise MicronovaError(f"Cannot write {logfile}: {error.strerror}.") from None
    # The cloud and its agents get the descriptor that only appends: they cannot read or shorten the log by it. The
    # cloud owns the file and opens it once more to shorten it; the agents are another user.
    with stream, open(f"/proc/self/fd/{stream.fileno()}", "rb") as logged:
        begin = stream.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
        )
        assert child.stdout is not None
        # The cloud prints its greeting when it answers; if it cannot start, the reason is the last line of the log.
        greeting: list[str] = []
        for line in child.stdout:
            greeting.append(line.decode())
            if "Ctrl-C stops" in greeting[-1]:
                break
        else:
            child.wait()
            end = logged.seek(0, os.SEEK_END)
            logged.seek(max(begin if begin <= end else 0, end - MOST_READ))  # the cloud may have shortened it
            raise _reason(logged.read(MOST_READ))
    click.echo("".join(greeting[:-1]) + f"`micronova down --dir {place.path}` stops it; its log is {logfile}.")


def _reason(logged: bytes) -> MicronovaError:
    """Return why a cloud did not start, from what it logged."""
    lines = logged.decode("utf-8", "replace").strip().splitlines()
    return MicronovaError((lines[-1] if lines else "The cloud did not start.").removeprefix("micronova: "))


def down(directory: Path | None) -> None:
    """Stop the cloud that runs in DIR, wait until it is gone, and leave nothing of it on the machine."""
    place = StateDirectory((directory or default_directory()).absolute())
    pid = place.running_pid()
    if pid is not None:
        # Only the cloud's own process gets the signal. Root's process, which supervises it, ends after it.
        supervisor = place.supervisor_pid(pid)
        place.terminate(pid)
        deadline = time.monotonic() + 60.0
        while _alive(pid) or _alive(supervisor):
            if time.monotonic() > deadline:
                raise MicronovaError(
                    f"Process {supervisor} did not stop within a minute; its log is {place.path / 'micronova.log'}."
                )
            time.sleep(0.05)
    left = False
    if os.geteuid() == 0 and place.has_keys():
        from micronova.cli.supervisor import clean_up

        left = clean_up(place)
    if pid is None and not left:
        raise MicronovaError(f"No cloud runs in {place.path}.")
    click.echo("stopped" if pid is not None else "No cloud ran; what an earlier one had left is removed.")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
