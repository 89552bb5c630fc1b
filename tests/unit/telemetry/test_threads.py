"""The use of pools of threads, as metrics show it."""

import threading

import pytest

from micronova.telemetry.metrics import Metrics, render
from micronova.telemetry.threads import CountedThreads


def _shown(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in render({}, None, metrics).decode().splitlines() if line.startswith("micronova_threads_")]
    return {name.removeprefix("micronova_threads_"): float(value) for name, value in map(str.split, lines)}


def test_calls_that_run_and_calls_that_wait_are_told_apart() -> None:
    held, metrics = threading.Event(), Metrics()
    pool = CountedThreads(2, "copies")
    assert _shown(metrics) == {}
    metrics.threads("copies", pool.use)
    try:
        futures = [pool.submit(held.wait) for _ in range(5)]
        assert _shown(metrics) == {
            'used{pool="copies"}': 2.0,
            'size{pool="copies"}': 2.0,
            'waiting{pool="copies"}': 3.0,
        }
        assert futures[-1].cancel()
        assert pool.use().calls == 4
        held.set()
        assert all(future.result() for future in futures[:4])
    finally:
        held.set()
        pool.shutdown()
    assert pool.use().calls == 0
    with pytest.raises(RuntimeError):
        pool.submit(held.wait)
    assert pool.use().calls == 0
