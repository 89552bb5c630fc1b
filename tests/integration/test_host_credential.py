"""A compute host of a region has its broker user and nothing else; all of it follows from what `host add` prints.

PostgreSQL, RabbitMQ, and a process for each role. The host's network agent is represented by the means that it works
with, because it would need a kernel to work on; `tests/e2e/split.py` has the whole of it.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.rpcapi import ConsoleAuthAPI
from micronova.conf.settings import load
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.desired_state import DesiredState, Port
from micronova.objects.context import Context
from micronova.objects.errors import Forbidden
from tests.cluster import Cluster
from tests.command import ok, refused
from tests.functional.cloud import IMAGE
from tests.functional.consoles import ConsoleClient, read_until, token_of
from tests.functional.metadata_proxies import MetadataProxies, guest_port
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

NETWORK, METADATA, CONSOLE = free_port(), free_port(), free_port()
RELAY = free_port()


@dataclass
class Region:
    """A cloud, and the settings of its hosts: one has a compute agent, one was stolen, one names false addresses."""

    cluster: Cluster
    host: Path
    stolen: Path
    liar: Path

    def boot(self, networks: Any, host: Path | None = None) -> str:
        """Ask for a server, on the host with the compute agent unless another is named."""
        zone = f"nova:{load(host or self.host, environ={}).default.host}"
        server = {"name": "web", "imageRef": IMAGE, "flavorRef": "1", "networks": networks, "availability_zone": zone}
        return str(self.cluster.request("POST", "/servers", {"server": server})[1]["server"]["id"])

    async def becomes(self, server: str, status: str) -> None:
        """Wait until a server has a status."""
        async with asyncio.timeout(30):
            while self.cluster.request("GET", f"/servers/{server}")[1]["server"]["status"] != status:
                await asyncio.sleep(0.1)  # other processes tell us nothing: we have to ask

    async def server(self, host: Path | None = None) -> str:
        """Boot a server on a host."""
        made = self.boot("none", host)
        await self.becomes(made, "ACTIVE")
        return made

    def console(self, server: str) -> str:
        """Ask for a link to a server's serial console."""
        wanted = {"remote_console": {"protocol": "serial", "type": "serial"}}
        status, body = self.cluster.request("POST", f"/servers/{server}/remote-consoles", wanted)
        assert status == 200, body
        return token_of(body["remote_console"]["url"])


def _add(cluster: Cluster, broker: RabbitMQ, *options: str) -> Path:
    """Do what `host add` says, and return the file with the settings that it prints."""
    name = f"host-{uuid.uuid4().hex[:6]}"
    where = ("--config", cluster.config, "--dir", cluster.directory / "tool")
    lines = ok("host", "add", name, *options, *where).splitlines()
    commands = [line for line in lines if "rabbitmqctl " in line]
    assert len(commands) == 2
    broker.do(*commands)
    file = cluster.directory / f"{name}.toml"
    file.write_text("\n".join(line for line in lines if line not in commands))
    return file


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Region]:
    broker: RabbitMQ = request.getfixturevalue("rabbitmq")
    cluster = Cluster(
        Path(tmp_path_factory.mktemp("region")),
        request.getfixturevalue("module_database_url"),
        request.getfixturevalue("module_amqp_url"),
        default={"control_users": ["guest"]},
        conductor={"require_host_users": True},
        neutron={
            "endpoint_override": f"http://127.0.0.1:{NETWORK}/network",
            "metadata_url": f"http://127.0.0.1:{METADATA}",
            "ticket_key": "5b" * 32,
        },
    )
    compute = f"http://127.0.0.1:{cluster.port}/compute/v2.1"
    for role in ("api", "conductor", "scheduler"):
        cluster.add(role, role)
    cluster.add("network", "network", MICRONOVA__API__PORT=str(NETWORK), MICRONOVA__NOVA__ENDPOINT_OVERRIDE=compute)
    cluster.add("metadata", "metadata", MICRONOVA__API__PORT=str(METADATA))
    ok("db", "upgrade", "--config", cluster.config, "--dir", cluster.directory / "tool")
    relay = ("--console-address", f"127.0.0.1:{RELAY}")
    made = Region(cluster, _add(cluster, broker, *relay), _add(cluster, broker), _add(cluster, broker, *relay))
    cluster.add("compute", "compute", made.host, MICRONOVA__COMPUTE__COMPUTE_DRIVER="fake")
    # Without a relay of its own, a host names the addresses at which its simulated consoles listen.
    other = {"MICRONOVA__COMPUTE__COMPUTE_DRIVER": "fake", "MICRONOVA__CONSOLE__RELAY_LISTEN": ""}
    cluster.add("liar", "compute", made.liar, **other)
    cluster.add("console", "console", MICRONOVA__API__PORT=str(CONSOLE), MICRONOVA__DATABASE__CONNECTION="")
    try:
        cluster.start("api", "conductor", "scheduler", "network", "metadata", "console")
        cluster.wait_ready(hosts=0)
        cluster.start("compute", "liar")
        cluster.wait_ready(hosts=2)
        yield made
    finally:
        cluster.stop()


@contextlib.asynccontextmanager
async def agent(file: Path, place: Path, **default: Any) -> AsyncIterator[Process]:
    """The process of a host's network agent, without the agent."""
    process = Process(load(file, environ={}, default=default), ["network-agent"], StateDirectory(place))
    await process.connect()
    try:
        yield process
    finally:
        await process.stop()


