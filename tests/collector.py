"""A collector of traces that keeps what it is sent (OTLP over HTTP, in its JSON form)."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Collector:
    """Listens on a port of its own."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, bytes]] = []
        """Path, content type and body of each request."""
        self.status = 200
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.received.append((self.path, self.headers["content-type"], body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[dict[str, Any]]:
        """Return all spans so far, each with the `scope` and the `host` that it is from."""
        found = []
        for _, _, body in self.received:
            for resource in json.loads(body)["resourceSpans"]:
                facts = {each["key"]: each["value"] for each in resource["resource"]["attributes"]}
                for scope in resource["scopeSpans"]:
                    more = {"scope": scope["scope"]["name"], "host": facts["host.name"]["stringValue"]}
                    found += [{**span, **more} for span in scope["spans"]]
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()
