"""The network agent: keeps a host's kernel as the network service says it should be.

It holds no truth. The desired state comes from the service, what there is from the privileged helper, and the
difference is made up by a plan. So it may be killed and started again at any time: what is as it should be is not
touched.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from micronova.neighbours.network.agent.dhcp import DHCP_OWNER
from micronova.neighbours.network.agent.metadata import MetadataProxy
from micronova.neighbours.network.agent.plan import needs_dhcp, plan
from micronova.neighbours.network.agent.service import NetworkServiceClient
from micronova.neighbours.network.agent.state import HostState, Port
from micronova.objects.clock import Clock
from micronova.objects.errors import Conflict, MicronovaError, NotFound
from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged, PrivilegedError
from micronova.privileged.names import tap_name

log = logging.getLogger(__name__)

HEARTBEAT = 25.0  # seconds; the service takes an agent for dead after 75
AGAIN = 1.0  # seconds before something that failed is tried again
AUDIT = 60.0  # seconds after which everything is looked at as if nothing were known


class NetworkAgent:
    """The network agent role."""

    def __init__(
        self,
        service: NetworkServiceClient,
        privileged: Privileged,
        clock: Clock,
        *,
        prefix: str,
        domain: str = "",
        metadata: MetadataProxy | None = None,
    ) -> None:
        """`prefix` is that of the cloud's names; `domain` is what guests are told where their network has none."""
        self._metadata = metadata
        self._service = service
        self._privileged = privileged
        self._clock = clock
        self._prefix = prefix
        self._domain = domain
        self._state: HostState | None = None
        self._fingerprint = ""
        self._applied: dict[tuple[str, ...], v.Verb] = {}
        self._taps: dict[str, int] = {}  # port -> index of the device that it was wired with
        self._indices: dict[str, int] = {}  # of the taps at the last look
        self._wake = asyncio.Event()
        self._whole = True  # nothing failed the last time; else it is tried again soon, or when something happens
        self._tasks: list[asyncio.Task[None]] = []
        self._links: socket.socket | None = None
        self.reached = ""  # the fingerprint of the state that the host is in

    async def start(self) -> None:
        """Make the namespace of bridges, report, and begin to watch."""
        await self._privileged.call(v.EnsureNamespace(namespace=self._prefix))
        await self._service.report(started=True, configurations=self._configurations())
        self._tasks = [
            asyncio.create_task(self._forever(work))
            for work in (self._watch_once, self._reconcile_once, self._heartbeat)
        ]

    async def stop(self) -> None:
        """Stop watching; the host stays as it is."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._close_links()
        if self._metadata is not None:
            await self._metadata.close()
        await self._privileged.close()

    def _configurations(self) -> dict[str, Any]:
        return {"namespace": self._prefix, "bridge_mappings": {}, "tunnel_types": []}

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except MicronovaError as error:
                log.warning("network agent: %s", error)
                await self._clock.sleep(AGAIN)
            except Exception:
                log.exception("network agent")
                await self._clock.sleep(AGAIN)

    async def _watch_once(self) -> None:
        fingerprint, state = await self._service.state(self._fingerprint)
        if state is not None:
            self._fingerprint, self._state = fingerprint, state
            self._wake.set()

    async def _heartbeat(self) -> None:
        await self._clock.sleep(HEARTBEAT)
        await self._service.report(configurations=self._configurations())

    # --- reconciling ---

    async def _reconcile_once(self) -> None:
        try:
            async with asyncio.timeout(AUDIT if self._whole else AGAIN):
                await self._wake.wait()
        except TimeoutError:
            if self._whole:
                self._applied.clear()
        self._wake.clear()
        if self._state is None:
            return
        fingerprint = self._fingerprint
        self._whole = False
        self._whole = await self.reconcile(self._state)
        if self._whole:
            self.reached = fingerprint

    async def reconcile(self, state: HostState) -> bool:
        """Bring the host to a state; say whether all of it succeeded."""
        await self._watch_links()
        answer = await self._privileged.call(v.Inventory())
        found = answer.found or v.Found()
        self._forget_what_is_gone(found)
        wanted = plan(self._prefix, self._service.host, state, found, self._domain)
        done = True
        for verb in wanted.verbs:
            if self._applied.get(verb.key) == verb:
                continue
            try:
                await self._privileged.call(verb)
            except PrivilegedError as error:  # one network that cannot be made does not keep the others from being
                log.error("%s", error)
                self._applied.pop(verb.key, None)
                done = False
            else:
                self._applied[verb.key] = verb
        for key in set(self._applied) - {verb.key for verb in wanted.verbs}:
            del self._applied[key]
        if self._metadata is not None:
            made = {n: id for n, id in wanted.served.items() if ("EnsureNamespace", n) in self._applied}
            await self._metadata.serve(made, state)
        await self._report(state, found)
        await self._dhcp_ports(state)
        return done

    def _forget_what_is_gone(self, found: v.Found) -> None:
        """What was made and is not there any more is to be made again."""
        there = {*found.namespaces, *found.links}
        indices = {name: link.index for name, link in found.links.items() if name.startswith("tap")}
        # The tap of a guest that was started anew has the old one's name, and nothing of what was done to it.
        exchanged = {name for name, index in indices.items() if self._indices.get(name, index) != index}
        self._indices = indices
        for key, verb in list(self._applied.items()):
            named = [getattr(verb, name, None) for name in ("namespace", "bridge", "outer", "tap")]
            missing = any(name is not None and name not in there for name in named)
            stopped = isinstance(verb, v.StartDnsmasq | v.StartAdvertiser) and verb.namespace not in found.servers
            loose = isinstance(verb, v.EnsureTap) and _loose(verb, found)
            other = getattr(verb, "tap", None) in exchanged
            undone = isinstance(verb, v.DeleteNamespace | v.DeleteLink | v.StopDnsmasq)
            if missing or stopped or loose or other or undone:
                del self._applied[key]

    async def _report(self, state: HostState, found: v.Found) -> None:
        """Say which ports are wired: their tap is on the bridge and the firewall knows it.

        What the state says of a port may be older than what was reported of it.
        """
        up, down = [], []
        taps: dict[str, int] = {}
        for port in state.ports:
            if port.host != self._service.host:
                continue
            index = self._index(port, found)
            before = self._taps.get(port.id)
            if index is None:
                if port.status == "ACTIVE" or before is not None:
                    down.append(port.id)
                continue
            taps[port.id] = index
            exchanged = before is not None and before != index
            if exchanged:
                down.append(port.id)  # unplugged and plugged again between two looks: compute waits for the news
            if port.status != "ACTIVE" or exchanged:
                up.append(port.id)
        if up or down:
            await self._service.report(up=up, down=down, configurations=self._configurations())
        self._taps = taps

    def _index(self, port: Port, found: v.Found) -> int | None:
        if not port.admin_state_up:
            return None
        if not port.is_guest:
            return 0 if ("EnsureVeth", f"vth{port.id[:11]}") in self._applied else None
        link = found.links.get(tap_name(port.id))
        wired = ("EnsureTap", tap_name(port.id)) in self._applied and ("LoadFirewall",) in self._applied
        return link.index if link is not None and wired else None

    async def _dhcp_ports(self, state: HostState) -> None:
        """Have a port for the DHCP server on each network that has guests here, and none elsewhere."""
        host = self._service.host
        servers = {p.network_id: p for p in state.ports if p.device_owner == DHCP_OWNER and p.host == host}
        used = {p.network_id for p in state.ports if p.is_guest and p.host == host}
        for network in state.networks:
            server = servers.get(network.id)
            wanted = [subnet.id for subnet in network.subnets if subnet.enable_dhcp]
            try:
                if network.id in used and needs_dhcp(network):
                    if server is None:
                        await self._service.make_dhcp_port(network.id, wanted)
                    elif {each.subnet_id for each in server.fixed_ips} != set(wanted):
                        await self._service.change_dhcp_port(server.id, wanted)
                elif server is not None:
                    await self._service.delete_port(server.id)
            except (Conflict, NotFound) as error:  # the network is full, or gone meanwhile: the next state says
                log.warning("no DHCP server on network %s: %s", network.id, error)

    # --- devices that come and go ---

    async def _watch_links(self) -> None:
        if self._links is None:
            self._links = await self._privileged.open(v.WatchLinks())
            self._links.setblocking(False)
            asyncio.get_running_loop().add_reader(self._links, self._link_changed)

    def _link_changed(self) -> None:
        assert self._links is not None
        try:
            while self._links.recv(1 << 16):
                pass
        except BlockingIOError:
            pass
        except OSError:  # so many at once that some were lost: look
            pass
        self._wake.set()

    def _close_links(self) -> None:
        if self._links is not None:
            asyncio.get_running_loop().remove_reader(self._links)
            self._links.close()
            self._links = None


def _loose(verb: v.EnsureTap, found: v.Found) -> bool:
    link = found.links.get(verb.tap)
    return link is None or link.bridge != verb.bridge or not link.up