def service(process: Process) -> NetworkServiceClient:
    return NetworkServiceClient(process.clients.network_agent_client(process.clients.host_keys()), process.host)


def test_what_a_host_is_told(region: Region) -> None:
    settings, cloud = load(region.host, environ={}), load(region.cluster.config, environ={})
    assert settings.default.host in settings.default.transport_url
    assert settings.default.control_users == ("guest",)
    assert (settings.neutron.endpoint_override, settings.neutron.metadata_url) == (
        cloud.neutron.endpoint_override, cloud.neutron.metadata_url,
    )  # fmt: skip
    text = region.host.read_text()
    for secret in ("5a" * 32, "5b" * 32, "guest:guest", cloud.database.connection, "[identity]"):
        assert secret not in text
    assert not region.cluster.log("compute").count("ACCESS_REFUSED")


def test_names_that_no_host_may_have(region: Region) -> None:
    where = ("--config", region.cluster.config, "--dir", region.cluster.directory / "tool")
    assert "a broker user of the control services" in refused("host", "add", "guest", *where)
    for name in ("a b", "x;reboot", "'", "größe", ".hidden", "x" * 256):
        assert "is no name for a host: use letters" in refused("host", "add", name, *where)


async def test_the_network_agent_of_a_host(region: Region, tmp_path: Path) -> None:
    async with agent(region.host, tmp_path) as process:
        network = service(process)
        await network.report(started=True)
        fingerprint, state = await network.state()
        assert fingerprint and state is not None
    async with agent(region.stolen, tmp_path, host=load(region.host, environ={}).default.host) as process:
        with pytest.raises(Forbidden, match="may not send messages of host"):
            await service(process).state()
    assert not any(tmp_path.iterdir()), "it wants no files with keys"


async def test_compute_hears_that_the_agent_has_wired_a_port(region: Region, tmp_path: Path) -> None:
    """The network service, which has no API beside it, tells compute where its settings say."""
    async with agent(region.host, tmp_path) as process:
        network = service(process)
        await network.report(started=True)
        server = region.boot("auto")
        fingerprint = ""
        state: DesiredState | None = None
        ports: list[Port] = []
        async with asyncio.timeout(30):
            while not ports:
                fingerprint, changed = await network.state(fingerprint)
                state = changed or state
                ports = [port for port in state.ports if port.device_id == server] if state else []
        assert region.cluster.request("GET", f"/servers/{server}")[1]["server"]["status"] == "BUILD"
        await network.report(up=[port.id for port in ports])
        await region.becomes(server, "ACTIVE")


async def test_metadata_of_a_hosts_own_guests(region: Region, tmp_path: Path) -> None:
    port = guest_port("net", "127.0.0.5", await region.server(), "admin")
    for file, answer in ((region.host, (200, b"web")), (region.stolen, (404, None))):
        async with agent(file, tmp_path) as process:
            proxies = MetadataProxies(process.clients.metadata(), process.clients.host_keys())
            await proxies.serve([port])
            status, body = await proxies.get("net", "127.0.0.5", "/latest/meta-data/hostname")
            assert (status, body if answer[1] else None) == answer
            await proxies.close()


async def test_a_host_gives_no_orders(region: Region, tmp_path: Path) -> None:
    name = load(region.host, environ={}).default.host
    async with agent(region.stolen, tmp_path) as process:
        assert process.bus is not None
        with pytest.raises(Forbidden, match=r"may not send compute\.list_guests"):
            await ComputeAPI(process.bus).list_guests(Context(sender="guest"), name)
        with pytest.raises(Forbidden, match=r"may not send conductor\.check_console"):
            await ConsoleAuthAPI(process.bus).is_there(str(uuid.uuid4()), name)
    async with agent(region.cluster.config, tmp_path) as process:
        assert process.bus is not None
        await ComputeAPI(process.bus).list_guests(Context(), name)


async def test_the_console_proxy_connects_to_registered_addresses_only(region: Region) -> None:
    honest = region.console(await region.server())
    async with aiohttp.ClientSession() as session:
        client = ConsoleClient(f"http://127.0.0.1:{CONSOLE}", session)
        async with client.socket(honest) as socket:
            await read_until(socket, b"web login: ")
    lying = await region.server(region.liar)
    wanted = {"remote_console": {"protocol": "serial", "type": "serial"}}
    status, body = region.cluster.request("POST", f"/servers/{lying}/remote-consoles", wanted)
    assert status == 503 and "has no relay" in str(body)


def test_addresses_that_no_proxy_reaches(region: Region) -> None:
    where = ("--config", region.cluster.config, "--dir", region.cluster.directory / "tool")
    for address in (
        "192.0.2.1",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "0.0.0.0:1",
        "[::]:1",
        "2001:db8::1:1",
        "a b:1",
        ":1",
    ):
        assert "is no console address" in refused("host", "add", "h", "--console-address", address, *where)


async def test_a_host_that_is_removed_gets_nothing_more(region: Region, tmp_path: Path) -> None:
    name = load(region.stolen, environ={}).default.host
    where = ("--config", region.cluster.config, "--dir", region.cluster.directory / "tool")
    async with agent(region.stolen, tmp_path) as process:
        await service(process).state()
        told = ok("host", "remove", name, *where)
        assert f"rabbitmqctl delete_user {name}" in told and "within 15 minutes" in told
        with pytest.raises(Forbidden, match=f"Host {name} is not one of this cloud's: `micronova host add {name}`"):
            await service(process).state()
    assert "no host" in refused("host", "remove", name, *where)
