"""The client side: a service user's token, validation of others' tokens, whether a project exists."""

import asyncio
from collections.abc import Mapping

import pytest

from micronova.http.auth import KeystoneTokens
from micronova.http.client import Answer, ASGITransport
from micronova.http.context import RequestContext
from micronova.identity.client import IdentityClient, ServiceToken
from micronova.objects.errors import NotFound, Unauthorized, Unavailable
from tests.unit.identity.harness import SERVICE, Cloud, ManualClock

CONTEXT = RequestContext(request_id="req-1")


class Counting(ASGITransport):
    """A transport that counts the requests that pass."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud.identity.service.app, host="cloud.example")
        self.requests: list[str] = []

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        self.requests.append(f"{method} {url.partition('?')[0]}")
        return await super().request(method, url, headers, body)


@pytest.fixture
def transport(cloud: Cloud) -> Counting:
    return Counting(cloud)


@pytest.fixture
def token(transport: Counting, clock: ManualClock) -> ServiceToken:
    user, password, project = SERVICE
    return ServiceToken(transport, username=user, password=password, project_name=project, now=clock.now)


@pytest.fixture
def client(transport: Counting, token: ServiceToken) -> IdentityClient:
    return IdentityClient(transport, token)


async def test_a_token_is_fetched_once_and_renewed_in_time(
    cloud: Cloud, transport: Counting, token: ServiceToken, clock: ManualClock
) -> None:
    first = await asyncio.gather(*(token.get() for _ in range(20)))
    assert len(set(first)) == 1 and transport.requests == ["POST /v3/auth/tokens"]
    clock.time += cloud.identity.core.token_lifetime - 130
    assert await token.get() == first[0]
    clock.time += 15
    assert await token.get() != first[0]
    assert len(transport.requests) == 2


async def test_a_short_lived_token_is_used_all_the_same(cloud: Cloud, transport: Counting, clock: ManualClock) -> None:
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


async def test_wrong_settings_are_not_the_callers_fault(transport: Counting, clock: ManualClock) -> None:
    token = ServiceToken(transport, username="micronova", password="wrong", project_name="service", now=clock.now)
    with pytest.raises(Unavailable):
        await token.get()
    with pytest.raises(Unavailable):
        await IdentityClient(transport, token).validate("whatever")


async def test_the_catalog(token: ServiceToken) -> None:
    assert await token.endpoint("compute") == "http://cloud.example/compute/v2.1"
    assert await token.endpoint("image", interface="public", region="RegionOne") == "http://cloud.example/image"
    with pytest.raises(NotFound):
        await token.endpoint("image", region="Elsewhere")
    with pytest.raises(NotFound):
        await token.endpoint("orchestration")


async def test_validation(cloud: Cloud, client: IdentityClient, clock: ManualClock) -> None:
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
    cloud: Cloud, client: IdentityClient, transport: Counting, clock: ManualClock
) -> None:
    admin = await cloud.admin()
    tokens = KeystoneTokens(client, clock.now, remember=300)
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
    assert await client.project_exists(admin.project_id, token=stranger.token), "believed, for it may not know"
