"""How often hosts send heartbeats: less often, the more hosts there are, but within every lease."""

import math

BEATS_PER_SECOND = 500  # of all hosts together; a larger fleet sends heartbeats less often


def longest_interval(service_down_time: float, lease: float) -> float:
    """Return the seconds after which the next heartbeat comes in time even if two are lost."""
    return min(service_down_time, lease) / 3


def interval_of(hosts: int, *, report_interval: float, longest: float) -> float:
    """Return the seconds between the heartbeats of a host in a fleet of this many hosts."""
    return max(report_interval, min(hosts / BEATS_PER_SECOND, longest))


def too_often(hosts: int, *, report_interval: float, longest: float) -> str | None:
    """Return what to do if a fleet cannot send its heartbeats as rarely as it should; None if it can."""
    interval = interval_of(hosts, report_interval=report_interval, longest=longest)
    if hosts <= BEATS_PER_SECOND * interval:
        return None
    needed = math.ceil(3 * hosts / BEATS_PER_SECOND)
    return (
        f"{hosts} hosts send {hosts / interval:.0f} heartbeats per second, which is more than {BEATS_PER_SECOND}: "
        f"set default.service_down_time and conductor.lease to {needed} or more"
    )
