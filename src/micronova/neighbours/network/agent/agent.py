"""The network agent: keeps a host's kernel as the network service says it should be.

It holds no truth. The desired state comes from the service, what there is from the privileged helper, and the
difference is made up by a plan. So it may be killed and started again at any time: what is as it should be is not
touched.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from micronova.neighbours.network.agent.dhcp import lacks_servers
from micronova.neighbours.network.agent.links import LinkWatch
from micronova.neighbours.network.agent.metadata import MetadataProxy
from micronova.neighbours.network.agent.plan import plan
from micronova.neighbours.network.agent.service import NetworkServiceClient
from micronova.neighbours.network.agent.state import HostState, Port
from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged, PrivilegedError
from micronova.privileged.names import tap_name

log = logging.getLogger(__name__)

HEARTBEAT = 25.0  # seconds; the service takes an agent for dead after 75
AGAIN = 1.0  # seconds before something that failed is tried again
SOON = 0.05  # seconds before a tap is asked for again that QEMU did not hold yet; longer each time
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
        self._patience = AGAIN  # seconds before what is not whole is tried again
        self._links = LinkWatch(privileged, self._wake.set)
        self._told = False  # the service knows that we were started
        self.reached = ""  # the fingerprint of the state that the host is in

    async def start(self) -> None:
        """Make the namespace of bridges, report, and begin to watch."""
        await self._privileged.call(v.EnsureNamespace(namespace=self._prefix))
        try:
            await self._tell_start()
        except Unavailable as error:  # guests that run need their host now; who is away hears of it later
            log.warning("network agent: %s", error)
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
        self._links.close()
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

    async def _tell_start(self) -> None:
        await self._service.report(started=True, configurations=self._configurations())
        self._told = True

    async def _heartbeat(self) -> None:
        if not self._told:
            await self._tell_start()
        await self._clock.sleep(HEARTBEAT)
        await self._service.report(configurations=self._configurations())

    # --- reconciling ---

    async def _reconcile_once(self) -> None:
        try:
            async with asyncio.timeout(AUDIT if self._whole else self._patience):
                await self._wake.wait()
                self._patience = SOON
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
        await self._links.ensure()
        found = await self._look()
        if found.adopts and await self._links.ensure(outside=True):
            found = await self._look()  # what came before anybody watched
        self._forget_what_is_gone(found)
        wanted = plan(self._prefix, self._service.host, state, found, self._domain)
        done = True
        early = False
        for verb in wanted.verbs:
            if self._applied.get(verb.key) == verb:
                continue
            try:
                answer = await self._privileged.call(verb)
            except PrivilegedError as error:  # one network that cannot be made does not keep the others from being
                log.error("%s", error)
                self._applied.pop(verb.key, None)
                done = False
            else:
                self._applied[verb.key] = verb
                if isinstance(verb, v.AdoptTap) and not answer.present:  # nobody tells when its guest has it
                    del self._applied[verb.key]
                    done, early = False, True
        for key in set(self._applied) - {verb.key for verb in wanted.verbs}:
            del self._applied[key]
        if self._metadata is not None:
            made = {n: id for n, id in wanted.served.items() if ("EnsureNamespace", n) in self._applied}
            await self._metadata.serve(made, state)
        await self._report(state, found)
        self._patience = min(self._patience * 2, AGAIN) if early else AGAIN
        return done

    async def _look(self) -> v.Found:
        return (await self._privileged.call(v.Inventory())).found or v.Found()

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
        """Say which ports are wired: their tap is on the bridge and the firewall knows it; and which are missing.

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
        dhcp = lacks_servers(self._service.host, state)
        if up or down or dhcp:
            await self._service.report(up=up, down=down, dhcp=dhcp, configurations=self._configurations())
        self._taps = taps

    def _index(self, port: Port, found: v.Found) -> int | None:
        if not port.admin_state_up:
            return None
        if not port.is_guest:
            return 0 if ("EnsureVeth", f"vth{port.id[:11]}") in self._applied else None
        link = found.links.get(tap_name(port.id))
        wired = ("EnsureTap", tap_name(port.id)) in self._applied and ("LoadFirewall",) in self._applied
        return link.index if link is not None and wired else None


def _loose(verb: v.EnsureTap, found: v.Found) -> bool:
    link = found.links.get(verb.tap)
    return link is None or link.bridge != verb.bridge or not link.up
