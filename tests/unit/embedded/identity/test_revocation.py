"""What revokes tokens, which ones, and that restarts and other processes keep to it."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.clients.identity.feed import RevocationFeed
from micronova.http.tokens import Revocations, TokenKey, TokenVerifier
from micronova.objects.errors import Unauthorized
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import (
    KEY,
    SERVICE,
    Caller,
    Cloud,
    CountingPasswords,
    by_credential,
    by_password,
    by_token,
    cloud_at,
    sqlite_at,
)


def valid(cloud: Cloud, caller: Caller) -> bool:
    """Return whether a token is valid by its signature and the revocations, without the database."""
    try:
        cloud.identity.verifier.verify(caller.token or "", cloud.identity.core.clock.now())
    except Unauthorized:
        return False
    return True


async def role_id(admin: Caller, name: str) -> str:
    return str((await admin.get(f"/roles?name={name}"))["roles"][0]["id"])


Cause = Callable[[Cloud, Caller, Caller], Awaitable[Any]]


async def own_password(cloud: Cloud, admin: Caller, user: Caller) -> None:
    body = {"user": {"original_password": "secret", "password": "other"}}
    await user.do("POST", f"/users/{user.user_id}/password", body)


async def admins_password(cloud: Cloud, admin: Caller, user: Caller) -> None:
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"password": "other"}}, 200)


async def user_disabled(cloud: Cloud, admin: Caller, user: Caller) -> None:
    await admin.do("PATCH", f"/users/{user.user_id}", {"user": {"enabled": False}}, 200)


async def user_deleted(cloud: Cloud, admin: Caller, user: Caller) -> None:
    await admin.do("DELETE", f"/users/{user.user_id}")


async def project_disabled(cloud: Cloud, admin: Caller, user: Caller) -> None:
    await admin.do("PATCH", f"/projects/{user.project_id}", {"project": {"enabled": False}}, 200)


async def project_deleted(cloud: Cloud, admin: Caller, user: Caller) -> None:
    await admin.do("DELETE", f"/projects/{user.project_id}")


async def role_removed(cloud: Cloud, admin: Caller, user: Caller) -> None:
    member = await role_id(admin, "member")
    await admin.do("DELETE", f"/projects/{user.project_id}/users/{user.user_id}/roles/{member}")


async def token_revoked(cloud: Cloud, admin: Caller, user: Caller) -> None:
    answer = await user.request("DELETE", "/auth/tokens", subject=user.token)
    assert answer.status == 204


@pytest.mark.parametrize(
    "cause",
    [
        own_password,
        admins_password,
        user_disabled,
        user_deleted,
        project_disabled,
        project_deleted,
        role_removed,
        token_revoked,
    ],
)
async def test_what_revokes_a_token(cloud: Cloud, cause: Cause) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    other = await cloud.member(admin, "bob")
    assert valid(cloud, user)
    await cause(cloud, admin, user)
    assert not valid(cloud, user)
    assert (await user.request("GET", f"/users/{user.user_id}")).status == 401
    assert (await admin.request("GET", "/auth/tokens", subject=user.token or "")).status == 404
    assert valid(cloud, other) and valid(cloud, admin)


async def test_who_loses_no_role_with_an_implication_keeps_the_token(cloud: Cloud) -> None:
    admin = await cloud.admin()
    auditor = (await admin.make("/roles", name="auditor"))["id"]
    implies = f"/roles/{auditor}/implies/{await role_id(admin, 'reader')}"
    await admin.do("PUT", implies, status=201)
    loses, keeps = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    elsewhere = await admin.make("/projects", name="elsewhere")
    for user, project in ((loses, elsewhere["id"]), (keeps, keeps.project_id)):
        await admin.do("PUT", f"/projects/{project}/users/{user.user_id}/roles/{auditor}")
    # bob is a reader of his project as a member, too; alice of the other one as an auditor only
    there = await cloud.login("alice", "secret", "elsewhere")
    loses, keeps = await cloud.login("alice", "secret", "alice"), await cloud.login("bob", "secret", "bob")
    assert all(valid(cloud, each) for each in (there, loses, keeps, admin))
    await admin.do("DELETE", implies)
    assert not valid(cloud, there)
    assert all(valid(cloud, each) for each in (loses, keeps, admin))
    again = await cloud.login("alice", "secret", "elsewhere")
    shown = (await again.get("/auth/tokens", subject=again.token or ""))["token"]
    assert [each["name"] for each in shown["roles"]] == ["auditor"]


@pytest.mark.parametrize("cause", [own_password, user_disabled, token_revoked, role_removed])
async def test_revocations_survive_a_restart(tmp_path: Path, clock: HeldClock, cause: Cause) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as before:
        admin = await before.admin()
        user = await before.member(admin, "alice")
        await cause(before, admin, user)
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as after:
        assert not valid(after, user)
        assert valid(after, admin)
        await after.login("admin", "admin-password", "admin")


async def test_a_token_issued_right_after_a_revocation_is_valid(cloud: Cloud, clock: HeldClock) -> None:
    """The clock stands still, and yet a token that is issued after a revocation has a later time."""
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    await own_password(cloud, admin, user)
    assert not valid(cloud, user)
    again = await cloud.login("alice", "other", "alice")
    assert valid(cloud, again)


async def test_tokens_are_not_dated_ahead_after_many_revocations(cloud: Cloud, clock: HeldClock) -> None:
    """Clients with a strict clock refuse tokens of the future; 100 revocations dated them 20 seconds ahead."""
    admin = await cloud.admin()
    for number in range(100):
        project = await admin.make("/projects", name=f"project-{number}")
        await admin.do("DELETE", f"/projects/{project['id']}")
    again = await cloud.login("admin", "admin-password", "admin")
    claims = cloud.identity.verifier.verify(again.token or "", clock.now())
    assert claims.issued_at <= clock.now() + 1.5


class SlowPasswords(CountingPasswords):
    """Passwords whose checks wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def check(self, *args: Any, **kwargs: Any) -> bool:
        right = await super().check(*args, **kwargs)
        self.begun.set()
        await self.go_on.wait()
        return right


