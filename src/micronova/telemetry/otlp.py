"""Sends spans to a collector by OTLP over HTTP, encoded as JSON.

OpenTelemetry's own exporter needs protobuf, requests and a library that is not stable yet. The JSON encoding needs
none of them, and every collector accepts it.
"""

import http.client
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from micronova.conf.settings import SettingsError

log = logging.getLogger(__name__)

TIMEOUT = 10.0


class OTLPExporter(SpanExporter):
    """Sends batches of spans; the SDK calls it in a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"telemetry.otlp_endpoint is the URL of a collector (http://HOST:4318), not {endpoint}."
            )
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1/traces") else f"{path}/v1/traces"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; drop and log them if the collector does not accept them."""
        connection = self._connect(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("POST", self._path, encode(spans), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status < 300:
                return SpanExportResult.SUCCESS
            problem = f"it answers {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)
        finally:
            connection.close()
        log.warning(
            "%d spans are dropped: the collector at %s did not accept them: %s", len(spans), self._host, problem
        )
        return SpanExportResult.FAILURE


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """Return spans as OTLP's JSON, grouped by resource and instrumentation scope."""
    resources: dict[int, dict[str, Any]] = {}
    scopes: dict[tuple[int, str], dict[str, Any]] = {}
    for span in spans:
        one, scope = id(span.resource), span.instrumentation_scope.name if span.instrumentation_scope else ""
        if one not in resources:
            resources[one] = {"resource": {"attributes": _attributes(span.resource.attributes)}, "scopeSpans": []}
        if (one, scope) not in scopes:
            scopes[one, scope] = {"scope": {"name": scope}, "spans": []}
            resources[one]["scopeSpans"].append(scopes[one, scope])
        scopes[one, scope]["spans"].append(_span(span))
    return msgspec.json.encode({"resourceSpans": list(resources.values())})


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.context
    assert context is not None
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent is not None else "",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "events": [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": _attributes(event.attributes or {}),
            }
            for event in span.events
        ],
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }


def _attributes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in found.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
