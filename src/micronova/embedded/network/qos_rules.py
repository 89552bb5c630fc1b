"""The API of QoS rules: bandwidth limits for what a port sends and receives."""

from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common.revisions import Changed, retry
from micronova.embedded.network.collection import Resource
from micronova.embedded.network.core import Core
from micronova.embedded.network.errors import conflict
from micronova.embedded.network.host_changes import note, policy_topic
from micronova.embedded.network.listing import Attributes, Listing
from micronova.embedded.network.qos_policies import RULE_TYPE, QosPolicies, rule_values
from micronova.embedded.network.request_bodies import Body, body_of_one, convert_text, objects
from micronova.embedded.network.tables import bandwidth_limit_rules, qos_policies
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import NotFound

MOST = 2**31 - 1
Kilobits = Annotated[int, Meta(ge=0, le=MOST)] | Annotated[str, Meta(pattern=r"^\d{1,9}$")]
_NUMBERS = ("max_kbps", "max_burst_kbps")
_SINGULAR = "bandwidth_limit_rule"


class RuleUpdate(Body, kw_only=True):
    """The attributes that an update may set."""

    max_kbps: Kilobits | UnsetType = UNSET
    max_burst_kbps: Kilobits | UnsetType = UNSET
    direction: Literal["egress", "ingress"] | UnsetType = UNSET


class RuleCreate(RuleUpdate, kw_only=True):
    """The attributes that a create may set."""

    max_kbps: Kilobits


class BandwidthRules:
    """The bandwidth limits of policies."""

    attributes = Attributes(
        bandwidth_limit_rules,
        {name: bandwidth_limit_rules.c[name] for name in ("id", "max_kbps", "max_burst_kbps", "direction")},
    )

    def __init__(self, core: Core) -> None:
        self.core = core
        self._policies = QosPolicies(core)

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_ = f"{self._policies.path}/{{id}}/{_SINGULAR}s"
        one_ = f"{all_}/{{rule}}"

        def route(method: str, path: str, handler: Any, verb: str, status: int, body: Any = None) -> Route:
            return Route(
                method=method, path=path, handler=handler, policy=f"{verb}_policy_{_SINGULAR}", status=status,
                body=body, checks_policy=True,
            )  # fmt: skip

        return [
            route("GET", all_, self.index, "get", 200),
            route("POST", all_, self.create, "create", 201, body_of_one(_SINGULAR, RuleCreate)),
            route("GET", one_, self.show, "get", 200),
            route("PUT", one_, self.update, "update", 200, body_of_one(_SINGULAR, RuleUpdate)),
            route("DELETE", one_, self.delete, "delete", 204),
        ]

    async def _policy(self, request: Request, id: str) -> Resource:
        return await self._policies.find(request, id, request.route.policy)

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List the rules of a policy."""
        policy = await self._policy(request, id)
        listing = Listing.parse(request.raw_query, self.attributes)
        found = await self.core.database.read(_page, policy.id, listing)
        if found is None:
            raise _missing(listing.marker or "", policy.id)
        return {f"{_SINGULAR}s": [listing.choose(each) for each in found]}

    async def show(self, request: Request, id: str, rule: str) -> dict[str, Any]:
        """Show one rule."""
        policy = await self._policy(request, id)
        return {_SINGULAR: await self.core.database.read(_rule, policy.id, rule)}

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Create a rule; a policy has at most one per direction."""
        policy = await self._policy(request, id)
        row = {"max_burst_kbps": 0, "direction": "egress", **self._given(request)}
        row |= {"id": self.core.new_id(), "policy_id": policy.id}
        await self.core.write_and_wake(_insert, row, self.core.now())
        return {_SINGULAR: {name: row[name] for name in ("id", *_NUMBERS, "direction")}}

    async def update(self, request: Request, id: str, rule: str) -> dict[str, Any]:
        """Update a rule; it applies to all ports with the policy."""
        policy = await self._policy(request, id)
        given = self._given(request)
        found = await retry(self.core.write_and_wake, _change, policy.id, rule, given, self.core.now())
        return {_SINGULAR: found}

    async def delete(self, request: Request, id: str, rule: str) -> None:
        """Delete a rule."""
        policy = await self._policy(request, id)
        await self.core.write_and_wake(_remove, policy.id, rule, self.core.now())

    @staticmethod
    def _given(request: Request) -> dict[str, Any]:
        [given] = objects(request.body, _SINGULAR)
        convert_text(given, numbers=_NUMBERS)
        return given


