"""Metrics: what is counted and how it is shown."""

from micronova.telemetry.metrics import BUCKETS, Histogram, Metrics, render


def shown(metrics: Metrics) -> dict[str, float]:
    text = render({}, None, metrics).decode()
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("micronova_"))
    return {name: float(value) for name, value in rows}


def test_requests_are_counted_and_timed_by_route() -> None:
    metrics = Metrics()
    metrics.request("compute", "GET /servers", 200, 0.0015)
    metrics.request("compute", "GET /servers", 200, 0.3)
    metrics.request("compute", "GET /servers", 404, 100.0)
    rows = shown(metrics)
    assert rows['micronova_http_requests_total{route="GET /servers",service="compute",status="200"}'] == 2
    assert rows['micronova_http_requests_total{route="GET /servers",service="compute",status="404"}'] == 1
    bucket = 'micronova_http_request_seconds_bucket{le="%s",route="GET /servers",service="compute"}'
    assert [rows[bucket % bound] for bound in ("0.001", "0.002", "0.2", "0.5", "10.0", "+Inf")] == [0, 1, 1, 2, 2, 3]
    assert rows['micronova_http_request_seconds_count{route="GET /servers",service="compute"}'] == 3
    assert rows['micronova_http_request_seconds_sum{route="GET /servers",service="compute"}'] == 100.3015


def test_operations_decisions_and_what_others_count_are_shown() -> None:
    metrics = Metrics()
    metrics.operation("build", "error", 7.0)
    metrics.decision(0.0003)
    metrics.gauge("micronova_builds_in_flight", "Builds.", lambda: 4)
    metrics.counter("micronova_notifications", "Notifications.", "outcome", lambda: {"sent": 3, "dropped": 0})
    rows = shown(metrics)
    assert rows['micronova_operation_seconds_count{kind="build",result="error"}'] == 1
    assert rows['micronova_operation_seconds_bucket{kind="build",le="5.0",result="error"}'] == 0
    assert rows['micronova_operation_seconds_bucket{kind="build",le="10.0",result="error"}'] == 1
    assert rows['micronova_scheduler_decision_seconds_bucket{le="0.0005"}'] == 1
    assert rows["micronova_builds_in_flight"] == 4
    assert rows['micronova_notifications_total{outcome="sent"}'] == 3


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram(BUCKETS)
    histogram.add(0.005)
    assert histogram.counts[BUCKETS.index(0.005)] == 1


def test_nothing_was_counted_yet() -> None:
    assert shown(Metrics())["micronova_scheduler_decision_seconds_count"] == 0
