"""Role assignments of one target: the statements name it, and find the same as a list of all."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.embedded.identity import tables
from micronova.embedded.identity.store.grants import SYSTEM
from micronova.embedded.identity.store.revocations import RevocationTime
from micronova.embedded.identity.store.role_assignments import Assigned, Filter, listing, unimply

# Two domains; in each a tree of projects: top, its child, its grandchild, and another one beside top.
DOMAINS = ("d1", "d2")
TREE = {"top": "", "child": "top", "grandchild": "child", "other": ""}
PROJECTS = [f"{domain}-{name}" for domain in DOMAINS for name in TREE]
BELOW = {"top": ("top", "child", "grandchild"), "child": ("child", "grandchild")}


@pytest.fixture
def conn() -> Iterator[sa.Connection]:
    engine = sa.create_engine("sqlite://")
    tables.metadata.create_all(engine)
    with engine.connect() as opened:
        _fill(opened)
        yield opened


def _fill(conn: sa.Connection) -> None:
    def add(table: sa.Table, *rows: dict[str, Any]) -> None:
        common: dict[str, Any] = {"created_at": 0, "extra": {}} if "extra" in table.c else {}
        conn.execute(table.insert(), [{**common, **row} for row in rows])

    add(tables.domains, *({"id": domain, "name": domain} for domain in DOMAINS))
    add(
        tables.projects,
        *(
            {
                "id": f"{domain}-{name}",
                "name": name,
                "domain_id": domain,
                "parent_id": f"{domain}-{parent}" if parent else domain,
            }
            for domain in DOMAINS
            for name, parent in TREE.items()
        ),
    )
    add(tables.users, *({"id": f"u{n}", "name": f"u{n}", "domain_id": "d1"} for n in range(4)))
    add(tables.groups, *({"id": f"g{n}", "name": f"g{n}", "domain_id": "d1"} for n in range(2)))
    add(tables.memberships, *({"group_id": f"g{n % 2}", "user_id": f"u{n}"} for n in range(3)))
    add(tables.roles, *({"id": role, "name": role} for role in ("admin", "member", "reader")))
    add(tables.implied_roles, {"prior_id": "admin", "implied_id": "member"})
    places = [("project", each) for each in PROJECTS] + [("domain", each) for each in DOMAINS] + [("system", SYSTEM)]
    add(
        tables.assignments,
        *(
            {
                "target": target,
                "target_id": id,
                "actor": actor,
                "actor_id": f"{actor[0]}{number % 2}",
                "role_id": ("admin", "member", "reader")[number % 3],
                "inherited": inherited,
            }
            for number, ((target, id), actor, inherited) in enumerate(product(places, ("user", "group"), (False, True)))
            if not (inherited and target == "system")
        ),
    )


def _listed(conn: sa.Connection, wanted: Filter) -> tuple[list[Assigned], list[str]]:
    statements: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sa.event.listen(conn, "before_cursor_execute", note)
    found = listing(conn, wanted)
    sa.event.remove(conn, "before_cursor_execute", note)
    return found, statements


@pytest.mark.parametrize("effective", [False, True])
def test_assignments_of_a_target_are_those_of_all_that_have_it(conn: sa.Connection, effective: bool) -> None:
    everything = listing(conn, Filter(effective=effective))
    wanted: list[tuple[Filter, set[str]]] = [(Filter(system=True, effective=effective), {SYSTEM})]
    wanted += [(Filter(domain_id=each, effective=effective), {each}) for each in DOMAINS]
    for project in PROJECTS:
        domain, _, name = project.partition("-")
        tree = {f"{domain}-{each}" for each in BELOW.get(name, (name,))}
        wanted.append((Filter(project_id=project, effective=effective), {project}))
        wanted.append((Filter(project_id=project, subtree=True, effective=effective), tree))
    for domain in DOMAINS:
        inside = {domain, *(project for project in PROJECTS if project.startswith(domain))}
        wanted.append((Filter(within_domain=domain, effective=effective), inside))
    for each, targets in wanted:
        found, statements = _listed(conn, each)
        assert found == [one for one in everything if one.grant.target_id in targets]
        assert found
        read = [s.partition("FROM assignments")[2] for s in statements if "FROM assignments" in s]
        assert read and all("WHERE" in s and "assignments.target_id" in s.partition("ORDER BY")[0] for s in read)
        assert not [s for s in statements if "FROM memberships" in s and "WHERE" not in s]


def test_assignments_of_an_unknown_project(conn: sa.Connection) -> None:
    assert listing(conn, Filter(project_id="none", effective=True)) == []


def test_an_implication_with_many_holders_is_removed_in_as_many_statements(conn: sa.Connection) -> None:
    """A role may have a hundred thousand holders, and the tokens of all of them are revoked in one transaction."""
    counts = []
    for holders in (2, 50):
        with conn.begin_nested() as nested:
            rows = [
                {"target": "project", "target_id": "d1-top", "actor": "user", "actor_id": f"new-{number}"}
                for number in range(holders)
            ]
            conn.execute(tables.assignments.insert(), [{**row, "role_id": "admin", "inherited": False} for row in rows])
            statements: list[str] = []

            def note(conn: Any, cursor: Any, statement: str, *_: Any, found: list[str] = statements) -> None:
                found.append(statement)

            sa.event.listen(conn, "before_cursor_execute", note)
            _, revoked = unimply(conn, RevocationTime(1, 2), "admin", "member")
            sa.event.remove(conn, "before_cursor_execute", note)
            assert len(revoked) >= holders
            assert conn.execute(sa.select(sa.func.count()).select_from(tables.revocations)).scalar() == len(revoked)
            counts.append(len(statements))
            nested.rollback()
    assert counts[0] == counts[1]
