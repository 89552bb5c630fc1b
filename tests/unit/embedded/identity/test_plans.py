"""PostgreSQL's plans of the identity service's hot paths: none reads the users, projects or roles of all domains."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.identity.store import (
    application_credentials,
    credentials,
    grants,
    groups,
    projects,
    revocations,
    role_assignments,
    trusts,
    users,
)
from micronova.embedded.identity.store.kinds import PROJECTS, USERS
from micronova.embedded.identity.store.rows import Page
from micronova.embedded.identity.tables import metadata
from tests.plans import Rows, fill, rolled_back, rows_read, sequential_scans, too_many
from tests.unit.db.databases import own_schema

pytestmark = [pytest.mark.postgresql, pytest.mark.asyncio(loop_scope="module")]

NUMBER, NUMBER_OF_PROJECTS = 20_000, 2_000
SMALL = {"domains", "roles", "implied_roles", "tags"}
"""Tables that are small in every cloud, or that are empty here."""
MOST_READ = 150
NOW = NUMBER
ROWS: Rows = (
    ("domains", 20, {"id": "'d' || n", "name": "'domain ' || n"}),
    ("roles", 3, {"id": "'r' || n", "name": "'role ' || n"}),
    (
        "projects",
        NUMBER_OF_PROJECTS,
        {"id": "'p' || n", "name": "'project ' || n", "domain_id": "'d' || n % 20", "parent_id": "'d' || n % 20"},
    ),
    ("users", NUMBER, {"id": "'u' || n", "name": "'user ' || n", "domain_id": "'d' || n % 20"}),
    ("groups", NUMBER_OF_PROJECTS, {"id": "'g' || n", "name": "'group ' || n", "domain_id": "'d' || n % 20"}),
    ("memberships", NUMBER, {"user_id": "'u' || n", "group_id": f"'g' || n % {NUMBER_OF_PROJECTS}"}),
    (
        # Half of the users have a role on a project of their own, the others on the same one.
        "assignments",
        NUMBER,
        {
            "target_id": f"CASE WHEN n % 2 = 0 THEN 'p0' ELSE 'p' || n % {NUMBER_OF_PROJECTS} END",
            "target": "'project'",
            "actor_id": "'u' || n",
            "actor": "'user'",
            "role_id": "'r' || n % 3",
        },
    ),
    (
        "application_credentials",
        NUMBER,
        {"id": "'c' || n", "user_id": "'u' || n", "project_id": "'p0'", "name": "'c'", "role_ids": "'[]'"},
    ),
    ("credentials", NUMBER, {"id": "'k' || n", "user_id": "'u' || n", "type": "'ec2'"}),
    (
        "trusts",
        NUMBER,
        {
            "id": "'t' || n",
            "trustor_user_id": "'u' || n",
            "trustee_user_id": "'u' || n",
            "project_id": "'p0'",
            "role_ids": "'[]'",
        },
    ),
    ("revocations", NUMBER, {"subject": "'user:u' || n", "at": "n", "expires_at": f"{NUMBER} + n"}),
)
PAGE = Page(limit=50)


def _roles(conn: sa.Connection) -> None:
    project = PROJECTS.get(conn, "p0")
    assert grants.effective_roles(conn, "u6", "p0", project)


HOT: dict[str, Callable[[sa.Connection], Any]] = {
    "a user by name": lambda conn: users.by_name(conn, "d7", "user 7"),
    "a user": lambda conn: USERS.get(conn, "u7"),
    "a project by name": lambda conn: projects.by_name(conn, "d7", "project 7"),
    "the roles of a token": _roles,
    "the projects of a user": lambda conn: grants.project_ids_of(conn, "u7"),
    "the domains of a user": lambda conn: grants.domains_of(conn, "u7"),
    "whether a user has a role on the system": lambda conn: grants.on_system(conn, "u7"),
    "the members of a group": lambda conn: groups.members(conn, "g7"),
    "the users of a group": lambda conn: users.listing(conn, {}, None, PAGE, "g7"),
    "the role assignments of a user": lambda conn: role_assignments.listing(
        conn, role_assignments.Filter(user_id="u7", effective=True)
    ),
    "the role assignments of a user on a project": lambda conn: role_assignments.listing(
        conn, role_assignments.Filter(user_id="u7", project_id="p7")
    ),
    "an application credential": lambda conn: application_credentials.by_name(conn, "u7", "c"),
    "the application credentials of a user": lambda conn: application_credentials.listing(conn, "u7", {}, PAGE),
    "the credentials of a user": lambda conn: credentials.listing(conn, {}, "u7", PAGE),
    "the trusts of a trustor": lambda conn: trusts.listing(conn, {"trustor_user_id": ["u7"]}, PAGE, NOW),
    "a trust": lambda conn: trusts.get(conn, "t7", NOW),
    "the newest revocations": lambda conn: revocations.since(conn, NUMBER - 10, NOW),
    "forgetting revocations": lambda conn: revocations.forget(conn, NUMBER + 10),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    async with own_schema(request, metadata) as opened:
        await opened.write(fill, metadata, ROWS)
        yield opened


@pytest.mark.parametrize("name", HOT)
async def test_an_index_serves(database: Database, name: str) -> None:
    assert await rolled_back(database, sequential_scans, HOT[name], SMALL) == []
    assert too_many(await rolled_back(database, rows_read, HOT[name]), MOST_READ, SMALL) == {}
