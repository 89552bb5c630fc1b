"""The metadata proxies of networks on loopback; each guest sends from a loopback address of its own."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable

from micronova.embedded.network.agent.desired_state import DesiredState, FixedIP, Port
from micronova.embedded.network.agent.metadata import MetadataLimits, MetadataProxy
from micronova.http.client import Transport
from micronova.http.host_keys import HeldKeys, HostKeyring
from micronova.objects.host_keys import HostKeys
from micronova.privileged import verbs as v

LIMITS = MetadataLimits(per_guest=16, per_network=256, total=1024, timeout=10)


class LoopbackHelper:
    """In place of the privileged helper: opens sockets that need no privilege."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}  # by namespace

    async def call(self, verb: v.Verb) -> v.Reply:
        raise NotImplementedError

    async def open(self, verb: v.Verb) -> socket.socket:
        assert isinstance(verb, v.ListenMetadata)
        sock = socket.create_server(("127.0.0.1", 0))
        self.ports[verb.namespace] = sock.getsockname()[1]
        return sock

    async def close(self) -> None:
        pass


def guest_port(network: str, address: str, server: str, project: str) -> Port:
    """Return the port of a guest."""
    return Port(
        id=f"port-of-{server}", network_id=network, mac_address="fa:16:3e:00:00:01", project_id=project,
        device_id=server, device_owner="compute:nova", fixed_ips=(FixedIP(subnet_id="s", ip_address=address),),
    )  # fmt: skip


def keys_of(keyring: HostKeyring, host: str, now: Callable[[], float] = time.time) -> HeldKeys:
    """Return the keys of a host, without a conductor that issues them."""

    async def fetch() -> HostKeys:
        return keyring.issue(host, now())

    return HeldKeys(host, fetch, now)


class MetadataProxies:
    """The metadata proxies of some networks."""

    def __init__(self, transport: Transport, keys: HeldKeys, limits: MetadataLimits = LIMITS) -> None:
        self._helper = LoopbackHelper()
        self._proxy = MetadataProxy(self._helper, transport, keys, limits)

    async def serve(self, ports: Iterable[Port]) -> None:
        """Listen in the networks of these ports."""
        state = DesiredState(ports=tuple(ports))
        await self._proxy.serve({f"ns-{port.network_id}": port.network_id for port in state.ports}, state)

    async def close(self) -> None:
        await self._proxy.close()

    async def connect(self, network: str, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection of the guest with this address in this network."""
        port = self._helper.ports[f"ns-{network}"]
        return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))

    async def send(self, network: str, address: str, request: bytes) -> tuple[int, bytes]:
        """Send bytes as the guest with this address in this network; return status and body."""
        reader, writer = await self.connect(network, address)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    async def get(self, network: str, address: str, path: str, *headers: str) -> tuple[int, bytes]:
        """Request a document."""
        lines = [f"GET {path} HTTP/1.1", "Host: 169.254.169.254", *headers, "", ""]
        return await self.send(network, address, "\r\n".join(lines).encode("latin-1"))

    async def post(self, network: str, address: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Post a document."""
        head = f"POST {path} HTTP/1.1\r\nHost: 169.254.169.254\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self.send(network, address, head.encode() + body)
