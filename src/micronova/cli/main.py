"""The `micronova` command."""

import errno
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from micronova.objects.errors import MicronovaError

# What a person mends by another user, another path or more space.
_NO_FAULT_OF_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EISDIR)


class ErrorsAsLines(click.Group):
    """A group that prints an error that a person can mend as one line and exits with 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MicronovaError as error:
            click.echo(f"micronova: {error.message}", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.errno not in _NO_FAULT_OF_OURS or error.filename is None:
                raise
            denied = error.errno in (errno.EACCES, errno.EPERM)
            hint = "use sudo, or name another place" if denied else "name another place"
            click.echo(f"micronova: Cannot use {error.filename}: {error.strerror}; {hint}.", err=True)
            ctx.exit(1)


def directory_option(command: Any) -> Any:
    """Add --dir, which every command that works with a cloud takes."""
    return click.option(
        "--dir",
        "directory",
        # The person who typed sudo may pass through DIR, not list it.
        type=click.Path(path_type=Path, file_okay=False, readable=False),
        envvar="MICRONOVA_DIR",
        help="Directory of the cloud [default: $MICRONOVA_DIR, else /var/lib/micronova for root, "
        "else ~/.local/state/micronova].",
    )(command)


config_option = click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")


@click.group(cls=ErrorsAsLines, context_settings={"help_option_names": ["-h", "--help"]})
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


@main.command()
@directory_option
def down(directory: Path | None) -> None:
    """Stop the cloud that runs in DIR."""
    from micronova.cli.up import down as run

    run(directory)


@main.command(short_help="Show what runs and what is wrong.")
@directory_option
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a region.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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


@main.command()
@click.argument("roles", nargs=-1, required=True, metavar="ROLE...")
@config_option
@click.option("--fd", type=int, hidden=True, help="A listening socket that the parent opened.")
@click.option("--ready-fd", type=int, hidden=True, help="A pipe on which the parent learns that the roles are ready.")
@click.option("--worker", type=int, default=0, hidden=True, help="The number of this worker.")
@directory_option
def run(
    roles: tuple[str, ...],
    config: Path | None,
    fd: int | None,
    ready_fd: int | None,
    worker: int,
    directory: Path | None,
) -> None:
    """Run roles as one process.

    Roles: api, metadata, conductor, scheduler, compute, console, identity, image, network, volume, network-agent.
    """
    from micronova.cli.run import run as start

    start(roles, config, fd, ready_fd, worker, directory)


@main.group()
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
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Compute host; may be repeated [compute-1].")
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


@region.command("down")
@click.argument("names", nargs=-1, metavar="[PROCESS]...")
@region_directory_option
def region_down(names: tuple[str, ...], directory: Path) -> None:
    """Stop what `region up` has started; the files stay."""
    from micronova.cli.region.trial import down as run

    run(directory, names)


@main.group()
def db() -> None:
    """Maintain the databases."""


@db.command("upgrade")
@directory_option
@config_option
def db_upgrade(directory: Path | None, config: Path | None) -> None:
    """Bring every database of the cloud to this version's schema."""
    from micronova.cli.maintain import upgrade

    upgrade(directory, config)


