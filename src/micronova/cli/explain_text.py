"""The scheduler's decisions as people read them, in lines of at most 80 characters."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from micronova.objects.explanation import FORCED, Explanation, FilterStep, Winner, counted, named, weights_of
from micronova.objects.scheduling import DryRunResult
from micronova.servers.dry_run import DryRunRequest

WIDTH = 80
MOST_LINES = 20  # hosts that are listed


def server_lines(found: dict[str, Any]) -> list[str]:
    """Return all decisions about a server."""
    server = found["server"]
    name = f"{server['name']} ({server['uuid']})"
    if not found["requests"]:
        kept = (
            "The scheduler's decisions are kept for as long as operations are (conductor.keep_finished), and no "
            "operation that is kept has one."
        )
        return [name, *_wrapped(kept, "")]
    lines = [name]
    for request in found["requests"]:
        explanations = msgspec.convert(request["decisions"], list[Explanation])
        state = "" if request["ended"] else ", still runs"
        lines += ["", f"{request['operation']}, request {request['request_id']}{state}"]
        for number, explanation in enumerate(explanations, start=1):
            attempt = f"attempt {number} of {len(explanations)}: " if len(explanations) > 1 else ""
            lines += explanation_lines(explanation, attempt)
    if server["fault"]:
        lines += ["", *_wrapped(f"fault: {server['fault']}", "")]
    return lines


def dry_run_lines(request: DryRunRequest, result: DryRunResult) -> list[str]:
    """Return where servers would go."""
    servers = f"{counted(request.count, 'server')} of flavor {request.flavor}"
    if result.selections:
        lines = [f"{servers} would go to"]
        places = Counter((each.host, each.zone) for each in result.selections)
        for (host, zone), number in list(places.items())[:MOST_LINES]:
            times = f", {number} servers" if number > 1 else ""
            lines.append(f"  {host} (zone {zone}{times})")
        if len(places) > MOST_LINES:
            lines.append(f"  and {len(places) - MOST_LINES} more hosts: --json lists all")
    else:
        lines = _wrapped(f"{servers} would be refused. {result.message}", "")
    lines += ["", *explanation_lines(result.explanation, "")]
    if result.remarks:
        lines += ["", *(line for each in result.remarks for line in _wrapped(each, ""))]
    lines += ["", "Nothing was claimed. Quotas and networks were not looked at."]
    return lines


def explanation_lines(explanation: Explanation, attempt: str) -> list[str]:
    """Return one decision: a table of the filters, and the weights of the chosen hosts."""
    took = f" in {explanation.took / 1000:.1f} ms" if explanation.took else ""
    lines = [f"{attempt}decided among {counted(explanation.hosts, 'host')}{took}"]
    if explanation.forced:
        lines += _wrapped(FORCED, "  ")
    if explanation.filters:
        lines += _table(explanation.filters)
    elif not explanation.forced:
        lines.append("  the filters of this request are not kept any more")
    lines += _winner_lines(explanation.winners)
    if not explanation.winners:
        lines.append("  no host was left" + ("; the scheduler is asked again" if explanation.waits else ""))
    return lines


def _table(steps: Sequence[FilterStep]) -> list[str]:
    width = max(len("filter"), *(len(step.name) for step in steps))
    width = min(width, WIDTH - 2 - 3 * 9)
    lines = [f"  {'filter':<{width}}{'entered':>9}{'removed':>9}{'left':>9}"]
    for step in steps:
        name = step.name if len(step.name) <= width else f"{step.name[: width - 1]}…"
        lines.append(f"  {name:<{width}}{step.entered:>9}{step.removed or '-':>9}{step.remaining:>9}")
        if step.hosts:
            lines += _wrapped(named(step), "      ")
        if step.error:
            lines += _wrapped(f"failed and let no host pass: {step.error}", "      ")
    return lines


def _winner_lines(winners: Sequence[Winner]) -> list[str]:
    lines = []
    for winner in winners[:MOST_LINES]:
        parts = weights_of(winner)
        weight = f", weight {winner.weight:.2f} = {parts}" if parts else ", no weigher preferred another"
        lines += _wrapped(f"chosen: {winner.host}{weight}", "  ", "      ")
    if len(winners) > MOST_LINES:
        lines.append(f"  and {len(winners) - MOST_LINES} more: --json lists all")
    return lines


def _wrapped(text: str, first: str, others: str | None = None) -> list[str]:
    following = first if others is None else others
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=following)
