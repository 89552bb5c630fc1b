"""Access rules: the requests that application credentials are limited to."""

from collections.abc import Sequence

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.common.query import Query
from micronova.embedded.identity.store.kinds import ACCESS_RULES, USERS, AccessRuleRow
from micronova.embedded.identity.store.rows import Listed, Page
from micronova.embedded.identity.tables import access_rules, application_credential_rules
from micronova.objects.errors import Forbidden, Invalid

MAX_OF_USER = 1000
MAX_RULES = 50  # of an application credential; `http.access_rules` compares every request with them
MAX_RULES_BYTES = 4000  # of all rules of an application credential; its tokens carry them in a header
FILTERS = ("service", "path", "method")


class WantedRule(Struct, frozen=True):
    """A rule that a new application credential is to have: one that exists, by id, or one with these values."""

    new_id: str
    id: str | None = None
    service: str = ""
    path: str = ""
    method: str = ""


def get(conn: sa.Connection, user_id: str, rule_id: str) -> AccessRuleRow:
    """Return a user's rule; raise NotFound."""
    row = ACCESS_RULES.find(conn, rule_id)
    if row is None or row["user_id"] != user_id:
        raise ACCESS_RULES.not_found(rule_id)
    return row


def listing(conn: sa.Connection, user_id: str, query: Query, page: Page) -> Listed[AccessRuleRow]:
    """Return a page of a user's rules."""
    conditions = [*ACCESS_RULES.filters(query, FILTERS), access_rules.c.user_id == user_id]
    return ACCESS_RULES.page(conn, conditions, page)


def described(rule: AccessRuleRow) -> dict[str, str]:
    """Return a rule as clients see it."""
    return {"id": rule["id"], "service": rule["service"], "path": rule["path"], "method": rule["method"]}


def of_application_credential(conn: sa.Connection, application_credential_id: str) -> list[AccessRuleRow]:
    """Return the rules of an application credential, oldest first."""
    links = application_credential_rules
    ids = sa.select(links.c.rule_id).where(links.c.credential_id == application_credential_id)
    return ACCESS_RULES.all(conn, access_rules.c.id.in_(ids))


def chosen(conn: sa.Connection, user_id: str, wanted: Sequence[WantedRule], now: int) -> list[AccessRuleRow]:
    """Return the rules that are wanted; make those that the user does not have yet."""
    USERS.lock(conn, user_id)  # for check_room
    found: dict[str, AccessRuleRow] = {}
    for each in wanted:
        if each.id is not None:
            row: AccessRuleRow | None = get(conn, user_id, each.id)
        else:
            values = {"service": each.service, "path": each.path, "method": each.method}
            same = (access_rules.c[name] == value for name, value in values.items())
            row = ACCESS_RULES.first(conn, access_rules.c.user_id == user_id, *same)
            if row is None:
                row = ACCESS_RULES.insert(
                    conn,
                    {
                        "id": each.new_id,
                        "user_id": user_id,
                        "service": each.service,
                        "path": each.path,
                        "method": each.method,
                        "created_at": now + len(found),  # in their order
                    },
                )
        assert row is not None
        found[row["id"]] = row
    ACCESS_RULES.check_room(conn, access_rules.c.user_id == user_id, MAX_OF_USER, new=0)
    sizes = [len("".join((row["service"], row["method"], row["path"])).encode()) + 6 for row in found.values()]
    if sum(sizes) > MAX_RULES_BYTES:
        raise Invalid(
            "Invalid input for field/attribute application_credential.access_rules: all together are too long for a "
            f"token ({MAX_RULES_BYTES} bytes): use patterns (*, **)."
        )
    return list(found.values())


def delete(conn: sa.Connection, user_id: str, rule_id: str) -> None:
    """Delete a rule; raise Forbidden if an application credential has it."""
    get(conn, user_id, rule_id)
    links = application_credential_rules
    if conn.execute(sa.select(links.c.rule_id).where(links.c.rule_id == rule_id).limit(1)).first():
        raise Forbidden(f"Cannot delete the access rule {rule_id}: an application credential has it.")
    conn.execute(access_rules.delete().where(access_rules.c.id == rule_id))
