"""What voids tokens, which ones, and that no restart and no other process forgets it."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from micronova.http.tokens import Revocations, TokenVerifier
from micronova.identity.client import IdentityClient, ServiceToken
from micronova.identity.feed import RevocationFeed
from micronova.objects.errors import Unauthorized
from tests.unit.identity.harness import (
    SERVICE,
    Caller,
    Cloud,
    CountingPasswords,
    ManualClock,
    by_credential,
    by_password,
    by_token,
    cloud_at,
    sqlite_at,
)


def good(cloud: Cloud, caller: Caller) -> bool:
    """Say whether a token passes, by signature and revocations alone."""
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
async def test_what_voids_a_token(cloud: Cloud, cause: Cause) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    other = await cloud.member(admin, "bob")
    assert good(cloud, user)
    await cause(cloud, admin, user)
    assert not good(cloud, user)
    assert (await user.request("GET", f"/users/{user.user_id}")).status == 401
    assert (await admin.request("GET", "/auth/tokens", subject=user.token or "")).status == 404
    assert good(cloud, other) and good(cloud, admin)


@pytest.mark.parametrize("cause", [own_password, user_disabled, token_revoked, role_removed])
async def test_a_restart_forgets_nothing(tmp_path: Path, clock: ManualClock, cause: Cause) -> None:
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as before:
        admin = await before.admin()
        user = await before.member(admin, "alice")
        await cause(before, admin, user)
    async with cloud_at(sqlite_at(tmp_path), clock=clock) as after:
        assert not good(after, user)
        assert good(after, admin)
        await after.login("admin", "admin-password", "admin")


async def test_a_new_token_of_the_same_moment_is_good(cloud: Cloud, clock: ManualClock) -> None:
    """The clock stands still: what is issued after the revocation is still after it."""
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    await own_password(cloud, admin, user)
    assert not good(cloud, user)
    again = await cloud.login("alice", "other", "alice")
    assert good(cloud, again)


class SlowPasswords(CountingPasswords):
    """Checks that wait until the test lets them go on."""

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
async def test_a_login_that_overlaps_with_a_revocation_gives_nothing(tmp_path: Path, cause: Cause) -> None:
    """What the log-in has read before the revocation must not outlive it."""
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
        assert answer.status == 401 or not good(cloud, cloud.caller(answer))


async def test_losing_a_role_on_one_project_leaves_the_tokens_for_others(cloud: Cloud) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    second = await admin.make("/projects", name="second")
    member = await role_id(admin, "member")
    await admin.do("PUT", f"/projects/{second['id']}/users/{user.user_id}/roles/{member}")
    elsewhere = await cloud.login("alice", "secret", "second")
    unscoped = await cloud.login("alice", "secret")
    await role_removed(cloud, admin, user)
    assert not good(cloud, user)
    assert good(cloud, elsewhere) and good(cloud, unscoped)


async def test_revoking_a_token_revokes_what_was_made_from_it(cloud: Cloud) -> None:
    admin = await cloud.admin()
    await cloud.member(admin, "alice")
    first = await cloud.login("alice", "secret")
    scope = {"project": {"name": "alice", "domain": {"id": "default"}}}
    scoped = cloud.caller(await cloud.authenticate(by_token(first.token), scope))
    other = await cloud.login("alice", "secret", "alice")
    await scoped.request("DELETE", "/auth/tokens", subject=scoped.token or "")
    assert not good(cloud, scoped) and good(cloud, first)
    scoped = cloud.caller(await cloud.authenticate(by_token(first.token), scope))
    await first.request("DELETE", "/auth/tokens", subject=first.token or "")
    assert not good(cloud, scoped) and not good(cloud, first) and good(cloud, other)


async def test_groups_and_domains(cloud: Cloud) -> None:
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
    assert not good(cloud, caller)
    await admin.do("PUT", f"/projects/{project['id']}/groups/{group['id']}/roles/{member}")
    caller = await carol()
    await admin.do("DELETE", f"/groups/{group['id']}/users/{user['id']}")
    assert not good(cloud, caller)
    assert (await cloud.authenticate(identity, scope)).status == 401
    await admin.do("PUT", f"/groups/{group['id']}/users/{user['id']}")
    caller = await carol()
    await admin.do("PATCH", f"/domains/{domain['id']}", {"domain": {"enabled": False}}, 200)
    assert not good(cloud, caller) and good(cloud, admin)
    assert (await cloud.authenticate(identity, scope)).status == 401
    await admin.do("DELETE", f"/domains/{domain['id']}")
    assert (await admin.request("GET", f"/users/{user['id']}")).status == 404
    assert (await admin.request("GET", f"/projects/{project['id']}")).status == 404


async def test_a_role_that_is_deleted_or_no_longer_implied(cloud: Cloud) -> None:
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
    assert not good(cloud, user)
    user = await cloud.login("alice", "secret", "alice")
    assert "lower" not in user.roles
    await admin.do("PUT", f"{grant}/{lower['id']}")
    user = await cloud.login("alice", "secret", "alice")
    await admin.do("DELETE", f"/roles/{lower['id']}")
    assert not good(cloud, user)
    assert good(cloud, bob) and good(cloud, admin)


async def test_application_credentials_go_with_the_role_and_their_tokens_with_them(cloud: Cloud) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    path = f"/users/{user.user_id}/application_credentials"
    credential = await user.make(path, name="robot")
    robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
    await user.do("DELETE", f"{path}/{credential['id']}")
    assert not good(cloud, robot) and good(cloud, user)
    credential = await user.make(path, name="robot")
    robot = cloud.caller(await cloud.authenticate(by_credential(credential)))
    await role_removed(cloud, admin, user)
    assert not good(cloud, robot)
    assert (await cloud.authenticate(by_credential(credential))).status == 401
    assert (await admin.get(path))["application_credentials"] == []


async def test_two_processes_on_one_database(database_url: str, clock: ManualClock) -> None:
    """What one revokes, the other refuses after its next look."""
    schema = f"t{uuid.uuid4().hex}"
    async with (
        cloud_at(database_url, schema=schema, clock=clock, revocation_poll=0.02) as one,
        cloud_at(database_url, schema=schema, clock=clock, revocation_poll=0.02) as two,
    ):
        admin = await one.admin()
        user = await one.member(admin, "alice")
        assert good(two, user)
        clock.time += 1000
        await user_disabled(one, admin, user)
        async with asyncio.timeout(10):
            while good(two, user):
                await asyncio.sleep(0.01)
        assert good(two, admin)


async def test_a_service_elsewhere_follows_by_the_feed(cloud: Cloud, clock: ManualClock) -> None:
    """Another process has only the public key, and asks what was revoked."""
    user, password, project = SERVICE
    token = ServiceToken(cloud.transport, username=user, password=password, project_name=project, now=clock.now)
    revocations = Revocations()
    verifier = TokenVerifier(cloud.identity.public_key, revocations)
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
    for voided in (alice, bob):
        with pytest.raises(Unauthorized):
            verifier.verify(voided.token or "", clock.now())
    assert verifier.verify(admin.token or "", clock.now()).user_name == "admin"
    await feed.stop()


async def test_old_revocations_are_forgotten(cloud: Cloud, clock: ManualClock) -> None:
    admin = await cloud.admin()
    user = await cloud.member(admin, "alice")
    await user_disabled(cloud, admin, user)
    await token_revoked(cloud, admin, await cloud.admin())
    clock.time += cloud.identity.core.token_lifetime + 1
    from micronova.neighbours.identity.store import revocations

    await cloud.identity.core.write(revocations.forget, cloud.identity.core.now)
    cloud.identity.revocations.forget_expired(clock.now(), cloud.identity.core.token_lifetime)
    assert await cloud.identity.core.read(revocations.since, 0, 0) == []
    assert not cloud.identity.revocations._marks and not cloud.identity.revocations._audit_ids
