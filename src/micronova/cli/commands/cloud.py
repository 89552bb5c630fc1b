"""Commands that start a cloud, look at it, and check it.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

import sys
from pathlib import Path
from typing import Any

import click

from micronova.cli.commands.options import config_option, directory_option, json_option, region_config_option


@click.command()
@directory_option
@click.option(
    "--driver",
    type=click.Choice(["auto", "libvirt", "fake"]),
    default="auto",
    show_default=True,
    help="Hypervisor: libvirt runs real guests, fake simulates them; auto is libvirt if this machine can run it.",
)
@click.option("--hosts", type=click.IntRange(1, 100_000), default=None, help="Simulated hosts [default: 1].")
@click.option("--listen", default=None, help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="TCP port of the HTTP APIs [default: 8774].")
@config_option
@click.option("--detach", is_flag=True, help="Return when the cloud answers, and leave it running.")
def up(**options: Any) -> None:
    """Start a cloud: every role in one process."""
    from micronova.cli.up import up as run

    run(**options)


@click.command()
@directory_option
def down(directory: Path | None) -> None:
    """Stop the cloud that runs in DIR."""
    from micronova.cli.up import down as run

    run(directory)


@click.command(short_help="Show what runs and what is wrong.")
@directory_option
@region_config_option
@json_option
def status(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Count the services by state, the servers and the operations, and name the services that are down.

    With --config, show a region: database, broker, HTTP services, processes with their releases, hosts, operations
    that wait or are late, and the last audit. What does not answer is shown as such; exit 0 only if all answer.
    """
    if config is not None:
        from micronova.cli.region_status import region_status

        sys.exit(region_status(config, directory, as_json=as_json))
    from micronova.cli.status import status as run

    run(directory, as_json)


@click.command()
@click.argument("roles", nargs=-1, required=True, metavar="ROLE...")
@config_option
@directory_option
def run(roles: tuple[str, ...], config: Path | None, directory: Path | None) -> None:
    """Run roles as one process, or as several that have the same roles (workers).

    Roles: api, metadata, conductor, scheduler, compute, console, identity, image, network, volume, network-agent.
    """
    from micronova.cli.run import run as start

    start(roles, config, directory)


@click.command(short_help="Find out whether a cloud with these settings can work.")
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@directory_option
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings (TOML); may be repeated, and then values are compared that must be the same everywhere.",
)
@json_option
def check(roles: tuple[str, ...], directory: Path | None, configs: tuple[Path, ...], as_json: bool) -> None:
    """Find out whether the ROLEs, by default those that the settings are written for, can work. Nothing is changed.

    It asks the database, the broker and the other services, and looks at files, addresses and clocks of this machine.
    Each line has the name of a check: ok, FAIL with the setting and what would be right, or ? if it could not be found
    out. Exit 0 only if nothing fails.
    """
    from micronova.cli.check import check as run

    sys.exit(run(roles, configs, directory, as_json=as_json))


@click.command(short_help="Compare the records with what there is.")
@directory_option
@region_config_option
@json_option
@click.option("--repair", is_flag=True, help="Ask for each repair whether to make it, make it, and compare again.")
@click.option("--yes", is_flag=True, help="With --repair: make all repairs that destroy nothing, without asking.")
@click.option(
    "--remove-guest",
    "remove_guests",
    multiple=True,
    metavar="UUID",
    help="With --repair: remove a guest that may be the only copy of its disks; may be repeated.",
)
def audit(
    directory: Path | None,
    config: Path | None,
    as_json: bool,
    repair: bool,
    yes: bool,
    remove_guests: tuple[str, ...],
) -> None:
    """Compare the records with hypervisors, network, images and volumes, and list every contradiction.

    Exit 0 if there is none; 1 if something is wrong; 3 if nothing is wrong in what could be asked, and a host, a
    service or the broker did not answer.
    """
    from micronova.cli.audit import audit as run

    if (yes or remove_guests) and not repair:
        raise click.UsageError("--yes and --remove-guest go with --repair.")
    if as_json and repair and not (yes or remove_guests):
        raise click.UsageError("--json cannot ask: add --yes.")
    sys.exit(run(directory, config, as_json, repair=repair, yes=yes, remove_guests=remove_guests))


@click.group()
def service() -> None:
    """List the processes of the cloud; forget those that are gone."""


@service.command("list")
@json_option
@directory_option
@config_option
def service_list(as_json: bool, directory: Path | None, config: Path | None) -> None:
    """List conductors, schedulers, hosts and consoles, and when they were last heard of."""
    from micronova.cli.services import list_services

    list_services(directory, config, as_json=as_json)


@service.command("forget")
@click.argument("name", metavar="ID|HOST")
@directory_option
@config_option
def service_forget(name: str, directory: Path | None, config: Path | None) -> None:
    """Delete the record of a process that is gone for good."""
    from micronova.cli.services import forget_service

    forget_service(name, directory, config)
