"""The metadata proxy identifies a guest by network and address, whatever its request says."""

from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from micronova.embedded.network.agent.metadata import HEAD_LIMIT
from micronova.http.client import Answer
from micronova.http.host_keys import HostKeyring, sign_metadata
from micronova.objects.errors import Unavailable
from tests.clocks import ManualClock
from tests.functional.metadata_proxies import MetadataProxies, guest_port, keys_of

KEYRING = HostKeyring(b"0123456789abcdef")
HOST = "compute-17"
NOW = 1_800_000_000.0
MINE, THEIRS = "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000002"


class Service:
    """A metadata service that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Mapping[str, str], bytes | None]] = []
        self.works = True
        self.refuses = 0  # number of requests to refuse

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        if not self.works:
            raise Unavailable("http://metadata.internal:8775 does not answer.")
        self.asked.append((method, url, dict(headers), body))
        if self.refuses:
            self.refuses -= 1
            return Answer(403, {"content-type": "text/plain"}, b"no")
        return Answer(200, {"content-type": "text/plain"}, b"here")

    async def close(self) -> None:
        pass


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def clock() -> ManualClock:
    made = ManualClock()
    made.time = NOW
    return made


@pytest_asyncio.fixture
async def proxies(service: Service, clock: ManualClock) -> AsyncIterator[MetadataProxies]:
    made = MetadataProxies(service, keys_of(KEYRING, HOST, clock.now))
    await made.serve(
        [guest_port("a", "127.0.0.5", MINE, "project-a"), guest_port("b", "127.0.0.5", THEIRS, "project-b")]
    )
    yield made
    await made.close()


async def test_a_guest_is_known_by_network_and_address(service: Service, proxies: MetadataProxies) -> None:
    for network, server, project in (("a", MINE, "project-a"), ("b", THEIRS, "project-b")):
        assert await proxies.get(network, "127.0.0.5", "/latest/meta-data/?x=1") == (200, b"here")
        method, url, headers, body = service.asked.pop()
        assert (method, url, body) == ("GET", "/latest/meta-data/?x=1", None)
        assert headers == {
            "x-instance-id": server,
            "x-tenant-id": project,
            "x-forwarded-for": "127.0.0.5",
            "x-metadata-host": HOST,
            "x-metadata-key-expires": "1800000900",
            "x-instance-id-signature": sign_metadata(
                KEYRING.metadata_key(HOST, 1_800_000_900), HOST, server, project, "127.0.0.5"
            ),
        }
    assert (await proxies.get("a", "127.0.0.6", "/"))[0] == 404  # no guest has this address
    assert service.asked == []


@pytest.mark.parametrize(
    "name",
    ["X-Instance-ID", "x-instance-id", "X-INSTANCE-ID", "X-Instance-Id ", " X-Instance-ID", "X_Instance_ID",
     "X-Tenant-ID", "X-Project-Id", "X-Forwarded-For", "Forwarded", "X-Instance-ID-Signature", "X-Metadata-Provider",
     "X-Metadata-Provider-Signature", "X-Metadata-Host", "X-Metadata-Key-Expires", "X-Auth-Token", "Host",
     "Cookie", "Traceparent"],
)  # fmt: skip
async def test_no_header_of_a_guest_says_who_it_is(service: Service, proxies: MetadataProxies, name: str) -> None:
    lines = [f"{name}: {THEIRS}", f"{name}:\t{THEIRS}", f"{name.swapcase()}:{THEIRS}"]
    assert (await proxies.get("a", "127.0.0.5", "/", *lines))[0] == 200
    [(_, _, headers, _)] = service.asked
    assert headers["x-instance-id"] == MINE and headers["x-tenant-id"] == "project-a"
    assert THEIRS not in str(headers)
    assert set(headers) == {
        "x-instance-id", "x-tenant-id", "x-forwarded-for", "x-instance-id-signature", "x-metadata-host",
        "x-metadata-key-expires",
    }  # fmt: skip
    assert headers["x-metadata-host"] == HOST


async def test_harmless_headers_are_handed_on(service: Service, proxies: MetadataProxies) -> None:
    await proxies.get("a", "127.0.0.5", "/", "User-Agent: cloud-init", "Accept: */*", "X-Other: 1")
    headers = service.asked[0][2]
    assert headers["user-agent"] == "cloud-init" and headers["accept"] == "*/*" and "x-other" not in headers


async def test_a_body_is_handed_on(service: Service, proxies: MetadataProxies) -> None:
    assert (await proxies.post("a", "127.0.0.5", "/openstack/latest/password", b"secret"))[0] == 200
    assert service.asked[0][0] == "POST" and service.asked[0][3] == b"secret"


@pytest.mark.parametrize(
    "request_",
    [
        f"GET / HTTP/1.1\r\nUser-Agent: x\nX-Instance-ID: {THEIRS}\r\n\r\n",
        f"GET / HTTP/1.1\r\nUser-Agent: x\rX-Instance-ID: {THEIRS}\r\n\r\n",
        "GET / HTTP/1.1\r\nUser-Agent: x\x00y\r\n\r\n",
        "GET / HTTP/1.1\r\nno colon\r\n\r\n",
        "GET / HTTP/1.1\r\n: no name\r\n\r\n",
        "GET  / HTTP/1.1\r\n\r\n",
        "GET latest HTTP/1.1\r\n\r\n",
        "GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        "GET /../compute/v2.1/servers HTTP/1.1\r\n\r\n",
        "GET /latest/%2e%2E/%2e./compute HTTP/1.1\r\n\r\n",
        "GET /latest\\..\\compute HTTP/1.1\r\n\r\n",
        "GET /a/./b HTTP/1.1\r\n\r\n",
        "GET /\x7f HTTP/1.1\r\n\r\n",
        f"GET /{'x' * 3000} HTTP/1.1\r\n\r\n",
        "DELETE / HTTP/1.1\r\n\r\n",
        "CONNECT elsewhere:80 HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n",
        f"POST / HTTP/1.1\r\nContent-Length: {'9' * 5000}\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: 70000\r\n\r\n",
        f"GET / HTTP/1.1\r\nX: {'x' * HEAD_LIMIT}\r\n\r\n",
        "\r\n\r\n",
    ],
)
async def test_what_is_not_a_plain_request_is_refused(
    service: Service, proxies: MetadataProxies, request_: str
) -> None:
    assert (await proxies.send("a", "127.0.0.5", request_.encode("latin-1")))[0] == 400
    assert service.asked == []


async def test_without_the_service_a_guest_is_told_to_come_again(service: Service, proxies: MetadataProxies) -> None:
    service.works = False
    status, body = await proxies.get("a", "127.0.0.5", "/")
    assert status == 503 and b"internal" not in body


async def test_who_is_gone_is_nobody(service: Service, proxies: MetadataProxies) -> None:
    await proxies.serve([guest_port("a", "127.0.0.6", MINE, "project-a")])
    assert (await proxies.get("a", "127.0.0.5", "/"))[0] == 404
    assert (await proxies.get("a", "127.0.0.6", "/"))[0] == 200


async def test_a_key_that_is_refused_is_exchanged_once(
    service: Service, proxies: MetadataProxies, clock: ManualClock
) -> None:
    await proxies.get("a", "127.0.0.5", "/")
    clock.time += 60
    service.refuses = 1
    assert await proxies.get("a", "127.0.0.5", "/") == (200, b"here")
    assert [headers["x-metadata-key-expires"] for _, _, headers, _ in service.asked] == [
        "1800000900", "1800000900", "1800000960",
    ]  # fmt: skip
    service.refuses = 2
    assert (await proxies.get("a", "127.0.0.5", "/"))[0] == 403
    assert service.asked[-1][2]["x-metadata-key-expires"] == "1800000960", "a new key every time would be a flood"
