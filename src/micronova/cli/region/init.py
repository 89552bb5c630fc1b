"""`micronova region init`: write what an operator needs for a first region."""

import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import click

from micronova.cli.hosts import check_host_name
from micronova.cli.region import files
from micronova.cli.region.plan import RegionPlan, write_plan
from micronova.cli.state import StateDirectory
from micronova.objects.errors import MicronovaError

_ADDRESS = re.compile(r"[A-Za-z0-9.\-]+|\[?[0-9A-Fa-f:.]+\]?", re.ASCII)
_PLACE = re.compile(rf"({_ADDRESS.pattern})(:[0-9]{{1,5}})?", re.ASCII)

_REGION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)  # it is printed into TOML and YAML


def init(directory: Path, config_directory: Path | None, hosts: tuple[str, ...], **options: Any) -> None:
    """Write the files of a region into a directory that is empty or new."""
    directory = directory.absolute()
    plan = RegionPlan(
        directory=directory,
        config_directory=(config_directory or directory / "etc").absolute(),
        hosts=hosts or ("compute-1",),
        **options,
    )
    _check(plan)
    if directory.exists() and any(directory.iterdir()):
        raise MicronovaError(f"{directory} is not empty: name a new directory with --dir.")
    directory.mkdir(parents=True, exist_ok=True)
    # Others may pass through it, to files that are theirs: PostgreSQL and the services have users of their own.
    directory.chmod(0o711)
    os.umask(0o077)
    for name in (plan.etc, plan.hosts_directory, directory / "systemd"):
        name.mkdir()
    secret = files.RegionSecrets()
    if plan.tls:
        from micronova.cli.region.certificates import make_certificates

        make_certificates(plan)
    plan.settings.write_text(files.control_settings(plan, secret))
    for process in plan.processes:
        lines = "".join(f"{name}={value}\n" for name, value in files.environment(plan, process).items())
        (plan.etc / f"{process}.env").write_text(lines)
    (directory / "postgresql.sql").write_text(files.sql(secret))
    (directory / "broker.sh").write_text(files.broker_commands(secret))
    (directory / "proxy.conf").write_text(files.proxy(plan))
    for unit in resources.files("micronova.cli.region").joinpath("systemd").iterdir():
        if unit.name != "micronova.service":  # that of a cloud on one machine
            (directory / "systemd" / unit.name).write_text(unit.read_text())
    keys = StateDirectory(plan.state("identity"))
    keys.create()
    authority = plan.config_directory / "tls" / "ca.pem" if plan.tls else None
    StateDirectory(directory).write_clouds(
        plan.seen_by_clients("identity").removesuffix("/identity/v3"),
        keys.keys(),
        plan.region_name,
        "simulated" if plan.driver == "fake" else "real",
        authority=authority,
    )
    write_plan(plan)
    _say(plan)


def _check(plan: RegionPlan) -> None:
    for host in plan.hosts:
        check_host_name(host)
    if len(set(plan.hosts)) < len(plan.hosts):
        raise MicronovaError("Two hosts have the same name: each needs a name of its own.")
    if taken := set(plan.hosts) & {*plan.processes, files.USER}:
        raise MicronovaError(f"{taken.pop()} is the name of a process or user of the region: name the host otherwise.")
    if not _ADDRESS.fullmatch(plan.address):
        raise MicronovaError(f"{plan.address!r} is no address: use a name or an IP address, such as 192.0.2.1.")
    for option, places in (("--database", [plan.database]), ("--broker", plan.broker.split(","))):
        for place in places:
            if place and not _PLACE.fullmatch(place):
                raise MicronovaError(f"{option} {place!r} is no HOST or HOST:PORT.")
    if not _REGION_NAME.fullmatch(plan.region_name):
        raise MicronovaError(
            f"{plan.region_name[:64]!r} is no name for a region: use letters, digits, dots, dashes and underscores."
        )
    if plan.public_url and not re.fullmatch(r"https?://[^/\s\"]+", plan.public_url):
        raise MicronovaError(f"--public-url {plan.public_url!r} is no scheme://HOST or scheme://HOST:PORT.")


def _say(plan: RegionPlan) -> None:
    click.echo(f"The region is in {plan.directory}. It has secrets: let nobody else read it.\n")
    for name, meaning in (
        ("etc/", f"settings of the control nodes, for {plan.config_directory}: what all processes share, and NAME.env"),
        ("postgresql.sql", "role and database, for an administrator of PostgreSQL"),
        ("broker.sh", "the user of the control nodes, for an administrator of RabbitMQ"),
        ("systemd/", "units: micronova@NAME.service for each NAME.env, micronova-host.service for hosts"),
        ("state/identity/", "keys of tokens and the passwords of admin and demo, for /var/lib/micronova-identity"),
        ("clouds.yaml", "settings of clients: OS_CLOUD=micronova is the admin, micronova-demo a plain member"),
        ("proxy.conf", "an example for nginx in front of all services"),
    ):
        click.echo(f"  {name:<17}{meaning}")
    if plan.tls:
        click.echo("  authority/       the key of the region's certificate authority: keep it away from all machines")
    if plan.is_for_trial:
        click.echo(f"\nmicronova region up --dir {plan.directory}    runs it on this machine, for a trial.")
    else:
        click.echo("\nWhen it runs, on a control node, for each compute host:\n")
        for host in plan.hosts:
            settings = plan.config_directory / plan.settings.name
            click.echo(f"micronova host add {host} --settings {host}.toml --config {settings} > {host}.sh")
    click.echo("\ndocs/region.md says what to do with each file.")
    if not plan.tls and not plan.on_one_machine:
        click.echo(
            "Warning: without --tls passwords and tokens cross the network in clear, and whoever can change packets "
            "controls the cloud: add --tls, or use this region in a network that only its own machines reach.",
            err=True,
        )
