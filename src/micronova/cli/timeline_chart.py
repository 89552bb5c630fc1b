"""The actions of a server, drawn in the terminal: one line for each step, with a bar that shows when it ran."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from micronova.objects.explanation import counted

WIDEST, NARROWEST = 40, 8  # characters of the bars; they get what the words leave of the line
HOST_WIDTH = 16

Found = dict[str, Any]

# What people read instead of the names of events, which are Nova's.
STEPS = {
    "conductor_schedule_and_build_instances": "schedule and claim",
    "compute__do_build_and_run_instance": "image, plug, spawn",
    "compute_terminate_instance": "delete the guest",
}


@dataclass(frozen=True)
class Bar:
    """One step; times are microseconds since 1970 (UTC). A step without `finish` still runs."""

    name: str
    start: int
    finish: int | None
    host: str = ""
    result: str = ""
    details: str = ""


def draw(found: Found, console: Console | None = None) -> None:
    """Print each action of a server and the scheduler's decision."""
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
    fault = server["fault"]
    if fault and fault["message"] not in {event["details"] for event in found["events"]}:  # those are drawn above
        console.print(f"fault: {fault['message']}", highlight=False, markup=False)


def _outcome(action: Found, operation: Found | None) -> str:
    if action["finish_time"] is None:
        return "still runs"
    # Any event that failed marks its action as failed, even if a later attempt succeeded.
    failed = action["message"] if operation is None or operation["result"] is None else operation["result"] == "error"
    return f"{'failed' if failed else 'done'} after {_duration(action['finish_time'] - action['start_time'])}"


def bars_of(action: Found, events: list[Found], operation: Found | None) -> list[Bar]:
    """Return the steps of an action. While the operation of a build is kept, each attempt is shown in detail."""
    since = action["start_time"]
    bars: list[Bar] = []
    left = list(events)
    for times in operation["dispatches"] if operation else ():
        event = next((each for each in left if each["host"] == times["host"]), None)
        if event is not None:
            left.remove(event)
        bars += _build_bars(since, times, event)
        since = bars[-1].finish or bars[-1].start
    for event in left:
        start, finish = event["start_time"], event["finish_time"]
        if not bars and start > since:
            if start == finish:
                start = since  # only its end was recorded
            else:
                bars.append(Bar("wait for a conductor", since, start))
        bars.append(Bar(_step(event["event"]), start, finish, event["host"] or "", *_result(event)))
    return bars or [Bar(action["action"], since, action["finish_time"])]


def _step(event: str) -> str:
    """Return the words for an event: reboot for compute_reboot_instance."""
    plain = event.removeprefix("compute_").removeprefix("conductor_").removesuffix("_instance").replace("_", " ")
    return STEPS.get(event, plain)


def _build_bars(since: int, times: Found, event: Found | None) -> list[Bar]:
    """Return the steps of one attempt. Times of the host's clock are limited to those of the conductor's."""
    host = times["host"]
    bars = [
        Bar("wait for a conductor", since, times["begun"]),
        Bar("schedule and claim", times["begun"], times["placed"]),
    ]
    ready = times["placed"]
    if times["networked"]:
        bars.append(Bar("bind ports", ready, times["networked"]))
        ready = times["networked"]
    sent = times["dispatched"]
    bars.append(Bar("send to the host", ready, sent))
    end = event["finish_time"] if event is not None else None
    if not times["started"] or end is None:
        bars.append(Bar("image, plug, spawn", sent, end, host, *_result(event)))
        return bars
    started = min(max(times["started"], sent), end)
    finished = min(max(times["finished"], started), end)
    return [
        *bars,
        Bar("wait for the host", sent, started, host),
        Bar("image, plug, spawn", started, finished, host),
        Bar("report", finished, end, host, *_result(event)),
    ]


def _result(event: Found | None) -> tuple[str, str]:
    if event is None or event["result"] is None:
        return "", ""
    return str(event["result"]), event["details"] or ""


