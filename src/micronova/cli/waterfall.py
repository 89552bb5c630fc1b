"""A server's life, drawn in the terminal: each action as a waterfall of its steps."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

WIDEST, NARROWEST = 40, 8  # of the bars: what the terminal has left beside the words

Found = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One step; times are microseconds since the epoch. Without an end it goes on."""

    name: str
    start: int
    finish: int | None
    host: str = ""
    result: str = ""
    details: str = ""


def draw(found: Found, console: Console | None = None) -> None:
    """Print each action of a server, and how the scheduler decided."""
    console = console or Console()
    server = found["server"]
    if not found["actions"]:
        console.print(f"Server {server['name']} has no recorded actions.")
    for action in found["actions"]:
        request = action["request_id"]
        events = [event for event in found["events"] if event["request_id"] == request]
        operation = next((each for each in found["operations"] if each["request_id"] == request), None)
        title = f"{server['name']} ({server['uuid']}): [bold]{action['action']}[/bold], {_outcome(action, operation)}"
        console.print(title, highlight=False)
        _draw_bars(console, bars_of(action, events, operation))
        for line in explain(operation):
            console.print(line, highlight=False)
    if server["fault"]:
        console.print(f"fault: {server['fault']['message']}", highlight=False)


def _outcome(action: Found, operation: Found | None) -> str:
    if action["finish_time"] is None:
        return "goes on"
    # An action is marked as failed by any event that failed, also if a later one made up for it.
    failed = action["message"] if operation is None or operation["result"] is None else operation["result"] == "error"
    return f"{'failed' if failed else 'done'} after {_ms(action['finish_time'] - action['start_time'])}"


def bars_of(action: Found, events: list[Found], operation: Found | None) -> list[Bar]:
    """Give the steps of an action; of a build each try in detail, as long as its operation is remembered."""
    since = action["start_time"]
    bars: list[Bar] = []
    left = list(events)
    for attempt in operation["attempts"] if operation else ():
        event = next((each for each in left if each["host"] == attempt["host"]), None)
        if event is not None:
            left.remove(event)
        bars += _attempt_bars(since, attempt, event)
        since = bars[-1].finish or bars[-1].start
    for event in left:
        start, finish = event["start_time"], event["finish_time"]
        if not bars and start > since:
            if start == finish:
                start = since  # only its end was recorded
            else:
                bars.append(Bar("wait for a conductor", since, start))
        bars.append(Bar(event["event"], start, finish, event["host"] or "", *_result(event)))
    return bars or [Bar(action["action"], since, action["finish_time"])]


def _attempt_bars(since: int, attempt: Found, event: Found | None) -> list[Bar]:
    """Give one try: up to the order by the conductor's clock, then by the host's, made to fit if that is wrong."""
    host = attempt["host"]
    bars = [
        Bar("wait for a conductor", since, attempt["begun"]),
        Bar("choose and claim a host", attempt["begun"], attempt["placed"]),
    ]
    ready = attempt["placed"]
    if attempt["networked"]:
        bars.append(Bar("prepare the network", ready, attempt["networked"]))
        ready = attempt["networked"]
    sent = attempt["dispatched"]
    bars.append(Bar("hand over to the host", ready, sent))
    end = event["finish_time"] if event is not None else None
    if not attempt["started"] or end is None:
        bars.append(Bar("build on the host", sent, end, host, *_result(event)))
        return bars
    started = min(max(attempt["started"], sent), end)
    finished = min(max(attempt["finished"], started), end)
    return [
        *bars,
        Bar("order on its way", sent, started, host),
        Bar("build on the host", started, finished, host),
        Bar("report and record", finished, end, host, *_result(event)),
    ]


def _result(event: Found | None) -> tuple[str, str]:
    if event is None or event["result"] is None:
        return "", ""
    return str(event["result"]), event["details"] or ""


def explain(operation: Found | None) -> list[str]:
    """Say how the scheduler decided: which filter left which hosts, which weighers chose among them."""
    decision = operation["explanation"] if operation else None
    if not decision:
        return []
    if decision.get("forced"):
        return ["scheduler: the host was named by an admin; no filter was asked"]
    lines = [f"scheduler: {_count(decision['hosts'], 'host')}"]
    silent = 0
    for step in decision.get("filters", ()):
        if step.get("error"):
            lines.append(f"  {step['name']} failed and was passed over: {step['error']}")
        elif step["removed"]:
            lines.append(f"  {step['name']} removed {step['removed']}, left {step['remaining']}")
        else:
            silent += 1
    if silent:
        lines.append(f"  {_count(silent, 'filter')} removed none")
    chosen = {attempt["host"] for attempt in operation["attempts"]} if operation else set()
    for winner in decision.get("winners", ()):
        if winner["host"] in chosen:
            parts = ", ".join(f"{name} {weight:+.2f}" for name, weight in winner.get("weighers", {}).items())
            lines.append(f"  chose {winner['host']}, weight {winner.get('weight', 0.0):.2f} ({parts or 'no weigher'})")
            break
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _draw_bars(console: Console, bars: list[Bar]) -> None:
    begin = min(bar.start for bar in bars)
    end = max([bar.finish or bar.start for bar in bars] + [begin + 1])
    noted = any(bar.result for bar in bars)
    table = Table(show_edge=False, pad_edge=False)
    for name in ("step", "host", "starts", "takes", "", *(["result"] if noted else [])):
        table.add_column(name, justify="right" if name in ("starts", "takes") else "left", no_wrap=True)
    words = sum(max(len(getattr(bar, part)) for bar in bars) for part in ("name", "host"))
    noted_width = max(len(bar.result) for bar in bars) + 3 if noted else 0
    width = max(NARROWEST, min(WIDEST, console.width - words - noted_width - 32))
    for bar in bars:
        finish = bar.finish or end
        left = min(width - 1, int((bar.start - begin) / (end - begin) * width))
        length = max(1, round((finish - bar.start) / (end - begin) * width))
        line = " " * left + ("█" if bar.finish else "░") * min(length, width - left)
        takes = _ms(bar.finish - bar.start) if bar.finish else "goes on"
        row = [bar.name, bar.host, _ms(bar.start - begin), takes, f"{line:<{width}}"]
        table.add_row(*row, *([bar.result] if noted else []))
    console.print(table)
    for bar in bars:  # sentences, for which a column has no room
        if bar.details:
            console.print(f"{bar.name}: {bar.details}", highlight=False, markup=False)


def _ms(micros: int) -> str:
    return f"{micros / 1000:.1f} ms"
