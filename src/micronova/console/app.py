"""The console proxy as an ASGI application: pages for browsers, and the WebSocket through which they reach guests.

The proxy knows no users: a token, which the API issues, gives access to one console. So the token is never logged or
cached, and browsers are told not to send it to other sites.
"""

import asyncio
import contextlib
import http.cookies
import logging
import urllib.parse

import msgspec

from micronova.console.bridge import carry
from micronova.console.endpoints import Connector
from micronova.console.pages import Pages
from micronova.console.sessions import Sessions
from micronova.http.asgi import Receive, Scope, Send
from micronova.http.faults import message_of, status_of
from micronova.objects.console import ConsoleGrant
from micronova.objects.errors import Forbidden, Invalid, MicronovaError, NotFound, Unavailable
from micronova.rpc.errors import RemoteError, RpcError

log = logging.getLogger(__name__)

LONGEST_TOKEN = 128
DISCONNECT_TIMEOUT = 5.0
_PROTOCOL = "binary"


class ConsoleApp:
    """Answers requests below /console."""

    def __init__(self, sessions: Sessions, connector: Connector, pages: Pages, origins: tuple[str, ...]) -> None:
        self._sessions = sessions
        self._connector = connector
        self._pages = pages
        self._origins = frozenset(origins)
        ancestors = " ".join(("'self'", *origins))
        self._headers = [
            (b"cache-control", b"no-store"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
            (
                b"content-security-policy",
                "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
                # The libraries set styles.
                f"style-src 'self' 'unsafe-inline'; base-uri 'none'; frame-ancestors {ancestors}".encode(),
            ),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._page(scope, send)

    # --- pages -----------------------------------------------------------------------------------------------

    async def _page(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await self._answer(send, 405, "text/plain", b"Consoles are only looked at: use GET.\n")
        elif scope["path"] == "/session":
            await self._session(scope, send)
        else:
            found = await asyncio.to_thread(self._pages.find, scope["path"])
            if found is None:
                problem = await asyncio.to_thread(self._pages.problem, "There is no such page.")
                found = 404, "text/html; charset=utf-8", problem
            await self._answer(send, *found, body=scope["method"] == "GET")

    async def _session(self, scope: Scope, send: Send) -> None:
        """Answer what a page's token is for, or why it is refused: a browser hides why a WebSocket was refused."""
        status = 200
        try:
            grant = await self._authorize(scope)
            answer: dict[str, object] = {
                "server": {"id": grant.instance_uuid, "name": grant.name, "protocol": grant.protocol}
            }
        except MicronovaError as error:
            status, answer = status_of(error), {"error": message_of(error)}
        await self._answer(send, status, "application/json", msgspec.json.encode(answer))

    async def _answer(self, send: Send, status: int, kind: str, content: bytes, body: bool = True) -> None:
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode()), *self._headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content if body else b""})

    # --- WebSockets ------------------------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            if scope["path"] not in ("/websockify", "/"):
                raise NotFound("There is no such WebSocket: consoles are at /console/websockify.")
            self._check_origin(scope)
            grant = await self._authorize(scope)
            reader, writer = await self._connector.open(grant.endpoint)
        except MicronovaError as error:
            await _refuse(receive, send, error)
            return
        try:
            try:
                session = self._sessions.begin(grant)
            except MicronovaError as error:
                await _refuse(receive, send, error)
                return
            try:
                chosen = _PROTOCOL if _PROTOCOL in scope["subprotocols"] else None
                await send({"type": "websocket.accept", "subprotocol": chosen})
                log.info("%s console of server %s is open", grant.protocol, grant.instance_uuid)
                await carry(self._sessions, session, receive, send, reader, writer)
            finally:
                self._sessions.finish(session)
                log.info("%s console of server %s is closed", grant.protocol, grant.instance_uuid)
        finally:
            writer.close()

    def _check_origin(self, scope: Scope) -> None:
        """Refuse pages of other sites, which browsers allow to connect; programs send no origin."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or origin in self._origins:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if origin.partition("://")[2].lower() != host.lower():
            raise Forbidden("Pages of this origin may not show consoles: console.allowed_origins names those that may.")

    async def _authorize(self, scope: Scope) -> ConsoleGrant:
        try:
            return await self._sessions.authorize(_token(scope))
        except (RpcError, RemoteError) as error:
            log.warning("no conductor answers what a console token is for: %s", error)
            raise Unavailable("This console link cannot be checked now: try again later.") from error


async def _refuse(receive: Receive, send: Send, error: MicronovaError) -> None:
    """Refuse the WebSocket with an HTTP answer. It has no body, which some clients take for data of the guest."""
    status = 403 if isinstance(error, NotFound) else status_of(error)
    reason = (b"x-console-error", message_of(error).encode("latin-1", "replace"))
    await send({"type": "websocket.http.response.start", "status": status, "headers": [reason]})
    await send({"type": "websocket.http.response.body", "body": b""})
    # uvicorn reports that the answer was sent, and then that the client disconnected. If we returned before that, it
    # would log an error for each refusal.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCONNECT_TIMEOUT):
            await receive()
            await receive()


def _token(scope: Scope) -> str:
    """Return the token from the query, or from a cookie, as old clients send it."""
    try:
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20)
    except ValueError:
        raise Invalid("The query string is not valid: a console link has one parameter, its token.") from None
    found: str = query.get("token", [""])[-1]
    if not found:
        cookies = http.cookies.SimpleCookie()
        try:
            cookies.load(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1"))
        except http.cookies.CookieError:
            raise Invalid("The cookies are not valid.") from None
        found = str(cookies["token"].value) if "token" in cookies else ""
    if not 0 < len(found) <= LONGEST_TOKEN:
        raise NotFound("This console link has no token: ask for a new one.")
    return found