def explain(operation: Found | None) -> list[str]:
    """Return how the scheduler decided, for each attempt: what filters removed, and the weights of the chosen host."""
    last = operation["explanation"] if operation else None
    if not last:
        return []
    explanations = [*last.get("earlier", ()), last]
    chosen = {times["host"] for times in operation["dispatches"]} if operation else set()
    if len(explanations) == 1:
        return _explain_one(last, chosen, "scheduler")
    return [
        line
        for number, explanation in enumerate(explanations, start=1)
        for line in _explain_one(explanation, chosen, f"scheduler, attempt {number}")
    ]


def _explain_one(explanation: Found, chosen: Collection[str], title: str) -> list[str]:
    if explanation.get("forced"):
        return [f"{title}: an admin named the host"]
    lines = [f"{title}: {counted(explanation['hosts'], 'host')}"]
    silent = 0
    for step in explanation.get("filters", ()):
        if step.get("error"):
            lines.append(f"  {step['name']} failed and let no host pass: {step['error']}")
        elif step["removed"]:
            lines.append(f"  {step['name']} removed {step['removed']}, left {step['remaining']}")
        else:
            silent += 1
    if silent:
        lines.append(f"  {counted(silent, 'filter')} removed none")
    for winner in [each for each in explanation.get("winners", ()) if each["host"] in chosen][:1]:
        parts = ", ".join(f"{name} {weight + 0.0:+.2f}" for name, weight in winner.get("weighers", {}).items())
        if parts:
            lines.append(f"  chose {winner['host']}, weight {winner.get('weight', 0.0):.2f} ({parts})")
        else:
            left = [explanation["hosts"], *(step["remaining"] for step in explanation.get("filters", ()))][-1]
            lines.append(f"  chose {winner['host']} ({'the only host left' if left == 1 else 'all have one weight'})")
    return lines


def _draw_bars(console: Console, bars: list[Bar]) -> None:
    begin = min(bar.start for bar in bars)
    end = max([bar.finish or bar.start for bar in bars] + [begin + 1])
    starts = max(len("starts"), *(len(_duration(bar.start - begin)) for bar in bars))
    takes = max(len("takes"), *(len(_takes(bar)) for bar in bars))
    hosts = min(HOST_WIDTH, max(len("host"), *(len(bar.host) for bar in bars)))
    results = max(len("result"), *(len(bar.result) for bar in bars)) if any(bar.result for bar in bars) else 0
    numbers = hosts + starts + takes + results + 2 * 5
    names = min(max(len(bar.name) for bar in bars), max(20, console.width - numbers - NARROWEST))
    width = max(NARROWEST, min(WIDEST, console.width - numbers - names))

    def line(name: str, host: str, start: str, length: str, drawn: str, result: str) -> None:
        words = f"{_fit(name, names)}  {_fit(host, hosts)}  {start:>{starts}}  {length:>{takes}}"
        text = f"{words}  {drawn:<{width}}  {result}".rstrip()
        console.print(text, highlight=False, markup=False, no_wrap=True, overflow="crop")

    line("step", "host", "starts", "takes", "", "result" if results else "")
    for bar in bars:
        left = min(width - 1, int((bar.start - begin) / (end - begin) * width))
        filled = max(1, round(((bar.finish or end) - bar.start) / (end - begin) * width))
        drawn = " " * left + ("█" if bar.finish else "░") * min(filled, width - left)
        line(bar.name, bar.host, _duration(bar.start - begin), _takes(bar), drawn, bar.result)
    for bar in bars:
        if bar.details:
            console.print(f"{bar.name}: {bar.details}", highlight=False, markup=False)


def _takes(bar: Bar) -> str:
    return _duration(bar.finish - bar.start) if bar.finish else "still runs"


def _fit(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def _duration(micros: int) -> str:
    return f"{micros / 1000:.1f} ms" if micros < 10_000_000 else f"{micros / 1_000_000:.1f} s"
