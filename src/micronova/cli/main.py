"""The `micronova` command."""

import sys
from pathlib import Path
from typing import Any

import click

from micronova.objects.errors import MicronovaError


class Friendly(click.Group):
    """Errors that we raise on purpose are one line and a non-zero exit, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MicronovaError as error:
            click.echo(f"micronova: {error.message}", err=True)
            ctx.exit(1)


def directory_option(command: Any) -> Any:
    """Add --dir, which every command takes."""
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="MICRONOVA_DIR",
        help="Directory of the cloud [default: /var/lib/micronova for root, else ~/.local/state/micronova].",
    )(command)


@click.group(cls=Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="micronova")
def main() -> None:
    """OpenStack Compute, rebuilt: a cloud in one process, or a region on PostgreSQL and RabbitMQ."""


@main.command()
@directory_option
@click.option(
    "--driver",
    type=click.Choice(["auto", "libvirt", "fake"]),
    default="auto",
    show_default=True,
    help="Hypervisor: libvirt runs real guests, fake simulates them; auto: libvirt where it is possible.",
)
@click.option("--hosts", type=click.IntRange(1, 100_000), default=None, help="Simulated hosts [default: 1].")
@click.option("--listen", default=None, help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port of every API [default: 8774].")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")
@click.option("--detach", is_flag=True, help="Return when the cloud answers, and leave it running.")
def up(**options: Any) -> None:
    """Start a cloud: every role in one process."""
    from micronova.cli.up import up as run

    run(**options)


@main.command()
@directory_option
def down(directory: Path | None) -> None:
    """Stop the cloud that runs in DIR."""
    from micronova.cli.up import down as run

    run(directory)


@main.command()
@directory_option
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(directory: Path | None, as_json: bool) -> None:
    """Show what runs, what it holds and what is wrong."""
    from micronova.cli.inspect import status as run

    run(directory, as_json)


@main.command()
@click.argument("roles", nargs=-1, required=True, metavar="ROLE...")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")
@click.option("--fd", type=int, hidden=True, help="A listening socket that the parent opened.")
@directory_option
def run(roles: tuple[str, ...], config: Path | None, fd: int | None, directory: Path | None) -> None:
    """Run some roles: api, metadata, conductor, scheduler, compute, identity, image, network."""
    from micronova.cli.run import run as start

    start(roles, config, fd, directory)


@main.group()
def db() -> None:
    """The database."""


@db.command("upgrade")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")
def db_upgrade(directory: Path | None, config: Path | None) -> None:
    """Bring every database of the cloud to this version's schema."""
    from micronova.cli.maintain import upgrade

    upgrade(directory, config)


@main.command()
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Show the values of this file.")
def config(config: Path | None) -> None:
    """List every setting with its value and meaning."""
    from micronova.cli.maintain import show_settings

    show_settings(config)


@main.command()
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")
def check(directory: Path | None, config: Path | None) -> None:
    """Say whether everything is ready to run, or to upgrade."""
    from micronova.cli.maintain import check as run

    sys.exit(run(directory, config))


@main.command()
@directory_option
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def audit(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Compare what should be with what is; list every leak and contradiction. Exit 0 only when there is none."""
    from micronova.cli.inspect import audit as run

    sys.exit(run(directory, config, as_json))


@main.command()
@click.argument("server")
@directory_option
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
def timeline(server: str, directory: Path | None, config: Path | None) -> None:
    """Show how a server came to be, as a waterfall. SERVER is an id or a name."""
    from micronova.cli.inspect import timeline as run

    run(server, directory, config)


@main.command()
@click.argument("address")
@click.argument("port", type=click.IntRange(1, 65535))
@directory_option
def connect(address: str, port: int, directory: Path | None) -> None:
    """Connect to a guest's floating IP: ssh -o ProxyCommand='micronova connect %h %p' …"""
    from micronova.cli.connect import connect as join

    join(address, port, directory)


@main.group()
def host() -> None:
    """Compute hosts."""


@host.command("list")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False))
def host_list(directory: Path | None, config: Path | None) -> None:
    """List the hosts."""
    from micronova.cli.hosts import list_hosts

    list_hosts(directory, config)


@host.command("add")
@click.argument("name")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False))
def host_add(name: str, directory: Path | None, config: Path | None) -> None:
    """Register a host and print the settings that its agent needs."""
    from micronova.cli.hosts import add

    add(name, directory, config)


@host.command("remove")
@click.argument("name")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False))
def host_remove(name: str, directory: Path | None, config: Path | None) -> None:
    """Take a host's rights away and print what the broker must be told."""
    from micronova.cli.hosts import remove

    remove(name, directory, config)


@host.command("disable")
@click.argument("name")
@click.option("--reason", default="")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False))
def host_disable(name: str, reason: str, directory: Path | None, config: Path | None) -> None:
    """Let a host take no new servers."""
    from micronova.cli.hosts import disable

    disable(name, reason, directory, config)


@host.command("drain")
@click.argument("name")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False))
def host_drain(name: str, directory: Path | None, config: Path | None) -> None:
    """Let a host take no new servers and list those that it still has."""
    from micronova.cli.hosts import drain

    drain(name, directory, config)


@main.group()
def image() -> None:
    """Images."""


@image.command("build-test")
@directory_option
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Only write the image to this file.")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="Where built images are kept.")
@click.option("--name", default="micronova-test", show_default=True, help="The registered image's name.")
def image_build_test(directory: Path | None, output: Path | None, cache: Path | None, name: str) -> None:
    """Build a small Linux image from Debian packages, and register it with the cloud in DIR."""
    from micronova.cli.image import build_test

    build_test(output, cache, directory, name)


@main.group()
def policy() -> None:
    """Who may do what."""


@policy.command("check")
@click.option("--role", "roles", multiple=True, help="A role that the user has; repeat for more.")
@click.option("--rule", default="", help="Only rules that begin like this.")
@click.option("--file", "policy_file", type=click.Path(path_type=Path, dir_okay=False), help="policy.yaml")
def policy_check(roles: tuple[str, ...], rule: str, policy_file: Path | None) -> None:
    """List the compute rules that a user with these roles would pass, in its own project and in others."""
    from micronova.cli.maintain import check_policy

    check_policy(roles, rule, policy_file)


if __name__ == "__main__":
    main()
