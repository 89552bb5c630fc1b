"""The default security group rule API: the rules that new security groups get.

A rule is for the default groups of projects, for other groups, or for both. The remote group `PARENT` stands for the
new group itself. Changes apply to groups that are created afterwards.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import UNSET, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.collection import Creatable, Deletable, Resource
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, not_found
from micronova.embedded.network.listing import Attributes, Clause
from micronova.embedded.network.request_bodies import (
    Flag,
    body_of_one_or_many,
    convert_text,
)
from micronova.embedded.network.row_types import DefaultSecurityGroupRuleRow
from micronova.embedded.network.rows import NewDefaultSecurityGroupRule
from micronova.embedded.network.security_group_rules import RuleAttributes, checked, fingerprint
from micronova.embedded.network.tables import default_security_group_rules, marks, security_groups
from micronova.http.request import Request

PARENT = "PARENT"
_MARK = "default security group rules"
_FLAGS = ("used_in_default_sg", "used_in_non_default_sg")


class DefaultSecurityGroupRuleCreate(RuleAttributes, kw_only=True):
    """The attributes that a create may set."""

    used_in_default_sg: Flag | UnsetType = UNSET
    used_in_non_default_sg: Flag | UnsetType = UNSET


def _remote(values: Sequence[str]) -> Clause:
    c = default_security_group_rules.c
    none = sa.and_(c.remote_group_id.is_(None), sa.not_(c.remote_is_parent))
    return sa.or_(
        c.remote_group_id.in_([value for value in values if value != PARENT]),
        *([c.remote_is_parent] if PARENT in values else ()),
        *([none] if "" in values else ()),
    )


class DefaultSecurityGroupRules(Creatable[DefaultSecurityGroupRuleRow], Deletable[DefaultSecurityGroupRuleRow]):
    """The default security group rule API; rules are created and deleted, but never changed."""

    singular = "default_security_group_rule"
    plural = "default_security_group_rules"
    slug = "default-security-group-rules"
    attributes = Attributes(
        default_security_group_rules,
        {
            name: default_security_group_rules.c[name]
            for name in (
                *("id", "description", "direction", "ethertype", "protocol", "port_range_min", "port_range_max"),
                *("remote_ip_prefix", *_FLAGS),
            )
        },
        {"remote_group_id": _remote},
    )
    create_body = body_of_one_or_many(
        "default_security_group_rule", "default_security_group_rules", DefaultSecurityGroupRuleCreate
    )

    def visible_rows(self, request: Request) -> Clause | None:
        """The rules belong to no project."""
        return None

    def resources(self, conn: sa.Connection, rows: Sequence[DefaultSecurityGroupRuleRow]) -> list[Resource]:
        """Return rules."""
        return [Resource(_values(row), {}) for row in rows]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create rules for the security groups that are created afterwards."""
        wanted = []
        for given in self.given(request):
            request.authorize({})
            convert_text(given, _FLAGS, ("port_range_min", "port_range_max"))
            wanted.append(_row(self.core, given))
        prints = [row["fingerprint"] for row in wanted]
        if len(set(prints)) != len(prints):
            raise conflict("Duplicate Default Security Group Rule in POST.", "DuplicateDefaultSgRuleInPost")
        return self.answer(request, await self.core.database.write(self._insert, wanted))

    def _insert(self, conn: sa.Connection, wanted: Sequence[NewDefaultSecurityGroupRule]) -> list[Resource]:
        for row in wanted:
            group, r = row["remote_group_id"], default_security_group_rules.c
            there = sa.select(security_groups.c.id).where(security_groups.c.id == group)
            if group and conn.execute(there).first() is None:
                raise not_found("security_group", group)
            if not insert_if_absent(conn, default_security_group_rules, row):
                found = conn.execute(sa.select(r.id).where(r.fingerprint == row["fingerprint"])).scalar()
                raise conflict(
                    f"Default Security group rule already exists. Rule id is {found}.", "DefaultSecurityGroupRuleExists"
                )
        return self.reload_all(conn, [row["id"] for row in wanted])

    async def delete(self, request: Request, id: str) -> None:
        """Delete a rule; existing security groups keep theirs."""
        await self.find(request, id, "delete_default_security_group_rule")
        r = default_security_group_rules.c
        gone = await self.core.database.write(
            lambda conn: conn.execute(default_security_group_rules.delete().where(r.id == id)).rowcount
        )
        if not gone:
            raise Changed


def _row(core: Core, given: dict[str, Any]) -> NewDefaultSecurityGroupRule:
    remote = given.get("remote_group_id")
    row: NewDefaultSecurityGroupRule = {
        "id": core.new_id(),
        "description": given.get("description") or "",
        "direction": given["direction"],
        **checked(given),
        "remote_group_id": None if remote == PARENT else remote or None,
        "remote_is_parent": remote == PARENT,
        "used_in_default_sg": given.get("used_in_default_sg", False),
        "used_in_non_default_sg": given.get("used_in_non_default_sg", True),
        "fingerprint": "",
    }
    row["fingerprint"] = fingerprint({**row, "remote_group_id": remote or None})
    return row


def _values(row: DefaultSecurityGroupRuleRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "description": row.description,
        "direction": row.direction,
        "ethertype": row.ethertype,
        "protocol": row.protocol,
        "port_range_min": row.port_range_min,
        "port_range_max": row.port_range_max,
        "remote_ip_prefix": row.remote_ip_prefix,
        "remote_group_id": PARENT if row.remote_is_parent else row.remote_group_id,
        "remote_address_group_id": None,
        "used_in_default_sg": row.used_in_default_sg,
        "used_in_non_default_sg": row.used_in_non_default_sg,
    }


async def create_initial_default_rules(core: Core) -> None:
    """Create the rules that a new cloud begins with, once: all egress, and in default groups ingress from members."""
    if not await core.database.read(_has_initial_rules):
        both = [
            _row(core, {"direction": "egress", "ethertype": ethertype, "used_in_default_sg": True})
            for ethertype in ("IPv4", "IPv6")
        ]
        only_default = {"used_in_default_sg": True, "used_in_non_default_sg": False}
        from_members = {"direction": "ingress", "remote_group_id": PARENT, **only_default}
        members = [_row(core, {**from_members, "ethertype": ethertype}) for ethertype in ("IPv4", "IPv6")]
        await core.database.write(_insert_initial_rules, [*both, *members])


def _has_initial_rules(conn: sa.Connection) -> bool:
    return conn.execute(sa.select(marks.c.name).where(marks.c.name == _MARK)).first() is not None


def _insert_initial_rules(conn: sa.Connection, rows: list[NewDefaultSecurityGroupRule]) -> None:
    if insert_if_absent(conn, marks, {"name": _MARK}):
        conn.execute(default_security_group_rules.insert(), rows)


def rules_for_new_group(conn: sa.Connection, is_default: bool) -> Sequence[DefaultSecurityGroupRuleRow]:
    """Return the rules that a new security group gets."""
    c = default_security_group_rules.c
    used = c.used_in_default_sg if is_default else c.used_in_non_default_sg
    return conn.execute(sa.select(default_security_group_rules).where(used).order_by(c.id)).all()
