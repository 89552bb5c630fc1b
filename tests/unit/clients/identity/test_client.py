"""The identity client: the service user's token, the catalog, validation of tokens, existence of projects."""

import asyncio
from collections.abc import Mapping

import pytest

from micronova.clients.identity.catalog import Catalog
from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.http.auth import KeystoneTokens
from micronova.http.client import Answer, ASGITransport, RequestBody
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized, Unavailable
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import SERVICE, Cloud

CONTEXT = RequestContext(request_id="req-1")


class Counting(ASGITransport):
    """A transport that counts the requests that pass."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud.identity.service.app, host="cloud.example")
        self.requests: list[str] = []

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: RequestBody) -> Answer:
        self.requests.append(f"{method} {url.partition('?')[0]}")
        return await super().request(method, url, headers, body)


@pytest.fixture
def transport(cloud: Cloud) -> Counting:
    return Counting(cloud)


@pytest.fixture
def token(transport: Counting, clock: HeldClock) -> ServiceToken:
    user, password, project = SERVICE
    return ServiceToken(transport, username=user, password=password, project_name=project, now=clock.now)


@pytest.fixture
def client(transport: Counting, token: ServiceToken) -> IdentityClient:
    return IdentityClient(transport, token)


async def test_a_token_is_fetched_once_and_renewed_in_time(
    cloud: Cloud, transport: Counting, token: ServiceToken, clock: HeldClock
) -> None:
    first = await asyncio.gather(*(token.get() for _ in range(20)))
    assert len(set(first)) == 1 and transport.requests == ["POST /v3/auth/tokens"]
    clock.time += cloud.identity.core.token_lifetime - 130
    assert await token.get() == first[0]
    clock.time += 15
    assert await token.get() != first[0]
    assert len(transport.requests) == 2


async def test_a_short_lived_token_is_used_all_the_same(cloud: Cloud, transport: Counting, clock: HeldClock) -> None:
    user, password, project = SERVICE
    token = ServiceToken(
        transport,
        username=user,
        password=password,
        project_name=project,
        now=clock.now,
        margin=100_000,
    )
    await token.get()
    await token.get()
    assert len(transport.requests) == 1


async def test_wrong_settings_are_not_the_callers_fault(transport: Counting, clock: HeldClock) -> None:
    token = ServiceToken(transport, username="micronova", password="wrong", project_name="service", now=clock.now)
    with pytest.raises(Unavailable):
        await token.get()
    with pytest.raises(Unavailable):
        await IdentityClient(transport, token).validate("whatever")


async def test_endpoints_by_type_interface_and_region(cloud: Cloud, token: ServiceToken, clock: HeldClock) -> None:
    catalog = Catalog(token, clock, region="RegionOne")
    with pytest.raises(Unavailable, match="has not sent its catalog yet"):
        catalog.known_endpoint("compute")
    assert await catalog.endpoint("compute") == "http://cloud.example/compute", "without the version"
    assert await catalog.endpoint("image") == catalog.known_endpoint("image") == "http://cloud.example/image"
    with pytest.raises(Unavailable, match="no endpoint of the image service in region Elsewhere"):
        await Catalog(token, clock, region="Elsewhere").endpoint("image")


async def test_an_endpoint_that_is_added_later(
    cloud: Cloud, token: ServiceToken, transport: Counting, clock: HeldClock
) -> None:
    admin = await cloud.admin()
    catalog = Catalog(token, clock, region="RegionOne")
    for _ in range(3):
        with pytest.raises(Unavailable, match="no endpoint of the dns service"):
            await catalog.endpoint("dns")
    service = (await admin.make("/services", type="dns", name="designate"))["id"]
    await admin.make("/endpoints", service_id=service, interface="admin", url="http://a", region_id="RegionOne")
    await admin.make("/endpoints", service_id=service, interface="public", url="http://p/v2/", region_id="RegionOne")
    with pytest.raises(Unavailable):
        await catalog.endpoint("dns")
    assert len(transport.requests) == 1, "misses do not fetch tokens"
    await catalog.refresh()
    assert await catalog.endpoint("dns") == "http://p"
    url = "http://i/v2.1/%(tenant_id)s"
    await admin.make("/endpoints", service_id=service, interface="internal", url=url, region_id="RegionOne")
    await catalog.refresh()
    assert await catalog.endpoint("dns") == "http://p", "the catalog is as old as the token"
    clock.time += cloud.identity.core.token_lifetime
    assert await catalog.endpoint("dns") == "http://i"
    assert len(transport.requests) == 3


async def test_of_several_endpoints_of_one_interface_the_first_counts(
    cloud: Cloud, token: ServiceToken, clock: HeldClock
) -> None:
    await token.get()
    first, second = "http://one", "http://two"
    for urls in ((first, second), (second, first)):
        token.catalog = _catalog("dns", *(("public", url) for url in urls))
        assert await Catalog(token, clock, region="RegionOne").endpoint("dns") == urls[0]


@pytest.mark.parametrize(
    ("endpoints", "tls_only", "chosen"),
    [
        ([("internal", "http://i"), ("public", "https://p")], True, "https://p"),
        ([("internal", "http://i"), ("public", "https://p")], False, "http://i"),
        ([("internal", "HTTPS://i")], True, "HTTPS://i"),
        ([("internal", "http://i")], True, None),
        ([("internal", "ftp://i"), ("public", "file:///p")], False, None),
    ],
)
async def test_the_token_goes_nowhere_without_tls_if_the_identity_service_has_it(
    token: ServiceToken, clock: HeldClock, endpoints: list[tuple[str, str]], tls_only: bool, chosen: str | None
) -> None:
    await token.get()
    token.catalog = _catalog("dns", *endpoints)
    catalog = Catalog(token, clock, region="RegionOne", tls_only=tls_only)
    if chosen is not None:
        assert await catalog.endpoint("dns") == chosen
        return
    with pytest.raises(Unavailable, match=rf"has only {endpoints[0][1]}.* endpoint_override"):
        await catalog.endpoint("dns")


def _catalog(service: str, *endpoints: tuple[str, str]) -> list[dict[str, object]]:
    listed = [{"interface": interface, "url": url, "region_id": "RegionOne"} for interface, url in endpoints]
    return [{"type": service, "endpoints": listed}]


async def test_validation(cloud: Cloud, client: IdentityClient, clock: HeldClock) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    told = await client.validate(user.token or "")
    assert told["user"]["name"] == "alice" and told["project"]["id"] == user.project_id
    assert {role["name"] for role in told["roles"]} == {"member", "reader"}
    assert "catalog" not in told
    for wrong in ("", "mn1.zzz", "gAAAAB", "x" * 9000, "caf\u00e9", "a\r\nb"):
        with pytest.raises(Unauthorized):
            await client.validate(wrong)
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"enabled": False}}, 200)
    with pytest.raises(Unauthorized):
        await client.validate(user.token or "")
    clock.time += cloud.identity.core.token_lifetime + 1
    with pytest.raises(Unauthorized):
        await client.validate(admin.token or "")


async def test_our_own_revoked_token_is_replaced(cloud: Cloud, client: IdentityClient, token: ServiceToken) -> None:
    admin = await cloud.admin()
    await client.validate(admin.token or "")
    mine = await token.get()
    assert (await admin.request("DELETE", "/auth/tokens", subject=mine)).status == 204
    assert (await client.validate(admin.token or ""))["user"]["name"] == "admin"
    assert await token.get() != mine


async def test_keystone_tokens_authenticates_with_it(
    cloud: Cloud, client: IdentityClient, transport: Counting, clock: HeldClock
) -> None:
    admin = await cloud.admin()
    tokens = KeystoneTokens(client, clock.now, cache_seconds=300)
    caller = await tokens.authenticate(admin.token, CONTEXT)
    assert (caller.user_id, caller.project_id, caller.request_id) == (admin.user_id, admin.project_id, "req-1")
    assert "admin" in caller.roles and caller.project_domain_id == "default"
    asked = len(transport.requests)
    await tokens.authenticate(admin.token, CONTEXT)
    assert len(transport.requests) == asked, "remembered"
    system = await cloud.login("admin", "admin-password", scope={"system": {"all": True}})
    assert (await tokens.authenticate(system.token, CONTEXT)).system_scope == "all"
    with pytest.raises(Unauthorized):
        await tokens.authenticate("forged", CONTEXT)
    with pytest.raises(Unauthorized):
        await tokens.authenticate(None, CONTEXT)


async def test_whether_a_project_exists(cloud: Cloud, client: IdentityClient) -> None:
    admin = await cloud.admin()
    assert await client.project_exists(admin.project_id)
    assert not await client.project_exists("0" * 32)
    assert not await client.project_exists("../users")
    stranger = await cloud.member(admin, "stranger")
    assert await client.project_exists(admin.project_id, token=stranger.token), (
        "assumed, because the caller may not look"
    )
