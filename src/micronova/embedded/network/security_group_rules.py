"""The security group rule API."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network.collection import Creatable, Deletable, Resource, tags_of
from micronova.embedded.network.errors import conflict, invalid, not_found
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.listing import Attributes, Clause, flags, only_empty
from micronova.embedded.network.quotas import charge_all, release
from micronova.embedded.network.request_bodies import (
    Body,
    Identifier,
    Name,
    Number,
    Project,
    ShortText,
    body_of_one_or_many,
    convert_text,
    project_of,
)
from micronova.embedded.network.row_types import RuleOfGroupRow, SecurityGroupRuleRow
from micronova.embedded.network.rows import NewSecurityGroupRule, RuleMatch, new_row
from micronova.embedded.network.sharing import NOBODY, SECURITY_GROUP, Access, access_of, reading_for
from micronova.embedded.network.tables import security_group_rules, security_groups
from micronova.embedded.network.topics import rules_topic
from micronova.http.paging import iso
from micronova.http.request import Request

# The names of protocols, with their numbers.
PROTOCOLS = {
    "ah": 51,
    "dccp": 33,
    "egp": 8,
    "esp": 50,
    "gre": 47,
    "icmp": 1,
    "icmpv6": 58,
    "igmp": 2,
    "ipip": 4,
    "ipv6-encap": 41,
    "ipv6-frag": 44,
    "ipv6-icmp": 58,
    "ipv6-nonxt": 59,
    "ipv6-opts": 60,
    "ipv6-route": 43,
    "ospf": 89,
    "pgm": 113,
    "rsvp": 46,
    "sctp": 132,
    "tcp": 6,
    "udp": 17,
    "udplite": 136,
    "vrrp": 112,
}
WITH_PORTS = (6, 17, 33, 132, 136)
ICMP = (1, 58)
ONLY_V6 = (43, 44, 58, 59, 60)
_EVERYWHERE = ("0.0.0.0/0", "::/0")


class RuleAttributes(Body, kw_only=True):
    """The attributes that rules and default rules have."""

    direction: Annotated[str, Meta(pattern=r"^(ingress|egress)\Z")]
    ethertype: Annotated[str, Meta(max_length=16)] | None | UnsetType = UNSET
    protocol: Annotated[str, Meta(max_length=40)] | int | None | UnsetType = UNSET
    port_range_min: Number | None | UnsetType = UNSET
    port_range_max: Number | None | UnsetType = UNSET
    remote_ip_prefix: ShortText | None | UnsetType = UNSET
    remote_group_id: ShortText | None | UnsetType = UNSET
    remote_address_group_id: None | UnsetType = UNSET
    description: Name | None | UnsetType = UNSET


class SecurityGroupRuleCreate(RuleAttributes, kw_only=True):
    """The attributes that a create may set."""

    security_group_id: Identifier
    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET


class SecurityGroupRules(Creatable[RuleOfGroupRow], Deletable[RuleOfGroupRow]):
    """The security group rule API; rules are created and deleted, but never changed."""

    singular = "security_group_rule"
    plural = "security_group_rules"
    slug = "security-group-rules"
    attributes = Attributes.standard(
        security_group_rules,
        *("direction", "security_group_id", "ethertype", "protocol", "port_range_min", "port_range_max"),
        *("remote_ip_prefix", "remote_group_id"),
        special={
            "remote_address_group_id": only_empty,
            **flags(belongs_to_default_sg=security_groups.c.default_of.is_not(None)),
        },
        taggable=False,
    )
    create_body = body_of_one_or_many("security_group_rule", "security_group_rules", SecurityGroupRuleCreate)

    def select(self) -> sa.Select[Any]:
        """Select rules with the project of their security group."""
        return sa.select(
            security_group_rules,
            security_groups.c.project_id.label("group_project"),
            security_groups.c.default_of,
        ).join(security_groups, security_groups.c.id == security_group_rules.c.security_group_id)

    def visible_rows(self, request: Request) -> Clause | None:
        """Limit callers to the rules of their own security groups."""
        if self.crosses_projects(request):
            return None
        return security_groups.c.project_id == request.context.project_id

    def resources(self, conn: sa.Connection, rows: Sequence[RuleOfGroupRow]) -> list[Resource]:
        """Return rules."""
        tagged = tags_of(conn, [row.id for row in rows])
        return [
            Resource(
                {**security_group_rule_values(row, row.default_of is not None), "tags": tagged.get(row.id, [])},
                {"project_id": row.project_id, "security_group:project_id": row.group_project},
            )
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create rules."""
        asked = self.given(request)
        named = {given["security_group_id"] for given in asked} | {
            given["remote_group_id"] for given in asked if given.get("remote_group_id")
        }
        known, access = await self.core.database.read(
            reading_for([request.context.project_id], _group_owners), list(named)
        )
        wanted = []
        for given in asked:
            for name in ("security_group_id", "remote_group_id"):
                group = given.get(name)
                shared = access.get(group or "", NOBODY).is_shared(request.context.project_id)
                target = {"project_id": known.get(group or ""), "shared": shared}
                if group and (group not in known or not request.allows(target, "get_security_group")):
                    raise not_found("security_group", group)
            project = known[given["security_group_id"]]
            project_of(given, request.context, self.crosses_projects(request))
            request.authorize({"project_id": project, "security_group:project_id": project})
            wanted.append(self._row(project, given))
        prints = [(row["security_group_id"], row["fingerprint"]) for row in wanted]
        if len(set(prints)) != len(prints):
            raise conflict("Duplicate Security Group Rule in POST.", "DuplicateSecurityGroupRuleInPost")
        return self.answer(request, await self.core.write_and_wake(self._insert, wanted))

    def _row(self, project: str, given: dict[str, Any]) -> NewSecurityGroupRule:
        convert_text(given, numbers=("port_range_min", "port_range_max"))
        row: NewSecurityGroupRule = {
            **new_row(self.core, project, given),
            "security_group_id": given["security_group_id"],
            "direction": given["direction"],
            **checked(given),
            "remote_group_id": given.get("remote_group_id"),
            "fingerprint": "",
        }
        row["fingerprint"] = fingerprint(row)
        return row

    def _insert(self, conn: sa.Connection, wanted: list[NewSecurityGroupRule]) -> list[Resource]:
        # The groups first: a request that deletes a group locks it before its rules.
        for group in sorted({row["security_group_id"] for row in wanted}):
            touch_group(conn, group, wanted[0]["created_at"])
        for row in wanted:
            if not insert_if_absent(conn, security_group_rules, row):
                r = security_group_rules.c
                same = sa.and_(r.security_group_id == row["security_group_id"], r.fingerprint == row["fingerprint"])
                found = conn.execute(sa.select(r.id).where(same)).scalar()
                raise conflict(f"Security group rule already exists. Rule id is {found}.", "SecurityGroupRuleExists")
        charge_all(conn, (row["project_id"] for row in wanted), "security_group_rule", self.core.settings.quotas)
        return self.reload_all(conn, [row["id"] for row in wanted])

    async def delete(self, request: Request, id: str) -> None:
        """Delete a rule."""
        await self.find_to(request, "delete", id)
        await self.core.write_and_wake(_delete, id, self.core.now())


