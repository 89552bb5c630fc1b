"""`micronova fleet-simulate`: a trace of requests, decided by the scheduler over a synthetic fleet."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from micronova.objects.errors import Invalid

if TYPE_CHECKING:
    from micronova.fleetsim.fleet import FleetModel
    from micronova.fleetsim.policies import Policy
    from micronova.fleetsim.simulation import Experiment, Outcome
    from micronova.fleetsim.trace import Request

SYNTHETIC = "synthetic"
_REQUESTS_PER_HOST = 20
_LEAST_REQUESTS = 2_000


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What the command was given; None is what it was not given."""

    hosts: int
    fleet: Path | None
    requests: str
    count: int | None
    load: float | None
    days: float | None
    seed: int
    policies: tuple[str, ...]
    build_time: float
    output: Path
    as_json: bool
    trace: Path | None


def fleet_simulate(options: SimulationOptions) -> None:
    """Simulate and report, or only write a trace."""
    fleet = _fleet(options)
    if options.trace is not None:
        _write_trace(options, options.trace, fleet)
        return
    policies = _policies(options.policies)
    experiment = _experiment(options, fleet, policies)
    with _refusing("--output"):
        options.output.mkdir(parents=True, exist_ok=True)  # before the work, in case that it cannot be made
    outcomes = _simulate(experiment, policies)
    with _refusing("--output"):
        _write(experiment, outcomes, options.output)
    from micronova.fleetsim.report import report

    found = report(experiment, outcomes)
    if options.as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    _show(found)
    click.echo(f"Plots and all figures: {options.output}/")


@contextmanager
def _refusing(option: str) -> Iterator[None]:
    """Turn an error in what an option names into a usage error: exit 2."""
    try:
        yield
    except Invalid as error:
        raise click.BadParameter(error.message, param_hint=option) from None
    except OSError as error:
        message = f"Cannot use {error.filename}: {error.strerror}; name another place."
        raise click.BadParameter(message, param_hint=option) from None


def _fleet(options: SimulationOptions) -> "FleetModel":
    from micronova.fleetsim.fleet import DEFAULT_FLEET, read_fleet

    if options.fleet is None:
        return DEFAULT_FLEET
    with _refusing("--fleet"):
        return read_fleet(options.fleet)


def _policies(given: Sequence[str]) -> "list[Policy]":
    from micronova.fleetsim.policies import parse_policy

    with _refusing("--policy"):
        policies = [parse_policy(each) for each in given or ("spread",)]
        names = [each.name for each in policies]
        if twice := [name for name in names if names.count(name) > 1]:
            raise Invalid(f"Two policies have the name {twice[0]}: give each another one.")
    return policies


def _requests(options: SimulationOptions, fleet: "FleetModel") -> "list[Request]":
    if options.requests == SYNTHETIC:
        from micronova.fleetsim.generator import generate

        count = options.count or max(options.hosts * _REQUESTS_PER_HOST, _LEAST_REQUESTS)
        load = 1.0 if options.load is None else options.load
        with _refusing("--load"):
            return generate(fleet, options.hosts, count, load=load, days=options.days, seed=options.seed)
    for name, value in (("--count", options.count), ("--load", options.load), ("--days", options.days)):
        if value is not None:
            raise click.UsageError(f"{name} is for synthetic traces: leave it out, or leave out --requests.")
    from micronova.fleetsim.trace import read_trace

    with _refusing("--requests"):
        return read_trace(Path(options.requests))


def _experiment(options: SimulationOptions, fleet: "FleetModel", policies: "Sequence[Policy]") -> "Experiment":
    from micronova.fleetsim.simulation import Experiment, check

    experiment = Experiment(
        fleet=fleet,
        hosts=options.hosts,
        requests=_requests(options, fleet),
        seed=options.seed,
        build_time=options.build_time,
    )
    with _refusing("--requests" if options.requests != SYNTHETIC else "--policy"):
        check(experiment, policies)
    return experiment


