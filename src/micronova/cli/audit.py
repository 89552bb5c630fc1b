"""`micronova audit`: compare the records with what the hypervisors and the network service hold."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from micronova.cli.state import StateDirectory, ask, default_directory

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.conductor.host_guests import ReportProgress

MANY_HOSTS = 500
"""With more hosts than these, the audit shows its progress."""
MANY_IMAGES = 500
"""Each time that the image service has answered about so many images, the audit shows it."""


def audit(directory: Path | None, config: Path | None, as_json: bool) -> int:
    """Print the findings; return 0 only if there are none."""
    if config is None:
        findings = ask(StateDirectory(directory or default_directory()).control, "/audit")
    else:
        from micronova.cli.wiring import run_connected

        run = partial(run_audit, progress=_show_progress, image_progress=_show_images)
        findings = run_connected(config, directory, run)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    elif not findings:
        click.echo("nothing is wrong")
    else:
        for found in findings:
            click.echo(f"{found['kind']:<12} {found['subject']}  {found['message']}")
    return 1 if findings else 0


def _show_progress(done: int, hosts: int) -> None:
    if hosts > MANY_HOSTS:
        click.echo(f"{done} of {hosts} hosts have answered", err=True)


def _show_images(done: int) -> None:
    if done % MANY_IMAGES == 0:
        click.echo(f"the image service has answered about {done} images", err=True)


async def run_audit(
    process: "Process",
    progress: "ReportProgress | None" = None,
    image_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the findings, as plain data, of an audit over the database and the bus of a process."""
    from micronova.compute.rpcapi import ComputeAPI
    from micronova.conductor.audit import audit as compare
    from micronova.conductor.host_guests import no_progress
    from micronova.conductor.rpcapi import ProbeAPI

    assert process.database is not None and process.bus is not None
    findings = await compare(
        process.database,
        ComputeAPI(process.bus),
        ProbeAPI(process.bus),
        process.clock,
        service_down_time=process.settings.default.service_down_time,
        ports=process.clients.network_client(),
        images=process.clients.image_client(),
        volumes=process.clients.volume_client(),
        progress=progress or no_progress,
        image_progress=image_progress,
    )
    builtins: list[dict[str, Any]] = msgspec.to_builtins(findings)
    return builtins
