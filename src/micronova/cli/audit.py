"""`micronova audit`: compare the records with what the hypervisors and the services hold, and repair what differs."""

import asyncio
import os
import pwd
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from micronova.cli.state import StateDirectory, ask, default_directory
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError
from micronova.objects.ids import new_uuid
from micronova.telemetry.logs import one_line

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.conductor.findings.finding import Finding, RepairDependencies
    from micronova.conductor.host_guests import ReportProgress

WRONG, INCOMPLETE = 1, 3
"""Exit codes: something is wrong; nothing is wrong in what was compared, and something did not answer."""
MANY_HOSTS = 500
"""With more hosts than these, the audit shows its progress."""
MANY_IMAGES = 500
"""Each time that the image service has answered about so many images, the audit shows it."""
MOST_ROUNDS = 5
"""Audits with repairs: what is repaired may uncover something else."""


class _Cloud:
    """Where the audit runs: in a process that is asked over its control socket, or here.

    Here it connects to the database and the broker once, however many repairs follow and however long the operator
    thinks about them: a thread keeps the connections.
    """

    def __init__(self, directory: Path | None, config: Path | None) -> None:
        self._directory, self._config = directory, config
        self._connection: _Connection | None = None
        self.removable: set[str] = set()  # guests that one of the audits has found and could remove

    def __enter__(self) -> "_Cloud":
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def audit(self) -> dict[str, Any]:
        """Return the findings, and the hosts that are down."""
        if self._config is None:
            found = ask(self._control, "/audit")
        else:
            run = partial(_report, progress=_show_progress, image_progress=_show_images)
            found = self._connected(run)
        report: dict[str, Any] = found
        self.removable |= {
            each["subject"]
            for each in report["findings"]
            if any(repair["name"] == "remove_guest" for repair in each.get("repairs", ()))
        }
        return report

    def repair(self, wanted: dict[str, Any]) -> str:
        """Make a repair; return what was changed."""
        if self._config is None:
            return str(ask(self._control, "/repair", method="POST", body=wanted))
        return str(self._connected(partial(run_repair, wanted=wanted)))

    @property
    def _control(self) -> Path:
        return StateDirectory(self._directory or default_directory()).control

    def _connected(self, work: Callable[["Process"], Coroutine[Any, Any, Any]]) -> Any:
        if self._connection is None:
            assert self._config is not None
            self._connection = _Connection(self._config, self._directory)
        return self._connection.run(work)


class _Connection:
    """A process that is connected to the database and the broker of a settings file, in a thread of its own."""

    def __init__(self, config: Path, directory: Path | None) -> None:
        self._begun: Future[tuple[asyncio.AbstractEventLoop, Process]] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._keep, args=(config, directory), name="audit")
        self._thread.start()

    def _keep(self, config: Path, directory: Path | None) -> None:
        from micronova.cli.wiring import run_connected

        try:
            run_connected(config, directory, self._wait, without_bus=True)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the connection gets it
            if not self._begun.done():
                self._begun.set_exception(error)

    async def _wait(self, process: "Process") -> None:
        self._begun.set_result((asyncio.get_running_loop(), process))
        await self._end.wait()

    def run(self, work: Callable[["Process"], Coroutine[Any, Any, Any]]) -> Any:
        """Do something with the process; raise what prevented the connection."""
        loop, process = self._begun.result()
        return asyncio.run_coroutine_threadsafe(work(process), loop).result()

    def close(self) -> None:
        """End the connections."""
        if self._begun.exception() is None:
            loop, _ = self._begun.result()
            loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def audit(
    directory: Path | None,
    config: Path | None,
    as_json: bool,
    *,
    repair: bool = False,
    yes: bool = False,
    remove_guests: tuple[str, ...] = (),
) -> int:
    """Print the findings, and repair them if that is asked for; return 0 only if there are none in the end."""
    with _Cloud(directory, config) as cloud:
        code = _audit(cloud, as_json, repair=repair, yes=yes, remove_guests=remove_guests)
        unknown = [each for each in remove_guests if each not in cloud.removable]
        for each in unknown:
            _say(f"--remove-guest {each}: the audit finds no such guest that may be removed", err=True)
        return code or (WRONG if unknown else 0)


def _audit(cloud: _Cloud, as_json: bool, *, repair: bool, yes: bool, remove_guests: tuple[str, ...]) -> int:
    if not repair:
        report = cloud.audit()
        return _show(report, as_json)
    done: list[dict[str, str]] = []
    declined: set[bytes] = set()
    for _ in range(MOST_ROUNDS):
        report = cloud.audit()
        before = len(done)
        for found in report["findings"]:
            _repair_one(cloud, found, done, declined, quiet=as_json, yes=yes, remove_guests=remove_guests)
        if len(done) == before:
            break
    else:
        report = cloud.audit()  # without what the last round has repaired
    if not as_json:
        return _show(report, as_json=False)
    click.echo(_json({"repaired": done, "findings": report["findings"]}))
    return _code(report["findings"])


