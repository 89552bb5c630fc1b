"""Traces: spans and their parents, and no cost when tracing is off."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from micronova.telemetry.spans import span, traceparent
from micronova.telemetry.tracing import Tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


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
    with tracing.enter("compute", "message", PARENT, SpanKind.CONSUMER):
        assert traceparent()[3:35] == TRACE
        with span("step", instance="i"):
            pass
    assert traceparent() == ""
    step, message = exporter.get_finished_spans()
    assert message.parent is not None and f"{message.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert step.parent is not None and step.parent.span_id == message.context.span_id
    assert step.attributes == {"instance": "i"}


def test_a_caller_that_is_not_sampled_is_not_recorded(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.enter("api", "request", PARENT[:-1] + "0", SpanKind.SERVER):
        assert traceparent().endswith("-00")
    assert exporter.get_finished_spans() == ()


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
from micronova.cli.telemetry import make_telemetry
make_telemetry(load(environ={}), SystemClock(), "h")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
