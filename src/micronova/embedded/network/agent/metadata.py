"""The metadata proxies of the host: each network has one at 169.254.169.254.

A guest is identified by the network of the listener and by its source address, which the firewall has checked, not by
anything in the request. The proxy sends the ids of server and project to the metadata service, signed with this host's
own key. It forwards only a few harmless headers of the guest. A guest, a network and all together have a limited
number of connections, and each ends after a time, because every one takes a file descriptor of this process.
"""

import asyncio
import functools
import http
import logging
import re
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from micronova.embedded.network.agent.desired_state import DesiredState, Port
from micronova.http.client import Answer, Transport
from micronova.objects.errors import MicronovaError
from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged, PrivilegedError

log = logging.getLogger(__name__)

HEAD_LIMIT = 16_384  # bytes of the request line and headers
BODY_LIMIT = 65_536
ANSWER_TIMEOUT = 60.0  # seconds within which the metadata service has to answer
_FORWARDED_HEADERS = ("accept", "content-type", "user-agent", "x-aws-ec2-metadata-token", "metadata-flavor")
_TARGET = re.compile(r"\A/[!-~]{0,2000}\Z")
_LENGTH = re.compile(r"\A[0-9]{1,9}\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class MetadataLimits:
    """How many connections are open at once, and how long each may take to send a request or to receive an answer."""

    per_guest: int
    per_network: int
    total: int
    timeout: float  # seconds


class BadRequest(Exception):
    """The request is malformed or too large."""


class Voucher(Protocol):
    """Signs requests to the metadata service with this host's key."""

    async def vouch(self, instance_id: str, project_id: str, address: str) -> dict[str, str]:
        """Return the headers that name the guest, and their signature."""

    def forget(self) -> None:
        """Drop the key, because the metadata service refused it."""


class MetadataProxy:
    """Listens in the namespaces of networks and forwards requests."""

    def __init__(self, privileged: Privileged, transport: Transport, voucher: Voucher, limits: MetadataLimits) -> None:
        """`transport` leads to the metadata service."""
        self._privileged = privileged
        self._limits = limits
        self._open: Counter[str | tuple[str, str]] = Counter()  # connections by guest (network and port) and network
        self._clients: set[asyncio.Task[None]] = set()
        self._transport = transport
        self._voucher = voucher
        self._servers: dict[str, asyncio.Server] = {}
        self._ports: dict[tuple[str, str], Port] = {}  # by network and address

    async def serve(self, served: Mapping[str, str], state: DesiredState) -> list[str]:
        """Listen in exactly these namespaces; `served` maps each to its network. Return why some cannot be served."""
        self._ports = {
            (port.network_id, each.ip_address): port
            for port in state.ports
            if port.device_owner.startswith("compute:")
            for each in port.fixed_ips
        }
        for namespace in set(self._servers) - set(served):
            await self._end(namespace)
        faults = []
        for namespace, network in served.items():
            if namespace not in self._servers:
                try:
                    sock = await self._privileged.open(v.ListenMetadata(namespace=namespace))
                except PrivilegedError as error:  # of one network: the others are served
                    faults.append(str(error))
                    continue
                self._servers[namespace] = await asyncio.start_server(
                    functools.partial(self._connected, network),
                    sock=sock,
                    limit=HEAD_LIMIT,
                )
        return faults

    async def close(self) -> None:
        """Stop listening."""
        for namespace in list(self._servers):
            await self._end(namespace)
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._transport.close()

    async def _end(self, namespace: str) -> None:
        self._servers.pop(namespace).close()

    def _connected(self, network: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, or refuse and close it at once if there are too many."""
        peer = writer.get_extra_info("peername")
        if peer is None:  # it is gone already
            writer.close()
            return
        # Addresses that no port has may all belong to one guest with address pairs: together they count as one.
        port = self._ports.get((network, peer[0]))
        guest = (network, port.id if port is not None else "")
        limits = self._limits
        if (
            len(self._clients) >= limits.total
            or self._open[network] >= limits.per_network
            or self._open[guest] >= limits.per_guest
        ):
            writer.write(_response(503, b"Too many connections.", "text/plain"))
            writer.close()
            return
        self._open.update((network, guest))
        task = asyncio.get_running_loop().create_task(self._client(network, peer[0], reader, writer))
        self._clients.add(task)
        task.add_done_callback(lambda done: self._ended(done, network, guest))

    def _ended(self, task: "asyncio.Task[None]", *keys: str | tuple[str, str]) -> None:
        self._clients.discard(task)
        self._open.subtract(keys)
        for key in keys:
            if not self._open[key]:
                del self._open[key]

    async def _client(
        self, network: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout):
                method, target, headers, body = await read_request(reader)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                answer = await self._answer(network, address, method, target, headers, body)
        except BadRequest:
            answer = _response(400, b"Bad Request", "text/plain")
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            answer = b""
        except MicronovaError as error:
            log.warning("cannot forward a metadata request: %s", error)
            answer = _response(503, b"The metadata service does not answer.", "text/plain")
        except Exception:
            log.exception("cannot forward a metadata request")
            answer = _response(500, b"Internal Server Error", "text/plain")
        try:
            async with asyncio.timeout(self._limits.timeout):
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass
        finally:
            writer.transport.abort()  # the guest may not have received all of it

    async def _answer(
        self, network: str, address: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> bytes:
        port = self._ports.get((network, address))
        if port is None:
            return _response(404, b"Not Found", "text/plain")
        sent = {name: value for name, value in headers.items() if name in _FORWARDED_HEADERS}
        answer = await self._ask(port, address, method, target, sent, body)
        if answer.status == 403:
            self._voucher.forget()
            answer = await self._ask(port, address, method, target, sent, body)
        return _response(answer.status, answer.body, answer.headers.get("content-type", "text/plain"))

    async def _ask(
        self, port: Port, address: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        signed = await self._voucher.vouch(port.device_id, port.project_id, address)
        return await self._transport.request(method, target, {**headers, **signed}, body or None)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    """Read one HTTP request: method, target, headers (in lower case) and body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest from None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[0] not in ("GET", "HEAD", "POST", "PUT") or not _is_plain(words[1]):
        raise BadRequest
    if any(_CONTROL.search(line) for line in lines):
        raise BadRequest  # another parser could take a lone line break as the end of a header
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise BadRequest
        headers[name.strip().lower()] = value.strip()  # the last of several; the headers that we set are not forwarded
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not _LENGTH.match(length) or int(length) > BODY_LIMIT:
        raise BadRequest
    return words[0], words[1], headers, await reader.readexactly(int(length))


def _is_plain(target: str) -> bool:
    """Return whether a target has no `.` or `..`, encoded or not, which an HTTP client would resolve."""
    if not _TARGET.match(target):
        return False
    path = urllib.parse.unquote(target.partition("?")[0].partition("#")[0])
    return not {".", ".."} & set(re.split(r"[/\\]", path))


def _response(status: int, body: bytes, kind: str) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", f"content-type: {kind}"]
    lines += [f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
