"""`micronova up` and `micronova down`: the whole cloud in one process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import click

from micronova.cli.state import StateDirectory, default_directory
from micronova.conf.settings import Settings, load
from micronova.objects.errors import MicronovaError


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

    from micronova.cli.machine import probe, unwired

    notice = ""
    settings = settings_for("fake" if driver == "fake" else "libvirt")
    if driver != "fake":
        obstacle = probe(settings)
        if obstacle is not None and driver == "libvirt":
            raise MicronovaError(obstacle)
        if obstacle is not None:
            notice = f"Real guests are not possible here. {obstacle}"
            settings = settings_for("fake")
    settings, lack = unwired(settings)
    notice = notice or lack
    if detach:
        _detach(place, sys.argv[1:])
        return
    _run(settings, place, notice)


def _run(settings: Settings, place: StateDirectory, notice: str) -> None:
    from micronova.cli.machine import run_as_service, uses_machine, wires
    from micronova.cli.names import ROLES
    from micronova.http.sockets import listen
    from micronova.telemetry.logs import set_up_logging

    set_up_logging(settings)
    sock = listen(settings.api.listen, settings.api.port)  # first: a port in use should cost nothing else
    pid = os.getpid()
    left_out = {"identity": settings.api.auth_strategy == "noauth2", "network-agent": not wires(settings)}
    roles = [role for role in ROLES if not left_out.get(role)]

    def main(settings: Settings) -> None:
        from micronova.cli.run import run_until_stopped

        run_until_stopped(lambda stopped: _up(settings, roles, place, sock, notice, pid, stopped))

    run_as_service(settings, place, main, needs_root=uses_machine(settings))


async def _up(
    settings: Settings,
    roles: list[str],
    place: StateDirectory,
    sock: socket.socket,
    notice: str,
    pid: int,
    stopped: asyncio.Event,
) -> None:
    from micronova.cli.control import Control
    from micronova.cli.run import settle_memory
    from micronova.cli.wiring import Process
    from micronova.http.mount import HTTPServer
    from micronova.http.sockets import listen_unix

    address, port = sock.getsockname()[:2]
    url = settings.api.public_url or f"http://{_reachable(address)}:{port}"
    place.create()
    place.write("micronova.pid", str(pid).encode())
    process = Process(settings, roles, place)
    control = HTTPServer(Control(process), listen_unix(place.control))
    try:
        await process.start(sock)
        clouds = place.write_clouds(url, process.keys, settings.identity.region_name)
        await control.start()
        settle_memory()
        _greet(url, clouds, notice, settings)
        await stopped.wait()
        click.echo("stopping…", err=True)
    finally:
        with contextlib.suppress(Exception):
            await control.stop()
        await process.stop()
        place.control.unlink(missing_ok=True)
        place.pid_file.unlink(missing_ok=True)


def _reachable(address: str) -> str:
    if address in ("0.0.0.0", "::"):  # noqa: S104 - listened on, not connected to
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _greet(url: str, clouds: Path, notice: str, settings: Settings) -> None:
    if settings.compute.compute_driver == "libvirt":
        click.echo(f"Micronova is up at {url}; guests are real (libvirt).")
    else:
        hosts = settings.fake.hosts
        simulated = f"{hosts} simulated host{'s' if hosts > 1 else ''}"
        click.echo(f"Micronova is up at {url} with {simulated} (fake driver: guests are simulated, none is real).")
    if notice:
        click.secho(notice, fg="yellow")
    click.echo("In another terminal:\n")
    click.echo(f"  export OS_CLIENT_CONFIG_FILE={clouds} OS_CLOUD=micronova\n")
    click.echo("then e.g. `openstack server list`. Ctrl-C stops the cloud; its state stays.")
    sys.stdout.flush()


def _detach(place: StateDirectory, arguments: list[str]) -> None:
    """Start the same command without --detach in the background, and wait until it answers."""
    place.create()
    command = [sys.executable, "-m", "micronova.cli.main", *(a for a in arguments if a != "--detach")]
    logfile = place.path / "micronova.log"
    with open(logfile, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
        begin = stream.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, start_new_session=True
        )
    assert child.stdout is not None
    # The cloud greets when it answers; if it cannot start, its last words are in the log.
    greeting = []
    for line in child.stdout:
        greeting.append(line.decode())
        if "Ctrl-C stops" in greeting[-1]:
            break
    else:
        child.wait()
        words = logfile.read_bytes()[begin:].decode("utf-8", "replace").strip().splitlines()
        raise MicronovaError((words[-1] if words else "The cloud did not start.").removeprefix("micronova: "))
    click.echo("".join(greeting[:-1]) + f"`micronova down --dir {place.path}` stops it; its log is {logfile}.")


def down(directory: Path | None) -> None:
    """Stop the cloud that runs in DIR, wait until it is gone, and leave nothing of it on the machine."""
    place = StateDirectory((directory or default_directory()).absolute())
    pid = place.running_pid()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60.0
        while _alive(pid):
            if time.monotonic() > deadline:
                raise MicronovaError(
                    f"Process {pid} did not stop within a minute; its log is {place.path / 'micronova.log'}."
                )
            time.sleep(0.05)
    left = False
    if os.geteuid() == 0 and place.has_keys():
        from micronova.cli.machine import clean_up

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