@db.command("current", short_help="Show the revision of each database.")
@directory_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def db_current(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Show the revision of each database, and the one that this release needs. Exit 0 only if they are the same."""
    from micronova.cli.maintain import show_revisions

    sys.exit(show_revisions(directory, config, as_json))


@db.command("purge", short_help="Delete old operations and records of deleted servers.")
@directory_option
@config_option
@click.option(
    "--before",
    required=True,
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]),
    help="Purge what was deleted or ended before this time (UTC).",
)
@click.option("--dry-run", is_flag=True, help="Only count.")
def db_purge(directory: Path | None, config: Path | None, before: datetime, dry_run: bool) -> None:
    """Delete finished operations, and the records of deleted servers with their actions, faults and usage.

    The cloud may run meanwhile. `conductor.keep_deleted` does the same periodically.
    """
    from micronova.cli.maintain import purge

    purge(directory, config, before.replace(tzinfo=UTC).timestamp(), dry_run)


@main.group("token-key")
def token_key() -> None:
    """Maintain the keys that sign tokens."""


@token_key.command("rotate", short_help="Make a new key for tokens.")
@directory_option
@config_option
@click.option(
    "--after",
    type=click.IntRange(60),
    default=120,
    show_default=True,
    help="Seconds until the new key signs. All processes of the identity service must have the new keys.json by then.",
)
def token_key_rotate(directory: Path | None, config: Path | None, after: int) -> None:
    """Make a new key for tokens. Tokens of the old one stay valid until they expire."""
    from micronova.cli.maintain import rotate_token_key

    rotate_token_key(directory, config, after)


@token_key.command("show", short_help="Print the public keys that verify tokens.")
@directory_option
def token_key_show(directory: Path | None) -> None:
    """Print the public keys that verify tokens, for identity.public_key of other processes."""
    from micronova.cli.maintain import show_token_keys

    show_token_keys(directory)


@main.group("key")
def key() -> None:
    """Maintain the key of stored secrets."""


@key.command("rotate", short_help="Encrypt stored secrets with a new key.")
@directory_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def key_rotate(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Encrypt stored secrets with default.secret_key: those of waiting operations, and the credentials of users.

    Those that default.other_secret_keys have encrypted are read with these. In a cloud of `micronova up`, which has to
    be stopped, a new key is made first, and the old one is forgotten in the end.
    """
    from micronova.cli.keys import rotate

    rotate(directory, config, as_json)


@main.command()
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Show the values of this file.")
@click.option("--secrets", is_flag=True, help="Show passwords and keys, too; without it they are hidden.")
def config(config: Path | None, secrets: bool) -> None:
    """List every setting with its value and meaning, as a settings file."""
    from micronova.cli.maintain import show_settings

    show_settings(config, secrets=secrets)


@main.command(short_help="Print the OpenAPI document of the compute API.")
@click.option("--microversion", default="latest", show_default=True, help="Microversion, such as 2.90.")
@config_option
def openapi(microversion: str, config: Path | None) -> None:
    """Print the OpenAPI 3.1 document of the compute API at a microversion.

    A running cloud serves it at /compute/v2.1/openapi.json.
    """
    from micronova.cli.openapi import openapi as run

    run(microversion, config)


@main.command(short_help="Find out whether a cloud with these settings can work.")
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@directory_option
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings (TOML); may be repeated, and then values are compared that must be the same everywhere.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(roles: tuple[str, ...], directory: Path | None, configs: tuple[Path, ...], as_json: bool) -> None:
    """Find out whether the ROLEs, by default those that the settings are written for, can work. Nothing is changed.

    It asks the database, the broker and the other services, and looks at files, addresses and clocks of this machine.
    Each line has the name of a check: ok, FAIL with the setting and what would be right, or ? if it could not be found
    out. Exit 0 only if nothing fails.
    """
    from micronova.cli.check import check as run

    sys.exit(run(roles, configs, directory, as_json=as_json))


@main.command(short_help="Compare the records with what there is.")
@directory_option
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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


@main.command(short_help="Show what was done with a server, step by step.")
@click.argument("server")
@directory_option
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
def timeline(server: str, directory: Path | None, config: Path | None) -> None:
    """Show the actions of a server step by step, and why its host was chosen. SERVER is an id or a name."""
    from micronova.cli.timeline import timeline as run

    run(server, directory, config)


@main.command(short_help="Show how the scheduler decided, or would decide.")
@click.argument("server", required=False)
@click.option("--dry-run", is_flag=True, help="Ask where servers would go; nothing is claimed.")
@click.option("--flavor", default="", metavar="NAME", help="Flavor of the servers; name or id.")
@click.option("--image", default="", metavar="NAME", help="Image of the servers; name or id.")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@directory_option
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
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


@main.command("fleet-simulate", short_help="Try scheduler settings on a synthetic fleet.")
@click.option("--hosts", type=click.IntRange(1, 200_000), default=1_000, show_default=True, help="Hosts of the fleet.")
@click.option(
    "--fleet",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Kinds of hosts (TOML) [default: hosts of 16, 32 and 64 CPUs in three zones].",
)
@click.option("--requests", default="synthetic", show_default=True, metavar="FILE|synthetic", help="Trace of requests.")
@click.option("--count", type=click.IntRange(1, 10_000_000), help="Requests of a synthetic trace [default: 20 a host].")
@click.option(
    "--load",
    type=click.FloatRange(0, 100, min_open=True),
    help="Largest demand of a synthetic trace at one time, as a multiple of the fleet [default: 1].",
)
@click.option(
    "--days",
    type=click.FloatRange(0, 3650, min_open=True),
    help="Length of a synthetic trace [default: what --load needs].",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Number that the trace and random choices follow from."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[=SETTINGS]",
    help="Settings to try: spread, pack, NAME=OPTION=VALUE,... or NAME=FILE.toml; may be repeated [default: spread].",
)
@click.option(
    "--build-time",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    help="Seconds that a host works on a new server.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("fleet-simulation"),
    show_default=True,
    help="Directory for the plots (SVG) and report.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--write-trace",
    "trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Only write a synthetic trace to this file.",
)
def fleet_simulate(**options: Any) -> None:
    """Let the scheduler place the servers of a trace on a synthetic fleet, in virtual time.

    It reports utilisation, fragmentation, refusals and the time of decisions, for several policies side by side.
    No cloud is needed, and none is touched.
    """
    from micronova.cli.fleet_simulate import SimulationOptions
    from micronova.cli.fleet_simulate import fleet_simulate as run

    run(SimulationOptions(**options))


@main.command(short_help="Connect to a floating IP, for ssh -o ProxyCommand.")
@click.argument("address")
@click.argument("port", type=click.IntRange(1, 65535))
@directory_option
def connect(address: str, port: int, directory: Path | None) -> None:
    """Connect standard input and output to a floating IP: ssh -o ProxyCommand='micronova connect %h %p' …"""
    from micronova.cli.connect import connect as join

    join(address, port, directory)


@main.command(short_help="Log in to a server, or run a command in it.")
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


@main.group()
def operation() -> None:
    """Look at durable work, try it again, cancel it."""


@operation.command("list")
@click.option("--kind", default="", help="Only of this kind, such as build, delete or resize.")
@click.option("--server", default="", metavar="UUID", help="Only of this server.")
@click.option("--owner", default="", help="Only what this conductor or compute host has.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@directory_option
@config_option
def operation_list(directory: Path | None, config: Path | None, **options: Any) -> None:
    """List the open operations, the oldest first, with who has them and when they are tried again."""
    from micronova.cli.operations import list_operations

    list_operations(directory, config, **options)


@operation.command("show")
@click.argument("id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@directory_option
@config_option
def operation_show(id: str, as_json: bool, directory: Path | None, config: Path | None) -> None:
    """Show one operation, open or ended."""
    from micronova.cli.operations import show_operation

    show_operation(id, directory, config, as_json)


@operation.command("retry")
@click.argument("id")
@directory_option
@config_option
def operation_retry(id: str, directory: Path | None, config: Path | None) -> None:
    """Try an operation again at once, instead of after its pause."""
    from micronova.cli.operations import retry_operation

    retry_operation(id, directory, config)


@operation.command("cancel", short_help="Let an operation fail.")
@click.argument("id")
@directory_option
@config_option
def operation_cancel(id: str, directory: Path | None, config: Path | None) -> None:
    """Let an operation fail: a conductor undoes it as if its deadline were over.

    Deletes, and what undoes something, cannot be cancelled: they are repeated until they succeed.
    """
    from micronova.cli.operations import cancel_operation

    cancel_operation(id, directory, config)


@main.group()
def quota() -> None:
    """Repair recorded quota usage."""


@quota.command("recount")
@click.option("--project", default="", metavar="ID", help="Only this project [default: all whose usage is wrong].")
@directory_option
@config_option
def quota_recount(project: str, directory: Path | None, config: Path | None) -> None:
    """Set recorded usage to what exists, and print what was wrong. The cloud may be in use meanwhile."""
    from micronova.cli.operations import recount_quota

    recount_quota(project, directory, config)


@main.group()
def host() -> None:
    """Add, list, disable, enable and remove compute hosts."""


@host.command("list")
@directory_option
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def host_list(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """List the compute hosts with their state."""
    from micronova.cli.hosts import list_hosts

    list_hosts(directory, config, as_json=as_json)


@host.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    default="libvirt",
    show_default=True,
    help="Hypervisor of the host, in its settings.",
)
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the settings to this new file, and print only the commands: `… | sh -e` on the broker.",
)
@directory_option
@config_option
def host_add(
    name: str,
    console_address: str,
    driver: str,
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

    The servers that it has are listed, and it is asked first.
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


@main.group()
def service() -> None:
    """List the processes of the cloud; forget those that are gone."""


@service.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    """Delete the record of a process that is gone for good, such as a conductor with a name of its own."""
    from micronova.cli.services import forget_service

    forget_service(name, directory, config)


@main.group()
def image() -> None:
    """Make images."""


@image.command("build-test", short_help="Build a small Linux image that boots.")
@directory_option
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Only write the image to this file.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    help="Directory that keeps built images.",
)
@click.option("--name", default="micronova-test", show_default=True, help="The registered image's name.")
def image_build_test(directory: Path | None, output: Path | None, cache: Path | None, name: str) -> None:
    """Build a small Linux image from Debian packages, and register it with the cloud in DIR."""
    from micronova.cli.image import build_test

    build_test(output, cache, directory, name)


@main.group()
def policy() -> None:
    """Look at the policy rules."""


@policy.command("check", short_help="List the rules that a user would pass.")
@click.option("--role", "roles", multiple=True, help="Role of the user; may be repeated  [default: member, reader].")
@click.option("--rule", default="", help="Only rules whose name begins so.")
@click.option(
    "--file",
    "policy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="policy.yaml with rules that differ from the defaults.",
)
def policy_check(roles: tuple[str, ...], rule: str, policy_file: Path | None) -> None:
    """List the compute rules that a user with these roles would pass, in its own project and in others."""
    from micronova.cli.maintain import check_policy

    check_policy(roles, rule, policy_file)


if __name__ == "__main__":
    main()