@pytest.mark.parametrize("cause", [admins_password, user_disabled, role_removed])
async def test_a_login_that_overlaps_with_a_revocation_gets_no_valid_token(tmp_path: Path, cause: Cause) -> None:
    """A login that has read the user before the revocation must not get a valid token."""
    passwords = SlowPasswords()
    async with cloud_at(sqlite_at(tmp_path), passwords=passwords) as cloud:
        admin = await cloud.admin()
        user = await cloud.member(admin, "alice")
        passwords.begun.clear()
        passwords.go_on.clear()
        late = asyncio.create_task(
            cloud.authenticate(by_password("alice", "secret"), {"project": {"id": user.project_id}})
        )
        await passwords.begun.wait()
        await cause(cloud, admin, user)
        passwords.go_on.set()
        answer = await late
        assert answer.status == 401 or not valid(cloud, cloud.caller(answer))


async def test_losing_a_role_on_one_project_leaves_the_tokens_for_others(cloud: Cloud) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    second = await admin.make("/projects", name="second")
    member = await role_id(admin, "member")
    await admin.do("PUT", f"/projects/{second['id']}/users/{user.user_id}/roles/{member}")
    elsewhere = await cloud.login("alice", "secret", "second")
    unscoped = await cloud.login("alice", "secret")
    await role_removed(cloud, admin, user)
    assert not valid(cloud, user)
    assert valid(cloud, elsewhere) and valid(cloud, unscoped)


async def test_revoking_a_token_revokes_those_made_from_it(cloud: Cloud) -> None:
    admin = await cloud.admin()
    await cloud.member(admin, "alice")
    first = await cloud.login("alice", "secret")
    scope = {"project": {"name": "alice", "domain": {"id": "default"}}}
    scoped = cloud.caller(await cloud.authenticate(by_token(first.token), scope))
    other = await cloud.login("alice", "secret", "alice")
    await scoped.request("DELETE", "/auth/tokens", subject=scoped.token or "")
    assert not valid(cloud, scoped) and valid(cloud, first)
    scoped = cloud.caller(await cloud.authenticate(by_token(first.token), scope))
    await first.request("DELETE", "/auth/tokens", subject=first.token or "")
    assert not valid(cloud, scoped) and not valid(cloud, first) and valid(cloud, other)


async def test_removing_groups_and_domains_revokes_tokens(cloud: Cloud) -> None:
    admin = await cloud.admin()
    domain = await admin.make("/domains", name="acme")
    group = await admin.make("/groups", name="team", domain_id=domain["id"])
    user = await admin.make("/users", name="carol", password="secret", domain_id=domain["id"])
    project = await admin.make("/projects", name="work", domain_id=domain["id"])
    member = await role_id(admin, "member")
    await admin.do("PUT", f"/groups/{group['id']}/users/{user['id']}")
    await admin.do("PUT", f"/projects/{project['id']}/groups/{group['id']}/roles/{member}")
    identity = {"methods": ["password"], "password": {"user": {"id": user["id"], "password": "secret"}}}
    scope = {"project": {"id": project["id"]}}

    async def carol() -> Caller:
        return cloud.caller(await cloud.authenticate(identity, scope))

    caller = await carol()
    assert caller.roles == {"member", "reader"}
    await admin.do("DELETE", f"/projects/{project['id']}/groups/{group['id']}/roles/{member}")
    assert not valid(cloud, caller)
    await admin.do("PUT", f"/projects/{project['id']}/groups/{group['id']}/roles/{member}")
    caller = await carol()
    await admin.do("DELETE", f"/groups/{group['id']}/users/{user['id']}")
    assert not valid(cloud, caller)
    assert (await cloud.authenticate(identity, scope)).status == 401
    await admin.do("PUT", f"/groups/{group['id']}/users/{user['id']}")
    caller = await carol()
    await admin.do("PATCH", f"/domains/{domain['id']}", {"domain": {"enabled": False}}, 200)
    assert not valid(cloud, caller) and valid(cloud, admin)
    assert (await cloud.authenticate(identity, scope)).status == 401
    await admin.do("DELETE", f"/domains/{domain['id']}")
    assert (await admin.request("GET", f"/users/{user['id']}")).status == 404
    assert (await admin.request("GET", f"/projects/{project['id']}")).status == 404


