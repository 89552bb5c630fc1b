"""Guests that hold connections to their metadata proxy, and what others notice of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from micronova.embedded.network.agent.metadata import MetadataLimits
from micronova.http.client import Answer
from micronova.http.host_keys import HostKeyring
from tests.functional.metadata_proxies import MetadataProxies, guest_port, keys_of

GREEDY, OTHER, FOREIGN = "127.0.0.5", "127.0.0.6", "127.0.0.7"
REQUEST = b"GET / HTTP/1.1\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Service:
    """A metadata service whose answers are as long as wanted."""

    def __init__(self) -> None:
        self.body = b"here"
        self.asked = asyncio.Event()

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        self.asked.set()
        return Answer(200, {"content-type": "text/plain"}, self.body)

    async def close(self) -> None:
        pass


@pytest.fixture
def service() -> Service:
    return Service()


async def _proxies(service: Service, limits: MetadataLimits) -> MetadataProxies:
    made = MetadataProxies(service, keys_of(HostKeyring(b"0123456789abcdef"), "h"), limits)
    ports = [("a", GREEDY), ("a", OTHER), ("b", FOREIGN)]
    await made.serve([guest_port(network, address, address, "project") for network, address in ports])
    return made


@pytest_asyncio.fixture
async def patient(service: Service) -> AsyncIterator[MetadataProxies]:
    """Yield proxies that wait long enough for every test."""
    made = await _proxies(service, MetadataLimits(per_guest=3, per_network=5, total=7, timeout=600))
    yield made
    await made.close()


async def _hold(proxies: MetadataProxies, network: str, address: str, count: int, refused: int) -> list[Connection]:
    """Open so many connections, of which the last ones are refused; return the others, which wait for a request."""
    made = [await proxies.connect(network, address) for _ in range(count)]
    for _, writer in made:
        writer.write(b"GET / ")
    for reader, writer in made[count - refused :]:
        assert b"503 Service Unavailable" in await asyncio.wait_for(reader.read(), 30)
        writer.close()
    return made[: count - refused]


async def _finish(held: list[Connection]) -> None:
    """Finish the requests and expect their answers."""
    for reader, writer in held:
        writer.write(b"HTTP/1.1\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"here")
        writer.close()


async def test_a_guest_has_its_own_connections_only(patient: MetadataProxies) -> None:
    held = await _hold(patient, "a", GREEDY, 10, refused=7)
    assert (await patient.get("a", GREEDY, "/"))[0] == 503
    assert await patient.get("a", OTHER, "/") == (200, b"here")
    await _finish(held)
    assert (await patient.get("a", GREEDY, "/"))[0] == 200


async def test_a_network_has_its_own_connections_only(patient: MetadataProxies) -> None:
    held = await _hold(patient, "a", GREEDY, 3, refused=0) + await _hold(patient, "a", OTHER, 3, refused=1)
    assert await patient.get("b", FOREIGN, "/") == (200, b"here")
    await _finish(held)


async def test_all_guests_together_have_a_limited_number(patient: MetadataProxies) -> None:
    held = await _hold(patient, "a", GREEDY, 3, refused=0) + await _hold(patient, "a", OTHER, 2, refused=0)
    held += await _hold(patient, "b", FOREIGN, 3, refused=1)
    await _finish(held)
    assert await patient.get("b", FOREIGN, "/") == (200, b"here")


async def test_addresses_without_a_port_count_as_one_guest(patient: MetadataProxies) -> None:
    held = [await _hold(patient, "a", f"127.0.0.{10 + number}", 1, refused=0) for number in range(3)]
    await _hold(patient, "a", "127.0.0.20", 1, refused=1)
    assert await patient.get("a", OTHER, "/") == (200, b"here")
    for [(_, writer)] in held:
        writer.close()


@pytest_asyncio.fixture
async def hasty(service: Service) -> AsyncIterator[MetadataProxies]:
    made = await _proxies(service, MetadataLimits(per_guest=1, per_network=5, total=7, timeout=0.05))
    yield made
    await made.close()


async def test_a_guest_that_sends_nothing_is_disconnected(hasty: MetadataProxies) -> None:
    [(reader, _)] = await _hold(hasty, "a", GREEDY, 1, refused=0)
    assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_a_guest_that_does_not_read_its_answer_is_disconnected(service: Service, hasty: MetadataProxies) -> None:
    service.body = bytes(64 << 20)  # more than the buffers of both ends hold
    reader, writer = await hasty.connect("a", GREEDY)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(REQUEST)
    await asyncio.wait_for(service.asked.wait(), 30)
    service.body = b"here"
    async with asyncio.timeout(30):
        while (await hasty.get("a", GREEDY, "/"))[0] != 200:  # it has one connection only
            await asyncio.sleep(0.02)
    writer.close()
