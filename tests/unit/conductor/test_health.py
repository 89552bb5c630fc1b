"""When a missing heartbeat means a dead host."""

import pytest

from micronova.conductor.operations.health import Health
from tests.clocks import SetClock

LEASE, VALID = 20.0, 10.0


def _after(clock: SetClock, health: Health, seconds: float, *, interval: float = 5.0) -> bool:
    """Let time pass with a proof each interval; return whether the conductor is healthy then."""
    for _ in range(int(seconds / interval)):
        clock.time += interval
        health.proved()
    return health.healthy()


def _healthy() -> tuple[SetClock, Health]:
    clock = SetClock(0.0)
    health = Health(clock, settle=LEASE, proof_valid=VALID)
    assert not _after(clock, health, LEASE), "a conductor that just started knows nothing of hosts"
    assert _after(clock, health, 5.0)
    return clock, health


def test_an_outage_has_to_be_over_for_longer_than_a_lease() -> None:
    clock, health = _healthy()
    health.outage_noticed()
    assert not health.healthy()
    assert not _after(clock, health, LEASE)
    assert _after(clock, health, 5.0)


def test_without_a_recent_proof_nobody_is_healthy() -> None:
    clock, health = _healthy()
    clock.time += VALID
    assert health.healthy()
    clock.time += 0.1
    assert not health.healthy()


def test_a_process_that_stood_still_starts_anew() -> None:
    clock, health = _healthy()
    clock.time += 60.0
    health.proved()
    assert not health.healthy()
    assert not _after(clock, health, LEASE)
    assert _after(clock, health, 5.0)


@pytest.mark.parametrize("jump", [30.0, -30.0, 1.5])
@pytest.mark.parametrize("proof", [False, True])
def test_a_clock_that_is_set_counts_as_an_outage(jump: float, proof: bool) -> None:
    """The heartbeats seem to be old, or those to come will."""
    clock, health = _healthy()
    clock.set_by += jump
    if proof:
        health.proved()
    assert not health.healthy()
    assert not _after(clock, health, LEASE)
    assert _after(clock, health, 5.0)


def test_a_clock_that_is_corrected_slightly_is_no_outage() -> None:
    clock, health = _healthy()
    for _ in range(20):
        clock.set_by += 0.1
        assert _after(clock, health, 5.0)


def test_how_long_a_conductor_has_been_unhealthy() -> None:
    clock, health = _healthy()
    assert health.unhealthy_for() == 0.0
    health.outage_noticed()
    clock.time += 4.0
    health.outage_noticed()  # another outage does not begin the count anew
    assert health.unhealthy_for() == 4.0
    assert not _after(clock, health, LEASE) and health.unhealthy_for() == 4.0 + LEASE
    assert _after(clock, health, 5.0) and health.unhealthy_for() == 0.0
    clock.time += VALID + 3.0  # no proof comes: unhealthy since the last one became too old
    assert health.unhealthy_for() == 3.0


def test_a_conductor_that_never_became_healthy() -> None:
    clock = SetClock(0.0)
    health = Health(clock, settle=LEASE, proof_valid=VALID)
    clock.time += 50.0
    assert health.unhealthy_for() == 50.0
