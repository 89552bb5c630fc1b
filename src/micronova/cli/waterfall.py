"""A server's boot, drawn in the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 40


def draw(found: dict[str, Any], console: Console | None = None) -> None:
    """Print one bar for each action and event, on a common scale of time."""
    console = console or Console()
    server = found["server"]
    bars = []
    for action in found["actions"]:
        bars.append((action["action"], action["start_time"], action["finish_time"], "", action["message"]))
        for event in found["events"]:
            if event["request_id"] == action["request_id"]:
                bars.append(
                    (
                        f"  {event['event']}",
                        event["start_time"],
                        event["finish_time"],
                        event["host"] or "",
                        event["result"],
                    )
                )
    if not bars:
        console.print(f"Server {server['name']} has no recorded actions.")
        return
    for title, group in _by_action(bars):
        _draw_group(console, f"{server['name']} ({server['uuid']}): {title}", group)


def _by_action(bars: list[tuple[Any, ...]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    groups: list[tuple[str, list[tuple[Any, ...]]]] = []
    for bar in bars:
        if not bar[0].startswith("  "):
            groups.append((bar[0], []))
        groups[-1][1].append(bar)
    return groups


def _draw_group(console: Console, title: str, bars: list[tuple[Any, ...]]) -> None:
    begin = min(bar[1] for bar in bars)
    end = max([bar[2] or bar[1] for bar in bars] + [begin + 1])
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("step", "host", "starts", "takes", "", "result"):
        table.add_column(name, justify="right" if name in ("starts", "takes") else "left", no_wrap=name == "")
    for name, start, finish, host, result in bars:
        left = round((start - begin) / (end - begin) * WIDTH)
        length = max(1, round(((finish or end) - start) / (end - begin) * WIDTH))
        bar = " " * left + ("█" if finish else "░") * min(length, WIDTH - left or 1)
        takes = f"{(finish - start) / 1000:.1f} ms" if finish else "running"
        table.add_row(name, host, f"{(start - begin) / 1000:.1f} ms", takes, bar, result or "")
    console.print(table)
