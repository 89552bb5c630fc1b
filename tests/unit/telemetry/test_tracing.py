"""Traces: nothing when off, the nearer parent when on, and a collector that really receives them."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from micronova.conductor.operations import Operation
from micronova.rpc.contract import Context
from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.operations import OperationObserver
from micronova.telemetry.spans import span, traceparent
from micronova.telemetry.tracing import Tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def operation(parent: str) -> Operation:
    return Operation(
        id="o",
        kind="build",
        version=1,
        instance_uuid="i",
        group_id="g",
        step="schedule",
        owner="c",
        epoch=1,
        deadline=0,
        attempts=1,
        payload=b"",
        secrets=None,
        context=Context(request_id="req-1", traceparent=parent),
        created_at=0,
    )


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return Tracing(exporter, host="here", at_once=True)


def test_without_a_trace_a_step_is_nothing() -> None:
    with span("step", instance="i"):
        assert traceparent() == ""


def test_steps_are_below_what_they_happen_in(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.entrance("compute", "message", PARENT, SpanKind.CONSUMER):
        assert traceparent()[3:35] == TRACE
        with span("step", instance="i"):
            pass
    assert traceparent() == ""
    step, message = exporter.get_finished_spans()
    assert message.parent is not None and f"{message.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert step.parent is not None and step.parent.span_id == message.context.span_id
    assert step.attributes == {"instance": "i"}


def test_a_caller_that_is_not_sampled_is_not_recorded(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.entrance("api", "request", PARENT[:-1] + "0", SpanKind.SERVER):
        assert traceparent().endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_an_operation_goes_on_below_the_nearer_parent(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    observer = OperationObserver(Metrics(), tracing)
    with tracing.entrance("conductor", "hint", PARENT, SpanKind.CONSUMER):
        with observer.running(operation(PARENT)):
            assert request_id.get() == "req-1"
        with observer.running(operation(f"00-{'5' * 32}-{'6' * 16}-01")):  # of another request
            pass
        with observer.running(operation("")):
            assert traceparent() == ""
    assert request_id.get() == ""
    own, other, hint = exporter.get_finished_spans()
    assert own.parent is not None and own.parent.span_id == hint.context.span_id
    assert other.parent is not None and f"{other.parent.span_id:016x}" == "6" * 16


def test_what_is_off_is_not_imported() -> None:
    """A start without a collector pays neither for OpenTelemetry nor for Prometheus' library."""
    code = """
import sys
from micronova.cli import roles, wiring
from micronova.compute import manager
from micronova.conductor import manager
from micronova.scheduler import manager
from micronova.conf.settings import load
from micronova.objects.clock import SystemClock
from micronova.telemetry.telemetry import make_telemetry
make_telemetry(load(environ={}), SystemClock(), "h")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
