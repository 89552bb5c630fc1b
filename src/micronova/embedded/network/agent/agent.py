"""The network agent: brings a host's network devices to the state that the network service describes.

It stores nothing. The desired state comes from the network service, the present one from the privileged helper, and a
plan makes up the difference. So the agent may be killed and restarted at any time; what is right is not touched.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.desired_state import DesiredState, Port
from micronova.embedded.network.agent.dhcp import lacks_dhcp_ports
from micronova.embedded.network.agent.dnsmasq_watch import DnsmasqWatch
from micronova.embedded.network.agent.firewall import Firewall
from micronova.embedded.network.agent.links import LinkWatch
from micronova.embedded.network.agent.metadata import MetadataProxy
from micronova.embedded.network.agent.plan import Plan, plan_of
from micronova.embedded.network.agent.retries import Retries
from micronova.embedded.network.heartbeat_interval import AGENT_DOWN_AFTER, interval_for
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged import verbs as v
from micronova.privileged.client import Privileged, PrivilegedError
from micronova.privileged.names import outer_name, tap_name

log = logging.getLogger(__name__)

HEARTBEAT = interval_for(AGENT_DOWN_AFTER)  # seconds, unless the service names another interval
RETRY = 1.0  # seconds before the next attempt after a failure
ADOPT_RETRY = 0.05  # seconds before the next attempt to adopt a tap that QEMU has not opened; doubled each time
FULL_CHECK = 60.0  # seconds after which every verb is sent again, whatever changes or fails meanwhile
MAX_FAULTS, FAULT_LENGTH = 20, 500  # of a report
_FIREWALL = ("LoadFirewall",)  # the key of the verb
_METADATA = ("Metadata",)  # the key of what serves metadata
_ENDING = (v.StartDnsmasq, v.StartAdvertiser, v.StopDnsmasq, v.DeleteNamespace)  # verbs that may end a dnsmasq


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
        connections: int = 0,
        metadata: MetadataProxy | None = None,
    ) -> None:
        """`prefix` begins the names of the cloud; `domain` is the DNS domain of networks that have none.

        `connections` limits the tracked connections of each port; 0 is no limit.
        """
        self._metadata = metadata
        self._service = service
        self._privileged = privileged
        self._clock = clock
        self._prefix = prefix
        self._domain = domain
        self._connections = connections
        self._state: DesiredState | None = None
        self._fingerprint = ""
        self._applied: dict[tuple[str, ...], v.Verb] = {}
        self._taps: dict[str, int] = {}  # port -> index of the device that was reported as wired
        self._closed: dict[str, str] = {}  # taps whose rules cannot be loaded, and the reason
        self._oversized: set[str] = set()  # remote security groups that are left out
        self._planned: tuple[DesiredState, Firewall] | None = None  # the last state and its firewall
        self._indices: dict[str, int] = {}  # tap -> index in the last inventory
        self._wake = asyncio.Event()
        self._complete = True  # the last reconciliation had no failure; otherwise it is repeated soon
        self._full_check_at = clock.monotonic() + FULL_CHECK
        self._tasks: list[asyncio.Task[None]] = []
        self._retries = Retries(clock, (_FIREWALL, ("EnsureNamespace", prefix)))
        self._retry_delay = RETRY  # seconds before an incomplete reconciliation is repeated
        self._links = LinkWatch(privileged, self._wake.set)
        self._dnsmasq = DnsmasqWatch(self._wake.set)
        self._faults: tuple[str, ...] = ()  # why the host is not in the desired state
        self._reported_faults: tuple[str, ...] = ()
        self._start_reported = False
        self._interval = HEARTBEAT  # seconds
        self.reached = ""  # the fingerprint of the state that the host is in

    async def start(self) -> None:
        """Create the namespace of the bridges, report the start, and start to follow the desired state.

        Raise PrivilegedError if the kernel does not filter bridged packets: guests would be without security groups.
        """
        await self._privileged.call(v.EnsureNamespace(namespace=self._prefix))
        await self._privileged.call(v.CheckFirewall())
        try:
            await self._report_start()
        except Unavailable as error:  # running guests need their network now; the report is repeated
            log.warning(
                "network agent of host %s: the service did not receive the report of the start, which is repeated: %s",
                self._service.host,
                error,
            )
        self._tasks = [
            keep_running(partial(self._forever, name, work), name=f"network-agent-{name}", clock=self._clock)
            for name, work in (
                ("watch", self._watch_once),
                ("reconcile", self._reconcile_once),
                ("heartbeat", self._heartbeat),
            )
        ]

    async def stop(self) -> None:
        """Stop; the host's devices stay as they are."""
        await end_tasks(*self._tasks)
        self._tasks = []
        self._links.close()
        self._dnsmasq.close()
        if self._metadata is not None:
            await self._metadata.close()
        await self._privileged.close()

    def _configurations(self) -> dict[str, Any]:
        faults = [fault[:FAULT_LENGTH] for fault in self._faults[:MAX_FAULTS]]
        return {"namespace": self._prefix, "bridge_mappings": {}, "tunnel_types": [], "faults": faults}

    async def _forever(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        failed = "network agent of host %s: %s failed and is tried again in %g s"
        while True:
            try:
                await work()
            except MicronovaError as error:
                log.warning(f"{failed}: %s", self._service.host, name, RETRY, error)
                await self._clock.sleep(RETRY)
            except Exception:
                log.exception(failed, self._service.host, name, RETRY)
                await self._clock.sleep(RETRY)

    async def _watch_once(self) -> None:
        fingerprint, state = await self._service.state(self._fingerprint)
        if state is not None:
            self._fingerprint, self._state = fingerprint, state
            self._wake.set()

    async def _report_start(self) -> None:
        interval = await self._service.report(started=True, configurations=self._configurations())
        self._interval = interval or HEARTBEAT
        self._start_reported = True

    async def _heartbeat(self) -> None:
        if not self._start_reported:
            await self._report_start()
        await self._clock.sleep(self._interval)
        await self._send_report()

    async def _send_report(self, up: Sequence[str] = (), down: Sequence[str] = (), dhcp: bool = False) -> None:
        faults = self._faults
        interval = await self._service.report(up=up, down=down, dhcp=dhcp, configurations=self._configurations())
        self._interval = interval or HEARTBEAT
        self._reported_faults = faults

    # --- reconciling ---

    async def _reconcile_once(self) -> None:
        left = max(0.0, self._full_check_at - self._clock.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left if self._complete else min(left, self._retry_delay)):
                await self._wake.wait()
                self._retry_delay = ADOPT_RETRY
        if self._clock.monotonic() >= self._full_check_at:
            self._full_check_at = self._clock.monotonic() + FULL_CHECK
            self._applied.clear()
            self._retries.hurry()
        self._wake.clear()
        if self._state is None:
            return
        fingerprint = self._fingerprint
        self._complete = False
        try:
            self._complete = await self.reconcile(self._state)
        except (PrivilegedError, Unavailable) as error:
            self._faults = (str(error),)
            raise
        if self._complete:
            self.reached = fingerprint

    async def reconcile(self, state: DesiredState) -> bool:
        """Bring the host to the desired state; return whether all of it succeeded."""
        await self._links.ensure()
        found = await self._inventory()
        if found.adopts and await self._links.ensure(outside=True):
            found = await self._inventory()  # with what changed before the watch began
        self._forget_missing(found)
        for namespace, pid in found.dnsmasq.items():
            self._dnsmasq.watch(namespace, pid)
        faults: list[str] = []
        wanted = await self._plan(state, found)
        done = True
        adopting = False
        for verb in self._retries.last(wanted.verbs):
            if self._applied.get(verb.key) == verb:
                continue
            if (reason := self._retries.waiting(verb)) is not None:
                faults.append(reason)
                done = False
                continue
            if isinstance(verb, v.EnsureTap | v.AdoptTap) and not self._protects():
                done = False  # the failed verb has been logged
                continue
            if isinstance(verb, _ENDING):
                self._dnsmasq.forget(verb.namespace)
            try:
                answer = await self._privileged.call(verb)
            except PrivilegedError as error:  # the other networks are still made
                self._applied.pop(verb.key, None)
                self._retries.failed(verb.key, str(error), verb)
                faults.append(str(error))
                done = False
            else:
                self._applied[verb.key] = verb
                self._retries.succeeded(verb.key)
                if isinstance(verb, v.StartDnsmasq | v.StartAdvertiser) and answer.pid:
                    self._dnsmasq.watch(verb.namespace, answer.pid)
                if isinstance(verb, v.LoadFirewall):
                    self._note_closed({**wanted.firewall.closed, **answer.closed})
                if isinstance(verb, v.AdoptTap) and not answer.present:  # no event tells when QEMU opens it
                    del self._applied[verb.key]
                    done, adopting = False, True
        keys = {verb.key for verb in wanted.verbs}
        for key in set(self._applied) - keys:
            del self._applied[key]
        self._retries.keep(keys)
        if self._metadata is not None:
            made = {n: id for n, id in wanted.served.items() if ("EnsureNamespace", n) in self._applied}
            refused = await self._metadata.serve(made, state)
            faults += refused
            done = done and not refused
            if refused:
                self._retries.failed(_METADATA, refused[0])
            else:
                self._retries.succeeded(_METADATA)
        for fault in faults:
            if fault not in self._faults:  # a tenant's network may fail for ever
                log.error("cannot bring host %s to the desired state: %s", self._service.host, fault)
        faults += [f"The rules of {tap} cannot be loaded: {reason}" for tap, reason in self._closed.items()]
        faults += self._note_oversized(wanted.firewall.oversized)
        self._faults = tuple(faults)
        await self._report_ports(state, found)
        self._retry_delay = min(self._retry_delay * 2, RETRY) if adopting else self._retries.delay()
        return done

    async def _plan(self, state: DesiredState, found: v.Found) -> Plan:
        """Return the plan for a state, made in a thread; the firewall, its largest part, is made once for a state."""
        firewall = self._planned[1] if self._planned is not None and self._planned[0] is state else None
        made = await asyncio.to_thread(
            plan_of, self._prefix, self._service.host, state, found, self._domain,
            connections=self._connections, firewall=firewall,
        )  # fmt: skip
        self._planned = state, made.firewall
        return made

    def _note_oversized(self, oversized: dict[str, int]) -> list[str]:
        """Return the faults of remote security groups that are left out, and log the new ones."""
        messages = {
            id: f"The security group {id} has too many addresses ({count} or more) for the firewall of a host. "
            "Rules that name it as remote allow nothing until ports or address pairs are removed from it."
            for id, count in oversized.items()
        }
        for id in messages.keys() - self._oversized:
            log.error("%s", messages[id])
        self._oversized = set(oversized)
        return list(messages.values())

    def _note_closed(self, closed: dict[str, str]) -> None:
        """Remember the ports that stay closed because their rules cannot be loaded, and log the new ones."""
        for tap, reason in closed.items():
            if self._closed.get(tap) != reason:
                log.error("the rules of %s cannot be loaded, and it stays closed until they change: %s", tap, reason)
        self._closed = closed

    def _protects(self) -> bool:
        """Return whether the namespace filters bridged packets with the current rules; only then guests are wired."""
        return ("EnsureNamespace", self._prefix) in self._applied and _FIREWALL in self._applied

    async def _inventory(self) -> v.Found:
        return (await self._privileged.call(v.Inventory())).found or v.Found()

    def _forget_missing(self, found: v.Found) -> None:
        """Forget applied verbs whose result is gone, so that they are sent again."""
        if self._prefix not in found.namespaces:  # with everything in it
            self._applied.clear()
        there = {*found.namespaces, *found.links}
        indices = {name: link.index for name, link in found.links.items() if name.startswith("tap")}
        # The tap of a restarted guest has the same name and another index, and nothing was applied to it.
        exchanged = {name for name, index in indices.items() if self._indices.get(name, index) != index}
        self._indices = indices
        self._retries.forget([("EnsureTap", name) for name in exchanged])
        for key, verb in list(self._applied.items()):
            named = [getattr(verb, name, None) for name in ("namespace", "bridge", "outer", "tap")]
            missing = any(name is not None and name not in there for name in named)
            stopped = isinstance(verb, v.StartDnsmasq | v.StartAdvertiser) and verb.namespace not in found.dnsmasq
            cut = isinstance(verb, v.EnsureTrunk) and any(each.tap not in there for each in verb.subports)
            unplugged = isinstance(verb, v.EnsureTap) and _is_unplugged(verb, found)
            replaced = getattr(verb, "tap", None) in exchanged
            removal = isinstance(verb, v.DeleteNamespace | v.DeleteLink | v.StopDnsmasq)
            if missing or stopped or cut or unplugged or replaced or removal:
                del self._applied[key]

    async def _report_ports(self, state: DesiredState, found: v.Found) -> None:
        """Report ports that became wired (plugged, with their firewall rules) or are no longer so.

        The status in the desired state may be older than the last report. Rules that cannot be loaded do not unplug a
        port: the former ones stay.
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
            if port.is_guest and not self._is_wired(port):
                if before is not None:
                    taps[port.id] = before
                continue
            taps[port.id] = index
            exchanged = before is not None and before != index
            if exchanged:
                down.append(port.id)  # unplugged and plugged again since the last report: compute waits for the event
            if port.status != "ACTIVE" or exchanged:
                up.append(port.id)
        dhcp = lacks_dhcp_ports(self._service.host, state)
        if up or down or dhcp or self._faults != self._reported_faults:
            await self._send_report(up, down, dhcp)
        self._taps = taps

    def _is_wired(self, port: Port) -> bool:
        tap = tap_name(port.id)
        return self._protects() and ("EnsureTap", tap) in self._applied and tap not in self._closed

    def _index(self, port: Port, found: v.Found) -> int | None:
        """Return the index of a port's plugged device, 0 for a veth pair, and None if there is none."""
        if not port.admin_state_up:
            return None
        if not port.is_guest:
            return 0 if ("EnsureVeth", outer_name(port.id)) in self._applied else None
        link = found.links.get(tap_name(port.id))
        if link is None or not (("EnsureTap", tap_name(port.id)) in self._applied or (link.bridge and link.up)):
            return None
        return link.index


def _is_unplugged(verb: v.EnsureTap, found: v.Found) -> bool:
    link = found.links.get(verb.tap)
    return link is None or link.bridge != verb.bridge or not link.up
