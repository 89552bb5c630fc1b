"""The observer of operations: request ids, and the trace that an operation continues."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.observer import OperationObserver
from micronova.objects.context import Context
from micronova.telemetry.logs import request_id
from micronova.telemetry.metrics import Metrics
from micronova.telemetry.spans import traceparent
from micronova.telemetry.tracing import Tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def operation(parent: str) -> Operation:
    return Operation(
        id="o",
        kind="build",
        version=1,
        instance_uuid="i",
        batch_id="g",
        step="schedule",
        owner="c",
        epoch=1,
        deadline=0,
        leases=1,
        payload=b"",
        secrets=None,
        context=Context(request_id="req-1", traceparent=parent),
        created_at=0,
    )


def test_an_operation_goes_on_below_the_nearer_parent() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, host="here", at_once=True)
    observer = OperationObserver(Metrics(), tracing)
    with tracing.enter("conductor", "hint", PARENT, SpanKind.CONSUMER):
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