def security_group_rule_values(row: SecurityGroupRuleRow, of_default: bool) -> dict[str, Any]:
    """Return a rule as the API shows it."""
    prefix = row.remote_ip_prefix
    return {
        "id": row.id,
        "project_id": row.project_id,
        "tenant_id": row.project_id,
        "security_group_id": row.security_group_id,
        "ethertype": row.ethertype,
        "direction": row.direction,
        "protocol": row.protocol,
        "port_range_min": row.port_range_min,
        "port_range_max": row.port_range_max,
        "remote_ip_prefix": prefix,
        "remote_address_group_id": None,
        "normalized_cidr": str(ipaddress.ip_network(prefix, strict=False)) if prefix else None,
        "remote_group_id": row.remote_group_id,
        "belongs_to_default_sg": of_default,
        "description": row.description,
        "tags": [],
        "created_at": iso(row.created_at),
        "updated_at": iso(row.updated_at),
        "revision_number": row.revision,
    }


def checked(given: Mapping[str, Any]) -> RuleMatch:
    """Return ethertype, protocol, ports and prefix of a rule in canonical form; raise Invalid if they are wrong."""
    prefix = _prefix(given.get("remote_ip_prefix"))
    ethertype = _ethertype(given.get("ethertype"), prefix)
    protocol, number = _protocol(given.get("protocol"), ethertype)
    low, high = given.get("port_range_min"), given.get("port_range_max")
    if prefix and given.get("remote_group_id"):
        raise invalid(
            "Only one of remote_ip_prefix or remote_group_id may be provided.", "SecurityGroupMultipleRemoteEntites"
        )
    if number in ICMP:
        _check_icmp(low, high)
    elif low is not None or high is not None:
        _check_ports(number, protocol, low, high)
    return {
        "ethertype": ethertype,
        "protocol": protocol,
        "port_range_min": low,
        "port_range_max": high,
        "remote_ip_prefix": prefix,
    }


def _prefix(text: str | None) -> str | None:
    if not text:
        return None
    try:
        if "%" in text:
            raise ValueError
        interface = ipaddress.ip_interface(text)
    except ValueError:
        raise invalid(f"Invalid CIDR {text[:64]} given as IP prefix.", "InvalidCIDR") from None
    return str(interface)


