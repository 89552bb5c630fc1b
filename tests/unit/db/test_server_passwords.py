"""A guest's password is kept once, whoever else posts one at the same moment; on both databases."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from micronova.db import server_passwords
from micronova.db.engine import Database
from tests.unit.db.databases import KINDS, compute_database


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with compute_database(request.param, request) as opened:
        yield opened


async def test_the_first_password_stays(database: Database) -> None:
    assert await database.read(server_passwords.get, "i1") == ""
    words = [f"password-{number}" for number in range(8)]
    kept = await asyncio.gather(*(database.write(server_passwords.put_once, "i1", word, 1) for word in words))
    assert kept.count(True) == 1
    assert await database.read(server_passwords.get, "i1") == words[kept.index(True)]
    assert await database.write(server_passwords.put_once, "i2", "other", 1)


async def test_a_changed_password_replaces_the_one_before(database: Database) -> None:
    words = [f"password-{number}" for number in range(8)]
    await asyncio.gather(*(database.write(server_passwords.replace, "i1", word, 1) for word in words))
    assert await database.read(server_passwords.get, "i1") in words
    await database.write(server_passwords.replace, "i1", "last", 2)
    assert await database.read(server_passwords.get, "i1") == "last"
    assert not await database.write(server_passwords.put_once, "i1", "of the guest", 3)


async def test_what_is_forgotten_makes_room(database: Database) -> None:
    await database.write(server_passwords.put_once, "i1", "one", 1)
    await database.write(server_passwords.clear, "i1")
    assert await database.read(server_passwords.get, "i1") == ""
    assert await database.write(server_passwords.put_once, "i1", "two", 2)
    assert await database.read(server_passwords.get, "i1") == "two"
    await database.write(server_passwords.clear, "nothing")
