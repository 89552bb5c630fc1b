"""A database that refuses the login of a running process, because its password was changed for example."""

import logging
from collections.abc import Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa

from micronova.cli.connections import open_and_ask
from micronova.conf.settings import SettingsError
from micronova.db.engine import DatabaseRefused, open_database
from micronova.http.faults import status_of
from tests.services.postgres import Postgres


@pytest.fixture
def user(postgres: Postgres) -> Iterator[str]:
    """A user of the database who may log in."""
    name = f"u{uuid4().hex[:8]}"
    postgres.sql(f'CREATE ROLE "{name}" LOGIN')
    yield name
    postgres.sql(f'DROP ROLE "{name}"')


async def test_requests_get_503_without_the_text_of_the_database(
    postgres: Postgres, database_url: str, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = database_url.replace("://micronova@", f"://{user}@")
    database = open_database(url)
    assert await database.read(lambda conn: conn.execute(sa.text("SELECT 1")).scalar()) == 1
    postgres.sql(f'ALTER ROLE "{user}" NOLOGIN')
    postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'")
    with caplog.at_level(logging.ERROR), pytest.raises(DatabaseRefused) as refused:
        await database.read(lambda conn: conn.execute(sa.text("SELECT 1")).scalar())
    await database.close()
    assert refused.value.message == "The database cannot be used at the moment. Try again later."
    assert status_of(refused.value) == 503
    assert user in caplog.text and "correct database.connection" in caplog.text


async def test_at_the_start_it_is_a_wrong_setting(database_url: str) -> None:
    url = database_url.replace("://micronova@", "://nobody@")
    with pytest.raises(SettingsError, match='role "nobody" does not exist'):
        await open_and_ask(url, None, 1)
