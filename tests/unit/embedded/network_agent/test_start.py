"""A host that is started while nobody is there to hear of it, and what it asks for later."""

import asyncio
import socket
from typing import Any

import pytest

from micronova.embedded.network.agent.agent import RETRY, NetworkAgent
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.desired_state import DesiredState, FixedIP, Network, Port, Subnet
from micronova.embedded.network.agent.dhcp import lacks_dhcp_ports
from micronova.http.client import Answer, ServiceClient
from micronova.objects.errors import Forbidden, MicronovaError, Unavailable
from micronova.privileged import verbs as v
from tests.clocks import ManualClock


class Helper:
    """Stands for the privileged helper."""

    async def call(self, verb: v.Verb) -> v.Reply:
        return v.Reply()

    async def open(self, verb: v.Verb) -> socket.socket:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Service:
    """Stands for the network service: takes reports, and has no news."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.error: MicronovaError | None = None
        self.answer: Any = Answer(204, {}, b"").json()

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        if self.error is not None:
            self.refused.put_nowait(method)
            raise self.error
        if method == "GET":
            await asyncio.Event().wait()
        self.reports.put_nowait(body)
        return self.answer


def agent(service: Service, clock: ManualClock) -> NetworkAgent:
    client: ServiceClient = service  # type: ignore[assignment]
    return NetworkAgent(NetworkServiceClient(client, "h"), Helper(), clock, prefix="mn-1a2b3c4d")


async def test_the_service_names_the_interval_of_heartbeats() -> None:
    service, clock = Service(), ManualClock()
    service.answer = {"interval": 40.0}
    made = agent(service, clock)
    await made.start()
    try:
        assert (await asyncio.wait_for(service.reports.get(), 10))["started"]
        await asyncio.sleep(0)
        await clock.jump(39)
        assert service.reports.empty()
        service.answer = None  # of an older service
        await clock.jump(1)
        await asyncio.wait_for(service.reports.get(), 10)
        await clock.jump(25)
        await asyncio.wait_for(service.reports.get(), 10)
    finally:
        await made.stop()


async def test_a_start_that_nobody_hears_is_reported_later(caplog: pytest.LogCaptureFixture) -> None:
    service, clock = Service(), ManualClock()
    service.error = Unavailable("no conductor answers")
    made = agent(service, clock)
    await made.start()
    try:
        tried = [await asyncio.wait_for(service.refused.get(), 10) for _ in range(3)]
        assert tried == ["POST", "GET", "POST"], "at the start, then by those who watch and tell"
        assert service.reports.empty()
        for loop in ("watch", "heartbeat"):
            assert (
                f"network agent of host h: {loop} failed and is tried again in 1 s: no conductor answers" in caplog.text
            )
        service.error = None
        await clock.jump(RETRY)
        assert (await asyncio.wait_for(service.reports.get(), 10))["started"]
    finally:
        await made.stop()


async def test_a_host_that_is_not_wanted_does_not_start() -> None:
    service = Service()
    service.error = Forbidden("wicked may not send messages of host h.")
    with pytest.raises(Forbidden, match="wicked may not send"):
        await agent(service, ManualClock()).start()


FOUR = Subnet(id="four", cidr="10.0.0.0/24")
QUIET = Subnet(id="quiet", cidr="10.1.0.0/24", enable_dhcp=False)
OWN = Subnet(id="own", cidr="fd00::/64", ip_version=6, enable_dhcp=False, ipv6_address_mode="slaac")


def port(owner: str, *subnets: str, host: str = "h") -> Port:
    fixed = tuple(FixedIP(subnet_id=each, ip_address="10.0.0.9") for each in subnets)
    return Port(id=owner, network_id="net", mac_address="fa:16:3e:00:00:01", device_owner=owner, host=host,
                fixed_ips=fixed)  # fmt: skip


GUEST, SERVER = "compute:nova", "network:dhcp"


@pytest.mark.parametrize(
    ("subnets", "ports", "lacking"),
    [
        ((FOUR,), [], False),
        ((FOUR,), [port(GUEST, "four")], True),
        ((FOUR,), [port(GUEST, "four", host="another")], False),
        ((QUIET,), [port(GUEST, "quiet")], False),
        ((FOUR, QUIET), [port(GUEST, "four"), port(SERVER, "four")], False),
        ((FOUR, QUIET), [port(GUEST, "four"), port(SERVER, "four", "quiet")], True),
        ((FOUR, OWN), [port(GUEST, "four"), port(SERVER, "four", "own")], False),
        ((FOUR, OWN), [port(GUEST, "four"), port(SERVER, "own")], True),
        ((FOUR,), [port(SERVER, "four")], True),  # the last guest has gone
        ((QUIET,), [port(GUEST, "quiet"), port(SERVER, "quiet")], True),
        ((FOUR,), [port(GUEST, "four"), port(SERVER, "four", host="another")], True),
    ],
)
def test_where_a_dhcp_server_is_missing(subnets: tuple[Subnet, ...], ports: list[Port], lacking: bool) -> None:
    state = DesiredState(networks=(Network(id="net", subnets=subnets),), ports=tuple(ports))
    assert lacks_dhcp_ports("h", state) is lacking
