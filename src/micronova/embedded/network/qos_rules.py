"""The API of QoS rules: bandwidth limits of what a port sends and receives, and the DSCP mark of what it sends.

A rule for a minimum bandwidth makes ports ask for resources (`resource_requests.py`), which compute claims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.revisions import Changed, retry
from micronova.embedded.network.collection import Resource
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import QUERY, Attributes, Listing, filters_of, unknown_filter
from micronova.embedded.network.qos_policies import QOS_RULE_TABLES, QosPolicies, qos_rule_values
from micronova.embedded.network.qos_use import check_rule_change
from micronova.embedded.network.request_bodies import Body, Number, body_of_one, convert_text, objects
from micronova.embedded.network.routing import checked_route
from micronova.embedded.network.rows import locked
from micronova.embedded.network.tables import qos_policies
from micronova.embedded.network.topics import qos_policy_topic
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.objects.errors import NotFound

MOST = 2**31 - 1
DSCP_MARKS = (0, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 44, 46, 48, 56)
"""The marks that RFCs 2474, 2597, 3246 and 5865 define, which Neutron accepts."""

Kilobits = Annotated[int, Meta(ge=0, le=MOST)] | Annotated[str, Meta(title="a whole number", pattern=r"^[0-9]{1,9}\Z")]


class LimitUpdate(Body, kw_only=True):
    """The attributes of a bandwidth limit that an update may set."""

    max_kbps: Kilobits | UnsetType = UNSET
    max_burst_kbps: Kilobits | UnsetType = UNSET
    direction: Literal["egress", "ingress"] | UnsetType = UNSET


class LimitCreate(LimitUpdate, kw_only=True):
    """The attributes of a bandwidth limit that a create may set."""

    max_kbps: Kilobits


class MarkUpdate(Body, kw_only=True):
    """The attributes of a DSCP mark that an update may set."""

    dscp_mark: Number | UnsetType = UNSET


class MarkCreate(MarkUpdate, kw_only=True):
    """The attributes of a DSCP mark that a create may set."""

    dscp_mark: Number


class MinimumUpdate(Body, kw_only=True):
    """The attributes of a minimum bandwidth that an update may set."""

    min_kbps: Kilobits | UnsetType = UNSET
    direction: Literal["egress", "ingress"] | UnsetType = UNSET


class MinimumCreate(MinimumUpdate, kw_only=True):
    """The attributes of a minimum bandwidth that a create may set."""

    min_kbps: Kilobits


@dataclass(frozen=True)
class QosRuleType:
    """A type of rules."""

    name: str
    create_body: type[Body]
    update_body: type[Body]
    numbers: tuple[str, ...]
    parameters: Sequence[Mapping[str, Any]]  # what admins are told of the type
    defaults: Mapping[str, Any]
    is_claimed: bool = False  # compute claims what it says when a port is bound
    one_per: str | None = None  # a policy has one rule for each value of this column; None: it has one rule

    @property
    def singular(self) -> str:
        """The name of a rule in the API."""
        return f"{self.name}_rule"

    @property
    def table(self) -> sa.Table:
        """The table of the rules."""
        return QOS_RULE_TABLES[self.name][0]

    @property
    def attributes(self) -> Attributes:
        """The attributes by which rules can be filtered and sorted."""
        table, names = QOS_RULE_TABLES[self.name]
        return Attributes(table, {name: table.c[name] for name in names})


def _range(name: str) -> dict[str, Any]:
    return {"parameter_name": name, "parameter_type": "range", "parameter_values": {"start": 0, "end": MOST}}


def _choices(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {"parameter_name": name, "parameter_type": "choices", "parameter_values": list(values)}


BANDWIDTH_LIMIT = QosRuleType(
    "bandwidth_limit",
    LimitCreate,
    LimitUpdate,
    ("max_kbps", "max_burst_kbps"),
    [_range("max_kbps"), _range("max_burst_kbps"), _choices("direction", ["egress", "ingress"])],
    {"max_burst_kbps": 0, "direction": "egress"},
    one_per="direction",
)
DSCP_MARKING = QosRuleType(
    "dscp_marking", MarkCreate, MarkUpdate, ("dscp_mark",), [_choices("dscp_mark", DSCP_MARKS)], {}
)
MINIMUM_BANDWIDTH = QosRuleType(
    "minimum_bandwidth",
    MinimumCreate,
    MinimumUpdate,
    ("min_kbps",),
    [_range("min_kbps"), _choices("direction", ["egress", "ingress"])],
    {"direction": "egress"},
    is_claimed=True,
    one_per="direction",
)
QOS_RULE_TYPES = (BANDWIDTH_LIMIT, DSCP_MARKING, MINIMUM_BANDWIDTH)


class QosRules:
    """The rules of policies, of one type."""

    def __init__(self, core: Core, rule_type: QosRuleType) -> None:
        self.core = core
        self.rule_type = rule_type
        self._policies = QosPolicies(core)

    def routes(self) -> list[Route]:
        """Return the routes."""
        rule_type = self.rule_type
        all_ = f"{self._policies.path}/{{id}}/{rule_type.singular}s"
        one_ = f"{all_}/{{rule}}"

        def route(method: str, path: str, handler: Handler, verb: str, status: int, body: Any = None) -> Route:
            return checked_route(method, path, handler, f"{verb}_policy_{rule_type.singular}", status, body)

        return [
            route("GET", all_, self.index, "get", 200),
            route("POST", all_, self.create, "create", 201, body_of_one(rule_type.singular, rule_type.create_body)),
            route("GET", one_, self.show, "get", 200),
            route("PUT", one_, self.update, "update", 200, body_of_one(rule_type.singular, rule_type.update_body)),
            route("DELETE", one_, self.delete, "delete", 204),
        ]

    async def _policy(self, request: Request, id: str) -> Resource:
        return await self._policies.find(request, id, request.rule)

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the rules of a policy."""
        policy = await self._policy(request, id)
        listing = Listing.parse(request.raw_query, self.rule_type.attributes)
        found = await self.core.database.read(_page, self.rule_type, policy.id, listing)
        if found is None:
            raise _missing(listing.marker or "", policy.id)
        return {f"{self.rule_type.singular}s": [listing.choose(each) for each in found]}

    async def show(self, request: Request, id: str, rule: str) -> dict[str, Any]:
        """Show one rule."""
        policy = await self._policy(request, id)
        return {self.rule_type.singular: await self.core.database.read(_rule, self.rule_type, policy.id, rule)}

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Create a rule."""
        policy = await self._policy(request, id)
        row = {**self.rule_type.defaults, **self._given(request), "id": self.core.new_id(), "policy_id": policy.id}
        await self.core.write_and_wake(_insert, self.rule_type, row, self.core.now())
        return {self.rule_type.singular: {name: row[name] for name in QOS_RULE_TABLES[self.rule_type.name][1]}}

    async def update(self, request: Request, id: str, rule: str) -> dict[str, Any]:
        """Update a rule; it applies to all ports with the policy."""
        policy = await self._policy(request, id)
        given = self._given(request)
        found = await retry(self.core.write_and_wake, _change, self.rule_type, policy.id, rule, given, self.core.now())
        return {self.rule_type.singular: found}

    async def delete(self, request: Request, id: str, rule: str) -> None:
        """Delete a rule."""
        policy = await self._policy(request, id)
        await self.core.write_and_wake(_delete, self.rule_type, policy.id, rule, self.core.now())

    def _given(self, request: Request) -> dict[str, Any]:
        [given] = objects(request.body, self.rule_type.singular)
        convert_text(given, numbers=self.rule_type.numbers)
        if given.get("dscp_mark", 0) not in DSCP_MARKS:
            raise invalid(
                f"Invalid input for dscp_mark: {given['dscp_mark']} is not in {list(DSCP_MARKS)}.", "HTTPBadRequest"
            )
        return given


class QosRuleTypes:
    """The API of QoS rule types."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = "/v2.0/qos/rule-types"
        return [
            checked_route("GET", path, self.index, "get_rule_type"),
            checked_route("GET", f"{path}/{{type}}", self.show, "get_rule_type"),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the rule types."""
        request.authorize({})
        filters = filters_of(request.raw_query)
        for name in filters:
            if name not in ("type", "all_supported", "all_rules"):
                raise unknown_filter(name)
        for value in filters.get("all_rules", ()):
            QUERY.boolean("all_rules", value)
        known = tuple(QOS_RULE_TABLES)
        return {"rule_types": [{"type": each} for each in known if each in filters.get("type", known)]}

    async def show(self, request: Request, type: str) -> dict[str, Any]:
        """Show a rule type with its parameters, for admins."""
        request.authorize({})
        rule_type = next((each for each in QOS_RULE_TYPES if each.name == type), None)
        if rule_type is None:
            raise NotFound(f"QoS rule type {type[:64]} could not be found; there are {', '.join(QOS_RULE_TABLES)}.")
        shown: dict[str, Any] = {"type": rule_type.name}
        if request.context.is_admin:
            shown["drivers"] = [{"name": "micronova", "supported_parameters": rule_type.parameters}]
        return {"rule_type": shown}


def _missing(rule: str, policy: str) -> NotFound:
    return NotFound(f"QoS rule {rule[:64]} for policy {policy} could not be found.", type="QosRuleNotFound")


def _page(conn: sa.Connection, rule_type: QosRuleType, policy: str, listing: Listing) -> list[dict[str, Any]] | None:
    mine = sa.select(rule_type.table).where(rule_type.table.c.policy_id == policy, *listing.conditions())
    rows = listing.page(conn, mine)
    return None if rows is None else [qos_rule_values(rule_type.name, row) for row in rows]


def _rule(conn: sa.Connection, rule_type: QosRuleType, policy: str, id: str) -> dict[str, Any]:
    r = rule_type.table.c
    row = conn.execute(sa.select(rule_type.table).where(r.id == id, r.policy_id == policy)).first()
    if row is None:
        raise _missing(id, policy)
    return qos_rule_values(rule_type.name, row)


def _touch(conn: sa.Connection, policy: str, now: int) -> None:
    """Increase the revision of a policy, because one of its rules changed."""
    if not revisions.touch(conn, qos_policies.c.revision, qos_policies.c.id == policy, now=now):
        raise NotFound(f"QoS policy {policy} could not be found.", type="QosPolicyNotFound")
    note(conn, now, [qos_policy_topic(policy)])


def _insert(conn: sa.Connection, rule_type: QosRuleType, row: dict[str, Any], now: int) -> None:
    _touch(conn, row["policy_id"], now)
    if rule_type.is_claimed:
        check_rule_change(conn, row["policy_id"])
    _check_parameters(conn, rule_type, row["policy_id"], row)
    if not insert_if_absent(conn, rule_type.table, row):
        raise _second(conn, rule_type, row["policy_id"], row)


def _check_parameters(conn: sa.Connection, rule_type: QosRuleType, policy: str, row: Mapping[str, Any]) -> None:
    """Raise Conflict if a minimum bandwidth would be larger than the limit in the same direction."""
    if rule_type not in (BANDWIDTH_LIMIT, MINIMUM_BANDWIDTH):
        return
    other = MINIMUM_BANDWIDTH if rule_type is BANDWIDTH_LIMIT else BANDWIDTH_LIMIT
    own, theirs = rule_type.numbers[0], other.numbers[0]
    o = other.table.c
    found = conn.execute(sa.select(o[theirs]).where(o.policy_id == policy, o.direction == row["direction"])).scalar()
    if found is None:
        return
    numbers = {own: row[own], theirs: found}
    if numbers["min_kbps"] > numbers["max_kbps"]:
        raise conflict(
            f"Unable to add the rule with value {row[own]} to the policy {policy} as the existing rule of type "
            f"{other.name} has value {found}.",
            "QoSRuleParameterConflict",
        )


def _like(rule_type: QosRuleType, policy: str, row: Mapping[str, Any]) -> sa.Select[Any]:
    """Return the statement for the rule of a policy besides which there cannot be this one."""
    found = sa.select(rule_type.table.c.id).where(rule_type.table.c.policy_id == policy)
    return (
        found
        if rule_type.one_per is None
        else found.where(rule_type.table.c[rule_type.one_per] == row[rule_type.one_per])
    )


def _second(conn: sa.Connection, rule_type: QosRuleType, policy: str, row: Mapping[str, Any]) -> Exception:
    other = conn.execute(_like(rule_type, policy, row)).scalar()
    how_many = "one" if rule_type.one_per is None else f"one for each {rule_type.one_per}"
    return conflict(
        f"Rule {rule_type.name} conflicts with rule {other} which already exists in QoS Policy {policy}: there can be "
        f"{how_many}.",
        "QoSRulesConflict",
    )


def _change(
    conn: sa.Connection, rule_type: QosRuleType, policy: str, id: str, given: dict[str, Any], now: int
) -> dict[str, Any]:
    after = {**_rule(conn, rule_type, policy, id), **given}
    r = rule_type.table.c
    if conn.execute(_like(rule_type, policy, after).where(r.id != id)).first() is not None:
        raise _second(conn, rule_type, policy, after)
    _check_parameters(conn, rule_type, policy, after)
    if given and rule_type.is_claimed:
        locked(conn, qos_policies, policy)
        check_rule_change(conn, policy)
    if given and not conn.execute(rule_type.table.update().where(r.id == id).values(**given)).rowcount:
        raise Changed
    _touch(conn, policy, now)
    return _rule(conn, rule_type, policy, id)


def _delete(conn: sa.Connection, rule_type: QosRuleType, policy: str, id: str, now: int) -> None:
    _rule(conn, rule_type, policy, id)
    if rule_type.is_claimed:
        locked(conn, qos_policies, policy)
        check_rule_change(conn, policy)
    conn.execute(rule_type.table.delete().where(rule_type.table.c.id == id))
    _touch(conn, policy, now)
