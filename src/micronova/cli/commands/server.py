"""Commands about one server.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

import sys
from pathlib import Path
from typing import Any

import click

from micronova.cli.commands.options import directory_option, json_option, region_config_option


@click.command(short_help="Show what was done with a server, step by step.")
@click.argument("server")
@directory_option
@region_config_option
def timeline(server: str, directory: Path | None, config: Path | None) -> None:
    """Show the actions of a server step by step, and why its host was chosen. SERVER is an id or a name."""
    from micronova.cli.timeline import timeline as run

    run(server, directory, config)


@click.command(short_help="Show how the scheduler decided, or would decide.")
@click.argument("server", required=False)
@click.option("--dry-run", is_flag=True, help="Ask where servers would go; nothing is claimed.")
@click.option("--flavor", default="", metavar="NAME", help="Flavor of the servers; name or id.")
@click.option("--image", default="", metavar="NAME", help="Image of the servers; name or id.")
@click.option("--boot-from-volume", is_flag=True, help="The root disk is a volume: hosts need no room for it.")
@click.option("--hint", "hints", multiple=True, metavar="KEY=VALUE", help="Scheduler hint; may be repeated.")
@click.option("--availability-zone", default="", metavar="ZONE[:HOST[:NODE]]", help="As in `openstack server create`.")
@click.option("--host", default="", help="Ask about this host; the filters decide.")
@click.option("--project", default="", metavar="NAME", help="Project of the servers; name or id.")
@click.option("--count", type=click.IntRange(1, 1000), default=None, help="Number of servers [default: 1].")
@click.option(
    "--heat-map",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.svg",
    help="Draw all hosts by use; with --dry-run, by the filter that removes them.",
)
@click.option(
    "--by",
    type=click.Choice(["fullest", "memory", "vcpus", "disk"]),
    default=None,
    help="What the map is coloured by [default: fullest, the largest of the others].",
)
@json_option
@directory_option
@region_config_option
def explain(
    server: str | None,
    heat_map: Path | None,
    by: str | None,
    as_json: bool,
    directory: Path | None,
    config: Path | None,
    **request: Any,
) -> None:
    """Show how the scheduler decided about SERVER, an id or a name: what each filter removed, what each weigher gave.

    With --dry-run, ask a running scheduler where servers would go and what refuses them; exit 0 only if there are
    hosts for all. With --heat-map, draw the fleet.
    """
    from micronova.cli.explain import explain as run

    sys.exit(run(server, directory, config, heat_map=heat_map, by=by, as_json=as_json, **request))


@click.command(short_help="Connect to a floating IP, for ssh -o ProxyCommand.")
@click.argument("address")
@click.argument("port", type=click.IntRange(1, 65535))
@directory_option
def connect(address: str, port: int, directory: Path | None) -> None:
    """Connect standard input and output to a floating IP: ssh -o ProxyCommand='micronova connect %h %p' …"""
    from micronova.cli.connect import connect as join

    join(address, port, directory)


@click.command(short_help="Log in to a server, or run a command in it.")
@click.argument("server")
@click.argument("command", nargs=-1)
@directory_option
@click.option("--login", "-l", default="root", show_default=True, help="User in the guest.")
@click.option("--identity", "-i", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Private key.")
@click.option("--yes", "-y", is_flag=True, help="Make the changes that are needed without asking.")
def ssh(
    server: str, command: tuple[str, ...], directory: Path | None, login: str, identity: Path | None, yes: bool
) -> None:
    """Log in to SERVER by SSH, or run a COMMAND in it: micronova ssh SERVER -- COMMAND...

    A floating IP and a security group rule are made if they are missing, after a question. It acts as the user of
    OS_CLOUD in OS_CLIENT_CONFIG_FILE, by default as micronova-demo of the cloud in DIR.
    """
    from micronova.cli.ssh import ssh as run

    run(server, command, directory=directory, login=login, identity=identity, yes=yes)
