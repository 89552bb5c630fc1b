"""A collector receives spans in the form that OTLP's own schema describes."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from micronova.cli.telemetry import Telemetry, make_telemetry
from micronova.conf.settings import SettingsError, load
from micronova.objects.clock import SystemClock
from micronova.telemetry.spans import span
from tests.collector import Collector, collecting
from tests.peers import peer

PROTO = "opentelemetry-proto==1.45.1"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def telemetry(url: str) -> Telemetry:
    return make_telemetry(load(environ={}, telemetry={"otlp_endpoint": url}), SystemClock(), "here")


async def send(url: str) -> None:
    made = telemetry(url)
    assert made.tracing is not None
    with made.tracing.enter("compute", "message", f"00-{TRACE}-{PARENT}-01", SpanKind.CONSUMER, number=7):
        with pytest.raises(ValueError, match="of tea"), span("step", instance="i", share=0.5):
            raise ValueError("of tea")
    await made.close()


async def test_a_collector_receives_the_spans(collector: Collector) -> None:
    await send(collector.url)
    [(path, kind, body)] = collector.received
    assert (path, kind) == ("/v1/traces", "application/json")
    [resource] = json.loads(body)["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "micronova"}} in resource["resource"]["attributes"]
    [scope] = resource["scopeSpans"]
    assert scope["scope"]["name"] == "micronova.compute"
    spans: dict[str, Any] = {each["name"]: each for each in scope["spans"]}
    message, step = spans["message"], spans["step"]
    assert (message["traceId"], message["parentSpanId"], message["kind"]) == (TRACE, PARENT, 5)
    assert message["attributes"] == [{"key": "number", "value": {"intValue": "7"}}]
    assert (step["traceId"], step["parentSpanId"], step["kind"]) == (TRACE, message["spanId"], 1)
    assert int(step["startTimeUnixNano"]) <= int(step["endTimeUnixNano"])
    assert step["status"]["code"] == 2
    assert [event["name"] for event in step["events"]] == ["exception"]


async def test_what_is_sent_fits_the_schema_of_otlp(collector: Collector) -> None:
    await send(f"{collector.url}/v1/traces")
    [(path, _, body)] = collector.received
    assert path == "/v1/traces"
    code = """
import sys
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
found = Parse(sys.stdin.buffer.read(), ExportTraceServiceRequest())
print(len(found.resource_spans[0].scope_spans[0].spans))
"""
    python = str(peer("otlp", PROTO) / "bin" / "python")
    done = subprocess.run([python, "-c", code], input=body, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"2\n"


async def test_spans_are_dropped_without_a_collector(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.status = 503
    await send(collector.url)
    assert "2 spans are dropped" in caplog.text and "503" in caplog.text
    await send("http://127.0.0.1:1")
    assert "refused" in caplog.text


def test_a_bad_address_is_a_clear_error() -> None:
    with pytest.raises(SettingsError, match="otlp_endpoint is the URL of a collector"):
        telemetry("collector:4318")
