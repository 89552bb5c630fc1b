"""`micronova check`: whether a cloud with these settings can work. It changes nothing."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from micronova.cli.checks.shape import CONTROL_ROLES, HOST_ROLES, Check, CheckResult, Finding, Subject
from micronova.cli.names import EMBEDDED_ROLES, ROLES
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings, SettingsError, load, options, shown
from micronova.objects.errors import MicronovaError

TOGETHER: Final = {
    "default.secret_key": ("api", "conductor", "identity", "volume"),
    "default.other_secret_keys": ("api", "conductor", "identity", "volume"),
    "default.transport_url": (),
    "default.control_users": (*CONTROL_ROLES, *HOST_ROLES),
    "default.reclaim_instance_interval": ("api", "conductor"),
    "default.service_down_time": ("api", "conductor", "scheduler"),
    "database.connection": ("api", "metadata", "conductor", "scheduler"),
    "filter_scheduler.enabled_filters": ("api", "scheduler"),
    "glance.ticket_key": ("api", "conductor", "image"),
    "identity.region_name": ("api", "conductor", *EMBEDDED_ROLES),
    "neutron.ticket_key": ("metadata", "conductor", "network"),
    "pci.alias": ("api", "conductor", "scheduler"),
}
"""Settings that must be the same in the files of several roles; of transport_url only the vhost is compared."""


def check(roles: Sequence[str], configs: Sequence[Path], directory: Path | None, *, as_json: bool) -> int:
    """Print one line for each check; return 1 if one fails. What could not be found out is marked and no failure."""
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise SettingsError(f"There is no role {unknown[0]}: choose from {', '.join(ROLES)}.")
    results: list[CheckResult] = []

    def say(result: CheckResult) -> None:
        results.append(result)
        if not as_json:
            click.echo(result.line())

    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what a check finds, it says itself
    try:
        asyncio.run(report(roles, configs, directory, say))
    finally:
        logging.disable(logged)
    failed = any(result.outcome == "error" for result in results)
    if as_json:
        document = {"ok": not failed, "checks": results}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    return 1 if failed else 0


async def report(
    roles: Sequence[str], configs: Sequence[Path], directory: Path | None, say: Callable[[CheckResult], None]
) -> None:
    """Check each settings file for the roles, and whether the files fit together; `say` gets each result."""
    subjects: list[Subject] = []
    files: Sequence[Path | None] = configs or [None]
    for file in files:
        label = str(file) if len(files) > 1 else ""
        try:
            settings = load(file)
            say(CheckResult("settings", tuple(roles), "ok", file=label))
            subjects.append(_subject(settings, roles, file, directory))
        except MicronovaError as error:
            right = "a file that `micronova run --config FILE` accepts, as the message says"
            say(CheckResult("settings", tuple(roles), "error", _named_in(error.message), error.message, right, label))
    try:
        for subject in subjects:
            label = str(subject.file) if len(files) > 1 else ""
            # All ask at the same time; the report has the order of the list.
            running = [asyncio.ensure_future(each.run(subject)) for each in _checks(subject)]
            for task in running:
                for result in await task:
                    say(msgspec.structs.replace(result, file=label))
        for result in _compared(subjects):
            say(result)
    finally:
        for subject in subjects:
            await subject.close()


def _named_in(message: str) -> str:
    """Return the first setting that a message names, "" if it names none."""
    known = {name for name, *_ in options()}
    return next((word for word in re.findall(r"\b[a-z_]+\.[a-z_0-9]+\b", message) if word in known), "")


def _subject(settings: Settings, roles: Sequence[str], file: Path | None, directory: Path | None) -> Subject:
    """Return what is checked. Without roles, those that such settings are written for."""
    from micronova.cli.maintain import place_of_databases
    from micronova.cli.wiring import Process

    place: StateDirectory = place_of_databases(directory, settings)
    chosen = tuple(role for role in ROLES if role in roles) if roles else _roles_of(settings)
    process = Process(settings, [role for role in chosen if role not in EMBEDDED_ROLES], place)
    if place.has_keys():
        process.keys = place.keys()
    return Subject(settings, chosen, place, process, file, bool(roles))


def _roles_of(settings: Settings) -> tuple[str, ...]:
    """Return the roles that run with such settings: all in one process, those of a host, or the control services."""
    if settings.default.transport_url.startswith("local:"):
        return ROLES
    if not settings.database.connection:
        return HOST_ROLES if settings.neutron.endpoint_override else ("compute",)
    return ("api", "conductor", "scheduler", "metadata")


def _checks(subject: Subject) -> Iterator[Check]:
    """Return the checks of what the roles of a settings file need."""
    from micronova.cli.checks import broker, certificates, databases, machine, own_settings, processes, services

    for each in (*own_settings.CHECKS, *machine.CHECKS, *certificates.CHECKS):
        if subject.among(each.roles):
            yield each
    yield from databases.checks(subject)
    yield from broker.checks(subject)
    yield from services.checks(subject)
    yield from processes.checks(subject)


def _compared(subjects: list[Subject]) -> Iterator[CheckResult]:
    """Compare the settings that must be the same in several files."""
    from micronova.cli.checks.own_settings import value_of

    if len(subjects) < 2:
        return
    differ = []
    for name, roles in TOGETHER.items():
        concerned = [each for each in subjects if not roles or each.among(roles)]
        values = {_comparable(name, value_of(each, name)): each for each in concerned}
        if len(values) > 1:
            texts = ", ".join(f"{each.file} has {_shown(name, each)}" for each in values.values())
            needed = ", ".join(roles) or "all roles"
            differ.append(Finding(name, f"it differs: {texts}", f"the same value for {needed}"))
    everywhere = tuple(role for role in ROLES if any(role in each.roles for each in subjects))
    for each in differ:
        yield CheckResult("the same everywhere", everywhere, "error", each.setting, each.found, each.right)
    if not differ:
        yield CheckResult("the same everywhere", everywhere, "ok")


def _comparable(name: str, value: object) -> str:
    if name != "default.transport_url":
        return repr(value)
    from micronova.rpc.amqp.url import parse

    try:
        return parse(str(value)).vhost
    except MicronovaError:
        return repr(value)


def _shown(name: str, subject: Subject) -> str:
    """Return a value as people may see it, without secrets; "nothing" for an empty one."""
    from micronova.cli.checks.own_settings import value_of

    return str(shown(name, value_of(subject, name))) or "nothing"
