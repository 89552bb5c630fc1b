"""`/healthcheck`: whether this process answers, and `/healthcheck/ready`: whether it has what it needs.

Load balancers and monitoring ask without a token, so answers name no address, and questions to the database and the bus
are shared by everybody who asks within a second.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from micronova.http.asgi import App, Receive, Scope, Send, header
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

PATIENCE: Final = 3.0  # seconds that the database or the bus has to answer
SHARED_FOR: Final = 1.0  # seconds for which an answer is given again

Check = Callable[[], Awaitable[bool]]
"""Returns whether something that the process needs works; it may raise any error if it does not."""


def healthcheck(checks: Mapping[str, Check], clock: Clock) -> App:
    """Return the ASGI application; checks are named by what they look at."""
    readiness = _Readiness(checks, clock)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(scope, send, 405, "METHOD NOT ALLOWED", {})
        elif scope["path"] == "/":
            await _answer(scope, send, 200, "OK", {})
        elif scope["path"].rstrip("/") == "/ready":
            found = await readiness.find_out()
            ready = all(found.values())
            await _answer(scope, send, 200 if ready else 503, "OK" if ready else "UNAVAILABLE", found)
        else:
            await _answer(scope, send, 404, "NOT FOUND", {})

    return app


class _Readiness:
    def __init__(self, checks: Mapping[str, Check], clock: Clock) -> None:
        self._checks = checks
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: dict[str, bool] = {}
        self._found_at: float | None = None

    async def find_out(self) -> dict[str, bool]:
        """Return which checks succeed."""
        async with self._lock:
            now = self._clock.monotonic()
            if self._found_at is None or now - self._found_at > SHARED_FOR:
                names = sorted(self._checks)
                works = await asyncio.gather(*(self._works(name) for name in names))
                self._found = dict(zip(names, works, strict=True))
                self._found_at = self._clock.monotonic()
            return self._found

    async def _works(self, name: str) -> bool:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._checks[name]()
        except Exception as error:
            log.warning("health check: %s does not work: %s", name, error or type(error).__name__)
            return False


async def _answer(scope: Scope, send: Send, status: int, text: str, found: Mapping[str, bool]) -> None:
    if "json" in header(scope, b"accept"):
        checks = {name: "ok" if works else "unavailable" for name, works in found.items()}
        kind, body = b"application/json", msgspec.json.encode({"status": text.lower(), "checks": checks})
    else:
        missing = ", ".join(name for name, works in found.items() if not works)
        kind, body = b"text/plain; charset=utf-8", f"{text}{f': {missing}' if missing else ''}\n".encode()
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *([(b"allow", b"GET, HEAD")] if status == 405 else []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
