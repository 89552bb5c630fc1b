"""Commands about compute hosts.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

from pathlib import Path

import click

from micronova.cli.commands.options import config_option, directory_option, json_option


@click.group()
def host() -> None:
    """Add, list, disable, enable and remove compute hosts."""


@host.command("list")
@directory_option
@config_option
@json_option
def host_list(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """List the compute hosts with their state."""
    from micronova.cli.hosts import list_hosts

    list_hosts(directory, config, as_json=as_json)


@host.command("show")
@click.argument("name")
@json_option
@directory_option
@config_option
def host_show(name: str, as_json: bool, directory: Path | None, config: Path | None) -> None:
    """Show a host: its state, its broker user, its nodes, and the servers that it has."""
    from micronova.cli.hosts import show

    show(name, directory, config, as_json=as_json)


@host.command("add")
@click.argument("name")
@click.option(
    "--console-address",
    default="",
    metavar="ADDRESS:PORT",
    help="Where console proxies reach this host; they connect to nothing else that the host names.",
)
@click.option(
    "--driver",
    type=click.Choice(["libvirt", "fake"]),
    help="Hypervisor of the host, in its settings; libvirt, unless the host has reported another.",
)
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the settings to this file, and print only the commands: `… | sh -e` on the broker. Of a host that is "
    "known the file may exist: its password is replaced.",
)
@directory_option
@config_option
def host_add(
    name: str,
    console_address: str,
    driver: str | None,
    settings_file: Path | None,
    directory: Path | None,
    config: Path | None,
) -> None:
    """Register a host and print its broker commands and settings. A host that is known gets a new password."""
    from micronova.cli.hosts import add

    add(name, console_address, directory, config, settings_file=settings_file, driver=driver)


@host.command("remove", short_help="Take the rights of a host away.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask if the host has servers.")
@directory_option
@config_option
def host_remove(name: str, yes: bool, directory: Path | None, config: Path | None) -> None:
    """Take the rights of a host away and print the commands for the broker.

    It lists the host's servers and asks before it continues.
    """
    from micronova.cli.hosts import remove

    remove(name, directory, config, yes=yes)


@host.command("disable")
@click.argument("name")
@click.option("--reason", default="", help="Shown to admins.")
@directory_option
@config_option
def host_disable(name: str, reason: str, directory: Path | None, config: Path | None) -> None:
    """Give a host no new servers."""
    from micronova.cli.hosts import disable

    disable(name, reason, directory, config)


@host.command("enable")
@click.argument("name")
@directory_option
@config_option
def host_enable(name: str, directory: Path | None, config: Path | None) -> None:
    """Give a host new servers again, after disable or drain."""
    from micronova.cli.hosts import enable

    enable(name, directory, config)


@host.command("drain")
@click.argument("name")
@directory_option
@config_option
def host_drain(name: str, directory: Path | None, config: Path | None) -> None:
    """Give a host no new servers and list those that it still has."""
    from micronova.cli.hosts import drain

    drain(name, directory, config)
