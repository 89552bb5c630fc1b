"""How often network agents send heartbeats: less often, the more agents there are."""

AGENT_DOWN_AFTER = 75.0  # seconds without a heartbeat after which an agent counts as dead, in all but large fleets
BEATS_PER_DOWN_TIME = 3  # the next heartbeat comes in time even if two are lost
BEATS_PER_SECOND = 400  # of all network agents together; more than 10,000 agents report less often


def interval_for(down_after: float, agents: int = 0) -> float:
    """Return the seconds between the heartbeats of an agent in a fleet of so many agents."""
    return max(down_after / BEATS_PER_DOWN_TIME, agents / BEATS_PER_SECOND)


def down_time(interval: float) -> float:
    """Return the seconds without a heartbeat after which an agent counts as dead."""
    return interval * BEATS_PER_DOWN_TIME
