"""The figures as a table, Nova's beside ours."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.perf.nova import FIGURES

TIMES = "\N{MULTIPLICATION SIGN}"

ACTIONS = ("stop", "start", "reboot", "rebuild", "snapshot", "resized", "migrated", "shelve", "unshelve")
# What a row shows: its words, where its figure is, and whether more is better. An empty row divides.
ROWS: tuple[tuple[str, str, bool], ...] = (
    ("empty directory or database → first ACTIVE, s", "start.seconds", False),
    ("  CPU s", "start.cpu_s", False),
    ("start with state → first ACTIVE, s", "restart.seconds", False),
    ("  CPU s", "restart.cpu_s", False),
    ("", "", False),
    ("boot: ms CPU per server", "boot.cpu_ms_each", False),
    ("boot: servers/s", "boot.servers_per_s", True),
    ("bulk: ms CPU per server", "bulk.cpu_ms_each", False),
    ("bulk: servers/s", "bulk.servers_per_s", True),
    ("one boot on an idle cloud, ms", "boot_one.boot.p50_ms", False),
    ("POST on an idle cloud, ms", "boot_one.post.p50_ms", False),
    ("POST back to back, one client, ms", "post.post.p50_ms", False),
    ("POST, 8 clients, ms", "boot.post.p50_ms", False),
    ("delete: ms CPU per server", "delete.cpu_ms_each", False),
    ("delete: servers/s", "delete.servers_per_s", True),
    ("", "", False),
    *((f"{name}: ms CPU", f"actions.{name}.cpu_ms_each", False) for name in ACTIONS),
    ("", "", False),
    ("detail of 100: ms CPU", "lists.detail_100.cpu_ms_each", False),
    ("detail of 100: ms", "lists.detail_100.p50_ms", False),
    ("detail of 500: ms CPU", "lists.detail_500.cpu_ms_each", False),
    ("detail of 500: ms", "lists.detail_500.p50_ms", False),
    ("brief list of 500: ms CPU", "lists.brief_500.cpu_ms_each", False),
    ("show: ms CPU", "show.cpu_ms_each", False),
    ("show: requests/s", "show.requests_per_s", True),
    ("versions: ms CPU", "floor.cpu_ms_each", False),
    ("versions: requests/s", "floor.requests_per_s", True),
    ("", "", False),
    ("memory idle: PSS MiB", "memory.idle.pss_mib", False),
    ("  RSS MiB", "memory.idle.rss_mib", False),
    ("  processes", "memory.idle.processes", False),
    ("memory after the boots: PSS MiB", "memory.after.pss_mib", False),
    ("memory with 500 servers: PSS MiB", "memory.full.pss_mib", False),
    ("idle: ms CPU per second", "idle.cpu_ms_per_s", False),
)


def look_up(figures: Mapping[str, Any], path: str) -> float | None:
    """Return a figure by its dotted path: the median, where there were several runs."""
    found: Any = figures
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    figure: float = found["median"] if isinstance(found, Mapping) else found
    return figure


def show(results: list[dict[str, Any]], scheduler: Mapping[str, float]) -> None:
    """Print all results side by side."""
    table = Table(
        title=f"Medians; {TIMES} says how many times better than Nova 34 (tests/perf/nova.py)", title_justify="left"
    )
    table.add_column("")
    table.add_column("Nova 34", justify="right")
    for result in results:
        table.add_column(result["title"], justify="right")
        table.add_column(TIMES, justify="right", style="bold")
    for words, path, more in ROWS:
        if not words:
            table.add_section()
            continue
        nova = FIGURES.get(path)
        cells: list[str] = []
        for result in results:
            cells += _cells(look_up(result, path), nova, more)
        table.add_row(words, _number(nova), *cells)
    Console(width=None if Console().is_terminal else 150).print(table)
    if scheduler:
        _show_scheduler(scheduler)
    for result in results:
        for problem in result.get("problems", ()):
            Console().print(f"[red]{result['title']}: {problem}")


def _show_scheduler(scheduler: Mapping[str, float]) -> None:
    table = Table(title="One scheduling decision: filters and weighers, in the process, ms", title_justify="left")
    for title in ("hosts", "Nova 34", "ours", TIMES):
        table.add_column(title, justify="right")
    for hosts, milliseconds in scheduler.items():
        nova = FIGURES.get(f"scheduler.{hosts}")
        table.add_row(hosts, _number(nova), *_cells(milliseconds, nova, more=False))
    Console().print(table)


def _cells(ours: float | None, nova: float | None, more: bool) -> tuple[str, str]:
    if not ours or not nova:
        return _number(ours), ""
    return _number(ours), _number(ours / nova if more else nova / ours)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
