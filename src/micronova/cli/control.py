"""The control socket of a running process: status, audit, repairs, timeline, explain, metrics; for its owner only."""

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from micronova.objects.errors import MicronovaError, NotFound

if TYPE_CHECKING:
    from micronova.cli.wiring import Process

log = logging.getLogger(__name__)


class Control:
    """The ASGI application of the control socket."""

    def __init__(self, process: "Process", *, metrics_only: bool = False) -> None:
        self._process = process
        self._paths: dict[str, Callable[[dict[str, list[str]]], Awaitable[Any]]] = {"/metrics": self._metrics}
        if not metrics_only:
            self._paths |= {
                "/status": self._status,
                "/audit": self._audit,
                "/repair": self._repair,
                "/timeline": self._timeline,
                "/explain": self._explain,
                "/dry-run": self._dry_run,
                "/hosts": self._hosts,
            }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        work = self._paths.get(scope["path"])
        kind = b"application/json"
        try:
            if work is None:
                raise NotFound("The control socket has no such path.")
            query = parse_qs(scope["query_string"].decode())
            if scope["method"] == "POST":
                query["body"] = [(await _body(receive)).decode()]
            result = await work(query)
            status = 200
            if isinstance(result, bytes):
                body, kind = result, b"text/plain; version=0.0.4; charset=utf-8"
            else:
                body = msgspec.json.encode(result)
        except MicronovaError as error:
            status, body, kind = (404 if isinstance(error, NotFound) else 500), error.message.encode(), b"text/plain"
        except Exception as error:
            log.exception("a request to the control socket failed: %s", scope["path"])
            status, body, kind = 500, str(error).encode(), b"text/plain"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _metrics(self, query: dict[str, list[str]]) -> bytes:
        from micronova.telemetry.metrics import render

        return render(self._process.databases, self._process.bus, self._process.telemetry.metrics)

    async def _status(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.status import collect_status

        return await collect_status(self._process)

    async def _audit(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.audit import run_report

        return await run_report(self._process)

    async def _repair(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.audit import run_repair

        return await run_repair(self._process, msgspec.json.decode(query["body"][0]))

    async def _timeline(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.timeline import find_timeline

        assert self._process.database is not None
        return await self._process.database.read(find_timeline, query["server"][0])

    async def _explain(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.explain import read_decisions

        return await read_decisions(self._process, query["server"][0])

    async def _dry_run(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.explain import dry_run
        from micronova.servers.dry_run import DryRunRequest

        return await dry_run(self._process, msgspec.json.decode(query["body"][0], type=DryRunRequest))

    async def _hosts(self, query: dict[str, list[str]]) -> Any:
        from micronova.cli.explain import list_hosts

        return await list_hosts(self._process)


async def _body(receive: Any) -> bytes:
    """Return the body of a request; only the owner of the socket can send one."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body
