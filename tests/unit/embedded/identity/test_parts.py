"""Lockout, passwords, catalog URLs and implied roles, each without the service."""

import asyncio
from functools import partial

from micronova.embedded.identity import catalog_view
from micronova.embedded.identity.endpoint_urls import OwnURLs
from micronova.embedded.identity.lockout import Lockout
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.store.kinds import EndpointRow, ServiceRow
from micronova.embedded.identity.store.roles import closure
from micronova.http.tokens import Claims
from micronova.objects.errors import Unavailable
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import CountingPasswords


def test_the_fifth_failure_locks_for_a_time(clock: HeldClock) -> None:
    lockout = Lockout(clock.now, attempts=5, seconds=60)
    for _ in range(4):
        lockout.failed("alice")
    assert not lockout.locked("alice")
    lockout.failed("alice")
    assert lockout.locked("alice")
    assert not lockout.locked("bob")
    clock.time += 59
    assert lockout.locked("alice")
    clock.time += 1
    assert not lockout.locked("alice")
    lockout.failed("alice")
    assert not lockout.locked("alice"), "the count starts again after the lockout"


def test_a_success_clears_the_count(clock: HeldClock) -> None:
    lockout = Lockout(clock.now, attempts=2)
    lockout.failed("alice")
    lockout.succeeded("alice")
    lockout.failed("alice")
    assert not lockout.locked("alice")


def test_lockout_keeps_a_limited_number_of_counts(clock: HeldClock) -> None:
    lockout = Lockout(clock.now, attempts=1, max_entries=100)
    for number in range(1000):
        lockout.failed(number)
    assert len(lockout._failures) == 100
    assert lockout.locked(999) and not lockout.locked(0)


async def test_passwords() -> None:
    passwords = CountingPasswords()
    stored = await passwords.hash("correct horse")
    assert "horse" not in stored and stored.startswith("$argon2id$")
    assert await passwords.check(stored, "correct horse")
    assert not await passwords.check(stored, "wrong")
    assert not await passwords.check("not a hash", "wrong")
    before = passwords.checked
    assert not await passwords.check(None, "anything")
    assert passwords.checked == before + 1, "an unknown user takes a hash too"
    passwords.close()


async def test_the_event_loop_runs_while_hashes_are_computed() -> None:
    passwords = Passwords()
    work = asyncio.gather(*(passwords.hash("x") for _ in range(4)))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 10
    passwords.close()


async def test_too_many_logins_are_refused_instead_of_queued() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=10)
    results = await asyncio.gather(*(passwords.hash("x") for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(result, Unavailable) for result in results) == 20
    passwords.close()


async def test_those_who_wait_are_counted() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=2, waiting=10)
    work = [asyncio.create_task(passwords.hash("x")) for _ in range(7)]
    await asyncio.sleep(0)
    calls, threads = passwords.use()
    assert 5 <= calls <= 7 and threads == 2  # those that have begun may have ended
    await asyncio.gather(*work)
    assert passwords.use().calls == 0
    passwords.close()


async def _order(passwords: Passwords, clients: list[str]) -> tuple[list[str], list[str]]:
    """Hash a password for each client, all at once; return whose hashes were made, in order, and who was refused."""
    made: list[str] = []
    refused: list[str] = []

    async def hash_for(client: str) -> None:
        try:
            await passwords.hash("x", client)
        except Unavailable:
            refused.append(client)
        else:
            made.append(client)

    await asyncio.gather(*map(hash_for, clients))
    return made, refused


async def test_a_client_with_many_logins_does_not_keep_others_waiting() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=50)
    made, refused = await _order(passwords, ["192.0.2.1"] * 20 + ["192.0.2.2", "192.0.2.3", ""])
    assert not refused and made[:5] == ["192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3", ""]
    passwords.close()


async def test_when_too_many_wait_the_client_with_the_most_is_refused() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=10)
    made, refused = await _order(passwords, ["192.0.2.1"] * 100 + ["192.0.2.2"] * 3 + [""])
    assert made.count("192.0.2.2") == 3 and made.count("") == 1 and made.count("192.0.2.1") == 6
    assert set(refused) == {"192.0.2.1"}
    passwords.close()


async def test_the_addresses_of_an_ipv6_network_wait_as_one_client() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=10)
    many = [f"2001:db8::{number:x}" for number in range(100)]
    made, _ = await _order(passwords, [*many, "192.0.2.2", "192.0.2.2"])
    assert made.count("192.0.2.2") == 2
    passwords.close()


def _cancel(task: asyncio.Task[str], _: object) -> None:
    task.cancel()


async def test_a_client_that_goes_away_loses_its_turn_and_nobody_else_does() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=10)
    for _ in range(3):
        gone = [asyncio.create_task(passwords.hash("x", f"192.0.2.{number}")) for number in range(10)]
        await asyncio.sleep(0)
        for each in gone:
            each.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        first, second = (asyncio.create_task(passwords.hash("x", client)) for client in ("192.0.2.1", "192.0.2.2"))
        first.add_done_callback(partial(_cancel, second))  # the turn of the second has just come
        await asyncio.wait([first, second])
    made, refused = await _order(passwords, ["192.0.2.1"] * 10)
    assert len(made) == 10 and not refused
    passwords.close()


def claims(**changed: object) -> Claims:
    given = {"user_id": "u", "user_name": "n", "user_domain_id": "d", "issued_at": 0.0, "expires_at": 1.0}
    return Claims(**{**given, "audit_ids": ("a",), **changed})  # type: ignore[arg-type]


def test_catalog_urls_have_the_public_url_of_the_request() -> None:
    service: ServiceRow = {
        "id": "s", "type": "compute", "name": None, "description": None, "enabled": True, "extra": {}, "created_at": 0,
    }  # fmt: skip
    endpoint: EndpointRow = {
        "id": "e", "service_id": "s", "interface": "public", "region_id": "R",
        "url": "$(public_url)s/compute/%(tenant_id)s", "enabled": True, "extra": {}, "created_at": 0,
    }  # fmt: skip
    [shown] = catalog_view.for_token([(service, [endpoint])], OwnURLs("https://here:1"), claims(project_id="p"))
    assert shown["endpoints"][0]["url"] == "https://here:1/compute/p"
    assert shown["name"] == ""
    [unscoped] = catalog_view.for_token([(service, [endpoint])], OwnURLs("https://here:1"), claims(system=True))
    assert unscoped["endpoints"] == [], "a URL that needs a project is not shown without one"


def test_implied_roles_are_transitive_and_may_be_circular() -> None:
    implied = {"admin": ["manager"], "manager": ["member"], "member": ["reader"], "x": ["y"], "y": ["x"]}
    assert closure(implied, ["manager"]) == {"manager", "member", "reader"}
    assert closure(implied, ["x"]) == {"x", "y"}
    assert closure(implied, []) == set()