class RuleTypes:
    """The API of QoS rule types."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        common: dict[str, Any] = {"method": "GET", "policy": "get_rule_type", "checks_policy": True}
        return [
            Route(path="/v2.0/qos/rule-types", handler=self.index, **common),
            Route(path="/v2.0/qos/rule-types/{type}", handler=self.show, **common),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List the rule types."""
        request.authorize({})
        wanted = request.raw_query.get("type", [RULE_TYPE])
        return {"rule_types": [{"type": RULE_TYPE}] if RULE_TYPE in wanted else []}

    async def show(self, request: Request, type: str) -> dict[str, Any]:
        """Show a rule type with its parameters, for admins."""
        request.authorize({})
        if type != RULE_TYPE:
            raise NotFound(f"QoS rule type {type[:64]} could not be found; there is {RULE_TYPE}.")
        shown: dict[str, Any] = {"type": RULE_TYPE}
        if request.context.is_admin:
            shown["drivers"] = [{"name": "micronova", "supported_parameters": _PARAMETERS}]
        return {"rule_type": shown}


_PARAMETERS = [
    *(
        {"parameter_name": name, "parameter_type": "range", "parameter_values": {"start": 0, "end": MOST}}
        for name in _NUMBERS
    ),
    {"parameter_name": "direction", "parameter_type": "choices", "parameter_values": ["egress", "ingress"]},
]


def _missing(rule: str, policy: str) -> NotFound:
    return NotFound(f"QoS rule {rule[:64]} for policy {policy} could not be found.", type="QosRuleNotFound")


def _page(conn: sa.Connection, policy: str, listing: Listing) -> list[dict[str, Any]] | None:
    mine = bandwidth_limit_rules.c.policy_id == policy
    rows = listing.page(conn, sa.select(bandwidth_limit_rules).where(mine, *listing.conditions()))
    return None if rows is None else [rule_values(row) for row in rows]


def _rule(conn: sa.Connection, policy: str, id: str) -> dict[str, Any]:
    r = bandwidth_limit_rules.c
    mine = sa.select(bandwidth_limit_rules).where(r.id == id, r.policy_id == policy)
    row = conn.execute(mine).first()
    if row is None:
        raise _missing(id, policy)
    return rule_values(row)


def _touch(conn: sa.Connection, policy: str, now: int) -> None:
    """Increase the revision of a policy, because one of its rules changed."""
    counted = {"revision": qos_policies.c.revision + 1, "updated_at": now}
    if not conn.execute(qos_policies.update().where(qos_policies.c.id == policy).values(**counted)).rowcount:
        raise NotFound(f"QoS policy {policy} could not be found.", type="QosPolicyNotFound")
    note(conn, now, [policy_topic(policy)])


def _insert(conn: sa.Connection, row: dict[str, Any], now: int) -> None:
    _touch(conn, row["policy_id"], now)
    if not insert_if_absent(conn, bandwidth_limit_rules, row):
        raise _second(conn, row["policy_id"], row["direction"])


def _second(conn: sa.Connection, policy: str, direction: str) -> Exception:
    r = bandwidth_limit_rules.c
    other = conn.execute(sa.select(r.id).where(r.policy_id == policy, r.direction == direction)).scalar()
    return conflict(
        f"Rule {RULE_TYPE} conflicts with rule {other} which already exists in QoS Policy {policy}: there can be one "
        f"for each direction.",
        "QoSRulesConflict",
    )


def _change(conn: sa.Connection, policy: str, id: str, given: dict[str, Any], now: int) -> dict[str, Any]:
    before = _rule(conn, policy, id)
    r = bandwidth_limit_rules.c
    turned = given.get("direction", before["direction"])
    others = sa.select(r.id).where(r.policy_id == policy, r.direction == turned, r.id != id)
    if conn.execute(others).first() is not None:
        raise _second(conn, policy, turned)
    if given and not conn.execute(bandwidth_limit_rules.update().where(r.id == id).values(**given)).rowcount:
        raise Changed
    _touch(conn, policy, now)
    return _rule(conn, policy, id)


def _remove(conn: sa.Connection, policy: str, id: str, now: int) -> None:
    _rule(conn, policy, id)
    conn.execute(bandwidth_limit_rules.delete().where(bandwidth_limit_rules.c.id == id))
    _touch(conn, policy, now)