def _ethertype(text: str | None, prefix: str | None) -> str:
    found = {"ipv4": "IPv4", "ipv6": "IPv6"}.get((text or "IPv4").lower())
    if found is None:
        raise invalid(
            f"Security group rule for ethertype '{text}' not supported. Allowed values are ['IPv4', 'IPv6'].",
            "SecurityGroupRuleInvalidEtherType",
        )
    if prefix is not None and f"IPv{ipaddress.ip_interface(prefix).version}" != found:
        raise invalid(f"Conflicting value ethertype {found} for CIDR {prefix}", "SecurityGroupRuleParameterConflict")
    return found


def _protocol(given: str | int | None, ethertype: str) -> tuple[str | None, int | None]:
    """Return the stored name of a protocol, and its number."""
    text = "any" if given is None else str(given).strip().lower()
    if text in ("any", ""):
        return None, None
    if text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= 255:
        number = int(text)
        text = str(number)
    elif text in PROTOCOLS:
        number = PROTOCOLS[text]
    else:
        raise invalid(
            f"Security group rule protocol {text[:40]} not supported. Only protocol values "
            f"{sorted(PROTOCOLS)} and integer representations [0 to 255] are supported.",
            "SecurityGroupRuleInvalidProtocol",
        )
    if ethertype == "IPv6" and text in ("icmp", "icmpv6"):
        return "ipv6-icmp", 58
    if ethertype == "IPv4" and number in ONLY_V6:
        raise invalid(
            f"Invalid ethertype {ethertype} for protocol {text}.", "SecurityGroupEthertypeConflictWithProtocol"
        )
    return text, number


def _check_icmp(low: int | None, high: int | None) -> None:
    for field, value in (("port_range_min", low), ("port_range_max", high)):
        if value is not None and not 0 <= value <= 255:
            what = "type" if field == "port_range_min" else "code"
            raise invalid(
                f"Invalid value for ICMP {what} ({field}) {value}. It must be 0 to 255.",
                "SecurityGroupInvalidIcmpValue",
            )
    if low is None and high is not None:
        raise invalid(
            f"ICMP code (port-range-max) {high} is provided but ICMP type (port-range-min) is missing.",
            "SecurityGroupMissingIcmpType",
        )


def _check_ports(number: int | None, protocol: str | None, low: int | None, high: int | None) -> None:
    if number is None:
        raise invalid("Must also specify protocol if port range is given.", "SecurityGroupProtocolRequiredWithPorts")
    if number not in WITH_PORTS:
        raise invalid(
            f"Ports cannot be specified for protocol {protocol}. Ports are only supported for "
            f"tcp, udp, sctp, dccp and udplite.",
            "SecurityGroupInvalidProtocolForPort",
        )
    for value in (low, high):
        if value is not None and not 1 <= value <= 65535:
            raise invalid(f"Invalid value for port {value}: it must be 1 to 65535.", "SecurityGroupInvalidPortValue")
    if low is None or high is None or low > high:
        raise invalid(
            "For TCP/UDP protocols, port_range_min must be <= port_range_max, and both must be given.",
            "SecurityGroupInvalidPortRange",
        )


def fingerprint(row: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal rules of a security group."""
    protocol = row["protocol"]
    number = None if protocol is None else int(PROTOCOLS.get(protocol, protocol))
    prefix = row["remote_ip_prefix"]
    network = str(ipaddress.ip_network(prefix, strict=False)) if prefix else None
    if network in _EVERYWHERE:
        network = None
    parts = (
        row["direction"],
        row["ethertype"],
        number,
        row["port_range_min"],
        row["port_range_max"],
        network,
        row["remote_group_id"],
    )
    return "|".join("" if part is None else str(part) for part in parts)


def touch_group(conn: sa.Connection, id: str, now: int) -> None:
    """Increase the revision of a security group, because its rules changed."""
    revisions.touch(conn, security_groups.c.revision, security_groups.c.id == id, now=now)
    note(conn, now, [rules_topic(id)])


def _group_owners(conn: sa.Connection, ids: list[str]) -> tuple[dict[str, str], dict[str, Access]]:
    s = security_groups.c
    rows = conn.execute(sa.select(s.id, s.project_id).where(s.id.in_(ids)))
    return {row.id: row.project_id for row in rows}, access_of(conn, SECURITY_GROUP, ids)


def _delete(conn: sa.Connection, id: str, now: int) -> None:
    r = security_group_rules.c
    group = conn.execute(sa.select(r.security_group_id).where(r.id == id)).scalar()
    if group is None:
        raise Changed
    touch_group(conn, group, now)  # before the rule, as when the group is deleted
    gone = conn.execute(security_group_rules.delete().where(r.id == id).returning(r.project_id)).first()
    if gone is None:
        raise Changed
    release(conn, gone.project_id, "security_group_rule")