def _repair_one(
    cloud: _Cloud,
    found: dict[str, Any],
    done: list[dict[str, str]],
    declined: set[bytes],
    *,
    quiet: bool,
    yes: bool,
    remove_guests: tuple[str, ...],
) -> None:
    """Ask for the repairs of a finding, except those that were declined before, and make the first that is wanted."""
    repairs = [each for each in found.get("repairs", ()) if msgspec.json.encode(each) not in declined]
    if repairs and not (quiet or yes):
        _say(f"{found['kind']}  {found['subject']}")
        _say(f"  {found['message']}")
    for repair in repairs:
        destroys = repair.get("destroys", False)
        named = repair["name"] == "remove_guest" and found["subject"] in remove_guests
        without_question = named or (yes and not destroys)
        if not without_question and (yes or quiet):
            continue
        if not without_question and not click.confirm(one_line(f"  {repair['text']}"), default=False):
            declined.add(msgspec.json.encode(repair))
            continue
        try:
            result = cloud.repair(repair)
        except MicronovaError as error:
            _say(f"  not repaired: {error.message}", err=True)
            continue
        if result:
            done.append({"kind": found["kind"], "subject": found["subject"], "done": result})
        if not quiet:
            _say(f"  {result or 'The finding has gone.'}")
        return


def _say(text: str, *, err: bool = False) -> None:
    """Print one line, with characters escaped that would begin another one or command the terminal.

    Hosts have written parts of it, and an operator decides by what is printed: a stolen host must not cover it.
    """
    click.echo(one_line(text), err=err)


def _show(report: dict[str, Any], as_json: bool) -> int:
    findings = report["findings"]
    if as_json:
        click.echo(_json(findings))
        return _code(findings)
    for found in findings:
        _say(f"{found['kind']:<12} {found['subject']}  {found['message']}")
        if found.get("repairs"):
            click.echo("             `micronova audit --repair` can do, when it is asked to:")
            for repair in found["repairs"]:
                _say(f"             - {repair['text']}")
        if found.get("advice"):
            _say(f"             {found['advice']}")
    if report["down"]:
        _say(f"not asked, because they are down: {', '.join(report['down'])}", err=True)
    code = _code(findings)
    if code == INCOMPLETE:
        click.echo("nothing is wrong in what could be compared")
    elif not findings:
        click.echo("nothing is wrong")
    return code


def _code(findings: list[dict[str, Any]]) -> int:
    from micronova.conductor.findings.finding import UNASKED

    if not findings:
        return 0
    return INCOMPLETE if all(found["kind"] == UNASKED for found in findings) else WRONG


def _json(data: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def _show_progress(done: int, hosts: int) -> None:
    if hosts > MANY_HOSTS:
        click.echo(f"{done} of {hosts} hosts have answered", err=True)


def _show_images(done: int) -> None:
    if done % MANY_IMAGES == 0:
        click.echo(f"the image service has answered about {done} images", err=True)


def _this_user(host: str) -> str:
    """Return who makes an audit, as USER@MACHINE; with sudo the person, not root."""
    try:
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{host}"[:255]


async def run_audit(
    process: "Process",
    progress: "ReportProgress | None" = None,
    image_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the findings, as plain data, of an audit over the database and the bus of a process.

    The audit is recorded for `micronova status`, as made by the user of this process.
    """
    builtins: list[dict[str, Any]] = msgspec.to_builtins(await _find(process, progress, image_progress))
    return builtins


async def _find(
    process: "Process",
    progress: "ReportProgress | None",
    image_progress: Callable[[int], None] | None,
) -> "list[Finding]":
    from micronova.compute.rpcapi import ComputeAPI
    from micronova.conductor.audit import audit as compare
    from micronova.conductor.findings.finding import UNASKED, Finding
    from micronova.conductor.host_guests import no_progress
    from micronova.conductor.rpcapi import ProbeAPI
    from micronova.db import audits

    assert process.database is not None
    began = micros(process.clock.now())
    findings = await compare(
        process.database,
        ComputeAPI(process.bus) if process.bus is not None else None,
        ProbeAPI(process.bus) if process.bus is not None else None,
        process.clock,
        service_down_time=process.settings.default.service_down_time,
        network=process.clients.network_client(),
        images=process.clients.image_client(),
        volumes=process.clients.volume_client(),
        progress=progress or no_progress,
        image_progress=image_progress,
    )
    if process.bus is None:
        message = "The broker does not answer, so no host and no conductor was asked."
        findings.append(Finding(kind=UNASKED, subject="broker", message=message, advice="See `micronova check`."))
    await process.database.write(
        audits.record,
        new_uuid(process.random),
        began,
        micros(process.clock.now()),
        _this_user(process.host),
        Counter(found.kind for found in findings),
    )
    return findings


async def run_report(process: "Process") -> dict[str, Any]:
    """Return the findings of an audit, and the hosts that are down."""
    return await _report(process, None, None)


async def _report(
    process: "Process",
    progress: "ReportProgress | None",
    image_progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    from micronova.conductor.host_guests import hosts_down

    assert process.database is not None
    findings = await run_audit(process, progress, image_progress)
    down = await hosts_down(process.database, process.clock, process.settings.default.service_down_time)
    return {"findings": findings, "down": down}


async def run_repair(process: "Process", wanted: dict[str, Any]) -> str:
    """Make a repair that a finding offers; return what was changed."""
    from micronova.conductor.findings.finding import Repair
    from micronova.conductor.repairs import repair

    return await repair(_repair_dependencies(process), msgspec.convert(wanted, Repair))


def _repair_dependencies(process: "Process") -> "RepairDependencies":
    from micronova.compute.rpcapi import ComputeAPI
    from micronova.conductor.findings.finding import RepairDependencies
    from micronova.objects.pci_devices import parse_aliases

    assert process.database is not None
    return RepairDependencies(
        database=process.database,
        clock=process.clock,
        random=process.random,
        compute=ComputeAPI(process.bus) if process.bus is not None else None,
        network_client=process.clients.network_client(),
        image_client=process.clients.image_client(),
        volume_client=process.clients.volume_client(),
        pci_aliases=parse_aliases(process.settings.pci.alias),
    )
