"""What process trees cost: CPU seconds and memory, as the kernel counts them."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(roots: Mapping[int, str]) -> dict[str, float]:
    """Return, by name of the root, the CPU seconds that its tree has used, children that have ended included."""
    used = dict.fromkeys(roots.values(), 0.0)
    for root, _, fields in members(roots):
        used[roots[root]] += sum(map(int, fields[11:15])) / TICK  # utime, stime, cutime, cstime
    return used


def memory(roots: Mapping[int, str]) -> dict[str, Any]:
    """Return RSS and PSS of all trees in MiB, in total and by name of the root.

    PSS is the honest sum: a page that several processes share is counted once, in parts.
    """
    names: dict[str, dict[str, float]] = {}
    for root, pid, _ in members(roots):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has just ended
        sizes = dict(line.split()[:2] for line in text.splitlines()[1:])
        if "Rss:" not in sizes:
            continue
        entry = names.setdefault(roots[root], {"processes": 0, "rss_mib": 0.0, "pss_mib": 0.0})
        entry["processes"] += 1
        entry["rss_mib"] += int(sizes["Rss:"]) / 1024
        entry["pss_mib"] += int(sizes["Pss:"]) / 1024
    total = {key: sum(entry[key] for entry in names.values()) for key in ("processes", "rss_mib", "pss_mib")}
    return {**total, "by_name": names}


def members(roots: Mapping[int, str]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield root, process and the fields of its /proc/PID/stat after the command's name."""
    table: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(directory.name)
        table[pid] = fields
        children.setdefault(int(fields[1]), []).append(pid)
    for root in roots:
        waiting = [root]
        while waiting:
            pid = waiting.pop()
            if pid in table:
                yield root, pid, table[pid]
                waiting += children.get(pid, ())
