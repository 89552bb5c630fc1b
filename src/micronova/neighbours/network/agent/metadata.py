"""169.254.169.254 for guests: a proxy per network to the metadata service.

Who asks is not what a request says. A listener belongs to one network, the firewall lets a guest send only from
its own addresses, and so network and source address name the port. The metadata service is told the server and the
project with a signature by this host's own key; of the guest's own headers only harmless ones are handed on.
"""

import asyncio
import contextlib
import http
import logging
import re
import urllib.parse
from collections.abc import Mapping
from typing import Protocol

from micronova.http.client import Answer, Transport
from micronova.neighbours.network.agent.state import HostState, Port
from micronova.objects.errors import MicronovaError
from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged

log = logging.getLogger(__name__)

HEAD_LIMIT = 16_384  # bytes of the request line and headers
BODY_LIMIT = 65_536
PATIENCE = 10.0  # seconds that a guest may take to send its request
_HANDED_ON = ("accept", "content-type", "user-agent", "x-aws-ec2-metadata-token", "metadata-flavor")
_TARGET = re.compile(r"\A/[!-~]{0,2000}\Z")
_LENGTH = re.compile(r"\A[0-9]{1,9}\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class BadRequest(Exception):
    """Not a request that we understand."""


class Voucher(Protocol):
    """What makes the metadata service believe us."""

    async def vouch(self, instance_id: str, project_id: str, address: str) -> dict[str, str]:
        """Return the headers that say which guest asks, and prove it."""

    def forget(self) -> None:
        """Get another key: this one was refused."""


class MetadataProxy:
    """Listens in the namespaces of networks."""

    def __init__(self, privileged: Privileged, transport: Transport, voucher: Voucher) -> None:
        """`transport` leads to the metadata service."""
        self._privileged = privileged
        self._transport = transport
        self._voucher = voucher
        self._servers: dict[str, asyncio.Server] = {}
        self._ports: dict[tuple[str, str], Port] = {}  # by network and address

    async def serve(self, served: Mapping[str, str], state: HostState) -> None:
        """Listen in these namespaces (each of a network) and no others."""
        self._ports = {
            (port.network_id, each.ip_address): port
            for port in state.ports
            if port.device_owner.startswith("compute:")
            for each in port.fixed_ips
        }
        for namespace in set(self._servers) - set(served):
            await self._end(namespace)
        for namespace, network in served.items():
            if namespace not in self._servers:
                sock = await self._privileged.open(v.ListenMetadata(namespace=namespace))
                self._servers[namespace] = await asyncio.start_server(
                    lambda reader, writer, network=network: self._client(network, reader, writer),  # type: ignore[misc]
                    sock=sock,
                    limit=HEAD_LIMIT,
                )

    async def close(self) -> None:
        """Stop listening."""
        for namespace in list(self._servers):
            await self._end(namespace)
        await self._transport.close()

    async def _end(self, namespace: str) -> None:
        self._servers.pop(namespace).close()

    async def _client(self, network: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                method, target, headers, body = await read_request(reader)
            answer = await self._answer(network, writer.get_extra_info("peername")[0], method, target, headers, body)
        except BadRequest:
            answer = _response(400, b"Bad Request", "text/plain")
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            answer = b""
        except MicronovaError as error:
            log.warning("metadata: %s", error)
            answer = _response(503, b"The metadata service does not answer.", "text/plain")
        except Exception:
            log.exception("metadata")
            answer = _response(500, b"Internal Server Error", "text/plain")
        with contextlib.suppress(OSError):
            writer.write(answer)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _answer(
        self, network: str, address: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> bytes:
        port = self._ports.get((network, address))
        if port is None:
            return _response(404, b"Not Found", "text/plain")
        sent = {name: value for name, value in headers.items() if name in _HANDED_ON}
        answer = await self._ask(port, address, method, target, sent, body)
        if answer.status == 403:
            self._voucher.forget()
            answer = await self._ask(port, address, method, target, sent, body)
        return _response(answer.status, answer.body, answer.headers.get("content-type", "text/plain"))

    async def _ask(
        self, port: Port, address: str, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        said = await self._voucher.vouch(port.device_id, port.project_id, address)
        return await self._transport.request(method, target, {**headers, **said}, body or None)


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
        raise BadRequest  # a lone line break could pass for the end of a header further on
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise BadRequest
        headers[name.strip().lower()] = value.strip()  # of two the last: none that we set ourselves is handed on
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not _LENGTH.match(length) or int(length) > BODY_LIMIT:
        raise BadRequest
    return words[0], words[1], headers, await reader.readexactly(int(length))


def _is_plain(target: str) -> bool:
    """Say whether a target is a path below the service's own: a client of HTTP would resolve `..`, encoded or not."""
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
