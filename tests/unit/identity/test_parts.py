"""The small parts by themselves: lock-out, passwords, keys, catalog URLs, the expansion of roles."""

import asyncio
import stat
from pathlib import Path

import pytest

from micronova.http.tokens import Claims
from micronova.neighbours.identity import catalog, keys
from micronova.neighbours.identity.lockout import Lockout
from micronova.neighbours.identity.passwords import Passwords
from micronova.neighbours.identity.store.roles import closure
from micronova.objects.errors import MicronovaError, Unavailable
from tests.unit.identity.harness import CountingPasswords, ManualClock


def test_the_fifth_failure_locks_and_time_opens(clock: ManualClock) -> None:
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
    assert not lockout.locked("alice"), "the count begins anew after the wait"


def test_a_success_clears_the_count(clock: ManualClock) -> None:
    lockout = Lockout(clock.now, attempts=2)
    lockout.failed("alice")
    lockout.succeeded("alice")
    lockout.failed("alice")
    assert not lockout.locked("alice")


def test_lockout_remembers_so_many(clock: ManualClock) -> None:
    lockout = Lockout(clock.now, attempts=1, remember=100)
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
    assert passwords.checked == before + 1, "an unknown user costs a hash, too"
    passwords.close()


async def test_the_event_loop_goes_on_while_hashes_are_computed() -> None:
    passwords = Passwords()
    work = asyncio.gather(*(passwords.hash("x") for _ in range(4)))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 10
    passwords.close()


async def test_a_flood_of_logins_is_refused_not_queued_for_ever() -> None:
    passwords = Passwords(memory_kib=64, passes=1, threads=1, waiting=10)
    results = await asyncio.gather(*(passwords.hash("x") for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(result, Unavailable) for result in results) == 20
    passwords.close()


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    key = keys.load_or_make(directory)
    assert keys.load_or_make(directory) == key
    [file] = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"short")
    with pytest.raises(MicronovaError):
        keys.load_or_make(directory)


def claims(**changed: object) -> Claims:
    given = {"user_id": "u", "user_name": "n", "user_domain_id": "d", "issued_at": 0.0, "expires_at": 1.0}
    return Claims(**{**given, "audit_ids": ("a",), **changed})  # type: ignore[arg-type]


def test_catalog_urls_lead_back_to_where_the_request_came_from() -> None:
    service = {"id": "s", "type": "compute", "name": None}
    endpoint = {"id": "e", "interface": "public", "region_id": "R", "url": "$(public_url)s/compute/%(tenant_id)s"}
    [shown] = catalog.view([(service, [endpoint])], "https://here:1", claims(project_id="p"))
    assert shown["endpoints"][0]["url"] == "https://here:1/compute/p"
    assert shown["name"] == ""
    [unscoped] = catalog.view([(service, [endpoint])], "https://here:1", claims(system=True))
    assert unscoped["endpoints"] == [], "a URL that needs a project is not shown without one"


def test_implied_roles_are_followed_to_the_end_and_circles_end() -> None:
    implied = {"admin": ["manager"], "manager": ["member"], "member": ["reader"], "x": ["y"], "y": ["x"]}
    assert closure(implied, ["manager"]) == {"manager", "member", "reader"}
    assert closure(implied, ["x"]) == {"x", "y"}
    assert closure(implied, []) == set()