def _write_trace(options: SimulationOptions, path: Path, fleet: "FleetModel") -> None:
    from micronova.fleetsim.trace import write_trace

    if options.requests != SYNTHETIC or options.policies:
        raise click.UsageError("--write-trace writes a synthetic trace and simulates nothing: leave out the rest.")
    requests = _requests(options, fleet)
    with _refusing("--write-trace"):
        write_trace(path, requests)
    servers = sum(each.count for each in requests)
    click.echo(f"{path}: {len(requests):,} requests for {servers:,} servers in {_length(requests[-1].at)}")


def _simulate(experiment: "Experiment", policies: "Sequence[Policy]") -> "list[Outcome]":
    from micronova.fleetsim.simulation import simulate

    run = partial(simulate, experiment, timer=time.thread_time)
    if not sys.stderr.isatty():
        return [asyncio.run(run(policy=policy)) for policy in policies]
    with _bars(len(experiment.requests)) as bar:
        return [asyncio.run(run(policy=policy, progress=bar(policy.name))) for policy in policies]


@contextmanager
def _bars(total: int) -> "Iterator[Callable[[str], Callable[[int], None]]]":
    """Show a progress bar for each policy, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    every = max(1, total // 1000)
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def begin(name: str) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)

            def advance(done: int) -> None:
                if done % every == 0 or done == total:
                    progress.update(task, completed=done)

            return advance

        yield begin


def _write(experiment: "Experiment", outcomes: "Sequence[Outcome]", directory: Path) -> None:
    from micronova.fleetsim.report import plots, report

    (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report(experiment, outcomes))))
    for name, content in plots(experiment, outcomes).items():
        (directory / name).write_text(content)


def _show(found: dict[str, Any]) -> None:
    """Print the policies side by side."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from micronova.fleetsim.report import CLASSES

    policies = found["policies"]
    first = policies[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for each in policies:
        table.add_column(each["policy"], justify="right")
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("servers placed", lambda each: f"{each['placed_servers']:,}"),
        ("servers refused", lambda each: f"{each['refused_servers']:,} ({_percent(each, 'refused_servers')})"),
    ]
    lacking = {name for each in policies for name in each["refused_servers_by_category"]}
    rows += [(f"  for lack of {name}", _refused(name)) for name in sorted(lacking)]
    rows += [
        ("decisions per second", lambda each: f"{each['decisions_per_second']:,.0f}"),
        ("servers per second", lambda each: f"{each['servers_per_second']:,.0f}"),
        ("decision, p50/p99", lambda each: f"{each['decision_ms_p50']:.2f}/{each['decision_ms_p99']:.2f} ms"),
    ]
    rows += [(f"{CLASSES.get(name, name)} used, mean/most", _used(name)) for name in first["used"]]
    rows += [
        ("unusable memory, mean/most", lambda each: _mean_and_most(each["unusable_memory"])),
        (
            f"room for {first['largest_flavor']}, mean/least",
            lambda each: f"{each['largest_flavor_fits']['mean']:,.0f}/{each['largest_flavor_fits']['least']:,.0f}",
        ),
        (
            "empty hosts, mean/least",
            lambda each: f"{each['hosts_without_servers']['mean']:,.0f}/{each['hosts_without_servers']['least']:,.0f}",
        ),
    ]
    for name, show in rows:
        table.add_row(name, *(show(each) for each in policies))
    console = Console()
    length = _length(found["simulated_seconds"])
    requested = f"{first['requests']:,} requests for {first['servers']:,} servers"
    console.print(f"{found['hosts']:,} hosts, {requested} in {length}, seed {found['seed']}", highlight=False)
    console.print(table)


def _length(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 2 * 3600 else f"{seconds / 60:.1f} minutes"


def _percent(each: dict[str, Any], name: str) -> str:
    return f"{100 * each[name] / each['servers']:.2f} %"


def _refused(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda each: f"{each['refused_servers_by_category'].get(name, 0):,}"


def _used(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda each: _mean_and_most(each["used"][name])


def _mean_and_most(values: dict[str, float]) -> str:
    return f"{100 * values['mean']:.1f}/{100 * values['most']:.1f} %"
