"""A collector receives spans in the form that OTLP's own schema describes."""

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from micronova.conf.settings import SettingsError, load
from micronova.objects.clock import SystemClock
from micronova.telemetry.spans import span
from micronova.telemetry.telemetry import Telemetry, make_telemetry
from tests.peers import peer

PROTO = "opentelemetry-proto==1.45.1"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, str, bytes]]
    status: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, self.headers["content-type"], body))
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class Collecting:
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, bytes]] = []
        self.handler = type("Own", (Collector,), {"received": self.received, "status": 200})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collecting]:
    made = Collecting()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def telemetry(url: str) -> Telemetry:
    return make_telemetry(load(environ={}, telemetry={"otlp_endpoint": url}), SystemClock(), "here")


async def send(url: str) -> None:
    made = telemetry(url)
    assert made.tracing is not None
    with made.tracing.entrance("compute", "message", f"00-{TRACE}-{PARENT}-01", SpanKind.CONSUMER, number=7):
        with pytest.raises(ValueError, match="of tea"), span("step", instance="i", share=0.5):
            raise ValueError("of tea")
    await made.close()


async def test_a_collector_receives_the_spans(collector: Collecting) -> None:
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


async def test_what_is_sent_fits_the_schema_of_otlp(collector: Collecting) -> None:
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


async def test_a_collector_that_is_away_harms_nothing(collector: Collecting, caplog: pytest.LogCaptureFixture) -> None:
    collector.handler.status = 503
    await send(collector.url)
    assert "2 spans are lost" in caplog.text and "503" in caplog.text
    await send("http://127.0.0.1:1")
    assert "refused" in caplog.text


def test_a_bad_address_is_told_in_one_line() -> None:
    with pytest.raises(SettingsError, match="otlp_endpoint is the URL of a collector"):
        telemetry("collector:4318")