async def test_deleting_a_role_or_an_implication_revokes_tokens(cloud: Cloud) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    bob = await cloud.member(admin, "bob")
    upper, lower = await admin.make("/roles", name="upper"), await admin.make("/roles", name="lower")
    await admin.do("PUT", f"/roles/{upper['id']}/implies/{lower['id']}", status=201)
    grant = f"/projects/{user.project_id}/users/{user.user_id}/roles"
    await admin.do("PUT", f"{grant}/{upper['id']}")
    user = await cloud.login("alice", "secret", "alice")
    assert {"upper", "lower"} <= user.roles
    await admin.do("DELETE", f"/roles/{upper['id']}/implies/{lower['id']}")
    assert not valid(cloud, user)
    user = await cloud.login("alice", "secret", "alice")
    assert "lower" not in user.roles
    await admin.do("PUT", f"{grant}/{lower['id']}")
    user = await cloud.login("alice", "secret", "alice")
    await admin.do("DELETE", f"/roles/{lower['id']}")
    assert not valid(cloud, user)
    assert valid(cloud, bob) and valid(cloud, admin)


async def test_application_credentials_are_deleted_with_the_role_and_their_tokens_revoked(cloud: Cloud) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    path = f"/users/{user.user_id}/application_credentials"
    credential = await user.make(path, name="robot")
    robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
    await user.do("DELETE", f"{path}/{credential['id']}")
    assert not valid(cloud, robot) and valid(cloud, user)
    credential = await user.make(path, name="robot")
    robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
    await role_removed(cloud, admin, user)
    assert not valid(cloud, robot)
    assert (await cloud.authenticate(by_credential(credential))).status == 404
    assert (await admin.get(path))["application_credentials"] == []


async def test_two_processes_on_one_database(database_url: str, clock: HeldClock) -> None:
    """A process refuses what another has revoked after its next poll."""
    schema = f"t{uuid.uuid4().hex}"
    async with (
        cloud_at(database_url, schema=schema, clock=clock, revocation_poll=0.02) as one,
        cloud_at(database_url, schema=schema, clock=clock, revocation_poll=0.02) as two,
    ):
        admin = await one.admin()
        user = await one.member(admin, "alice")
        assert valid(two, user)
        clock.time += 1000
        await user_disabled(one, admin, user)
        async with asyncio.timeout(10):
            while valid(two, user):
                await asyncio.sleep(0.01)
        assert valid(two, admin)


async def test_a_service_in_another_process_reads_the_feed(cloud: Cloud, clock: HeldClock) -> None:
    """Another process has only the public key and reads the revocations over HTTP."""
    user, password, project = SERVICE
    token = ServiceToken(cloud.transport, username=user, password=password, project_name=project, now=clock.now)
    revocations = Revocations()
    verifier = TokenVerifier([TokenKey(KEY).public], revocations)
    feed = RevocationFeed(IdentityClient(cloud.transport, token), revocations, clock, interval=0.01)
    admin = await cloud.admin()
    alice, bob = await cloud.member(admin, "alice"), await cloud.member(admin, "bob")
    await feed.start()
    assert verifier.verify(alice.token or "", clock.now()).user_name == "alice"
    clock.time += 1000
    await role_removed(cloud, admin, alice)
    await token_revoked(cloud, admin, bob)
    async with asyncio.timeout(10):
        while True:
            try:
                verifier.verify(alice.token or "", clock.now())
                verifier.verify(bob.token or "", clock.now())
            except Unauthorized:
                break
            await asyncio.sleep(0.01)
    await feed.refresh()
    for revoked in (alice, bob):
        with pytest.raises(Unauthorized):
            verifier.verify(revoked.token or "", clock.now())
    assert verifier.verify(admin.token or "", clock.now()).user_name == "admin"
    await feed.stop()
    assert len(revocations) > 0
    clock.time += cloud.identity.core.token_lifetime + 10
    await feed.refresh()
    assert len(revocations) == 0, "the tokens have expired: their revocations are forgotten"


async def test_old_revocations_are_deleted(cloud: Cloud, clock: HeldClock) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    await user_disabled(cloud, admin, user)
    await token_revoked(cloud, admin, await cloud.admin())
    clock.time += cloud.identity.core.token_lifetime + 1
    from micronova.embedded.identity.store import revocations

    await cloud.identity.core.write(revocations.forget, cloud.identity.core.now())
    cloud.identity.revocations.forget_expired(clock.now())
    assert await cloud.identity.core.database.read(revocations.since, 0, 0) == []
    assert len(cloud.identity.revocations) == 0
