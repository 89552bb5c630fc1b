"""Commands about a region of many processes.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

from pathlib import Path
from typing import Any

import click


@click.group()
def region() -> None:
    """Set up a region on PostgreSQL and RabbitMQ; run one on this machine for a trial."""


region_directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory of the region's files.",
)


@region.command("init", short_help="Write the files of a new region.")
@region_directory_option
@click.option("--address", default="127.0.0.1", show_default=True, help="Control node, as clients and hosts reach it.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Compute host; may be repeated [compute-1]. `region up` starts those of a trial; for others the command that "
    "adds each is printed.",
)
@click.option(
    "--driver",
    type=click.Choice(["libvirt", "fake"]),
    default="libvirt",
    show_default=True,
    help="Hypervisor of the hosts; fake simulates guests.",
)
@click.option("--conductors", type=click.IntRange(1, 99), default=2, show_default=True, help="Conductor processes.")
@click.option("--schedulers", type=click.IntRange(1, 99), default=2, show_default=True, help="Scheduler processes.")
@click.option("--database", default="", metavar="HOST[:PORT]", help="PostgreSQL [default: the control node].")
@click.option(
    "--broker",
    default="",
    metavar="HOST[:PORT][,…]",
    help="RabbitMQ, one or more [default: the control node].",
)
@click.option("--public-url", default="", metavar="URL", help="URL of a proxy in front of all services, for clients.")
@click.option("--region-name", default="RegionOne", show_default=True, help="Region in the catalog.")
@click.option("--tls", is_flag=True, help="Make a certificate authority; HTTP, broker and database use TLS.")
@click.option(
    "--config-dir",
    "config_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the files of DIR/etc will be on the machines, such as /etc/micronova [default: DIR/etc].",
)
@click.option(
    "--first-port",
    type=click.IntRange(1024, 65000),
    envvar="MICRONOVA_FIRST_PORT",
    help="First of the ports of all processes [default: the usual ones of OpenStack's services].",
)
def region_init(**options: Any) -> None:
    """Write what a first region needs: settings of every process, keys, SQL, broker commands, units, clouds.yaml.

    Nothing is started or changed elsewhere.
    """
    from micronova.cli.region.init import init

    init(**options)


@region.command("up", short_help="Run the region on this machine, for a trial.")
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@region_directory_option
def region_up(names: tuple[str, ...], directory: Path) -> None:
    """Run the region of DIR on this machine, for a trial, with a PostgreSQL and a RabbitMQ of its own.

    PROCESS is the name of a process, or services, control or hosts; those that run already are left alone.
    """
    from micronova.cli.region.trial import up as run

    run(directory, names)


@region.command("restart", short_help="Restart processes of a trial, one after the other.")
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@region_directory_option
def region_restart(names: tuple[str, ...], directory: Path) -> None:
    """Restart processes of the region of DIR, one after the other: the next one when the one before it is ready.

    PROCESS is as for `region up`. Database and broker are restarted if you name them, or services.
    """
    from micronova.cli.region.trial import restart as run

    run(directory, names)


@region.command("reload", short_help="Let processes of a trial read certificates and settings again.")
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@region_directory_option
def region_reload(names: tuple[str, ...], directory: Path) -> None:
    """Let processes read again what they can change while they run: certificates, log levels, policy files.

    Return when all that listen show the certificate of the region. PROCESS is as for `region up`.
    """
    from micronova.cli.region.trial import reload as run

    run(directory, names)


@region.command("renew", short_help="Sign a new certificate, with the region's own authority.")
@region_directory_option
def region_renew(directory: Path) -> None:
    """Write a new certificate and key of the region (`region init --tls`), signed by its own authority.

    Processes use them when they are told to: `region reload` in a trial; docs/tls.md for a region of several machines.
    """
    from micronova.cli.region.certificates import renew_certificate

    renew_certificate(directory)


@region.command("down")
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@region_directory_option
def region_down(names: tuple[str, ...], directory: Path) -> None:
    """Stop what `region up` has started; the files stay."""
    from micronova.cli.region.trial import down as run

    run(directory, names)
