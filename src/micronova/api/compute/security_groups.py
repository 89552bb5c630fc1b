"""Security groups and their rules (until 2.35), which the network service keeps for the user."""

import ipaddress
import urllib.parse
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api.compute import security_group_views as views
from micronova.api.compute.networks import network_service
from micronova.api.compute.server_inputs import Id
from micronova.api.inputs import NoQuery, Slice, is_uuid
from micronova.clients.network.client import NetworkClient
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import until
from micronova.objects.errors import Conflict, Forbidden, Invalid

GROUPS, RULES = "security_groups", "security_group_rules"
_Text = Annotated[str, Meta(max_length=255)]


class ListQuery(Slice):
    """The page of a list; admins may ask for the groups of all projects."""

    all_tenants: str | UnsetType = UNSET


class Group(msgspec.Struct):
    """A group's name and description; other fields are ignored, as in Nova."""

    name: _Text
    description: _Text


class GroupBody(msgspec.Struct):
    """The body of a new group and of a change."""

    security_group: Group


class Rule(msgspec.Struct, kw_only=True):
    """A rule for incoming traffic, from addresses (`cidr`) or from a group (`group_id`)."""

    parent_group_id: Id
    group_id: Id | None = None
    ip_protocol: Any = None
    from_port: Any = None
    to_port: Any = None
    cidr: Any = None


class RuleBody(msgspec.Struct):
    """The body of a new rule."""

    security_group_rule: Rule


class SecurityGroups:
    """The handlers."""

    def __init__(self, client: NetworkClient | None, max_limit: int) -> None:
        self._client = client
        self._max_limit = max_limit

    async def index(self, request: Request) -> dict[str, Any]:
        """List the project's groups."""
        query: ListQuery = request.query
        network = network_service(self._client, request)
        everywhere = request.context.is_admin and query.all_tenants is not UNSET
        found = await network.list_(GROUPS, *(() if everywhere else (("project_id", request.context.project_id),)))
        page = query.cut(found, self._max_limit)
        known = await views.sources(network, page)
        groups = [views.shown(group, known) for group in page]
        return {"security_groups": sorted(groups, key=lambda group: (group["tenant_id"], group["name"]))}

    async def show(self, request: Request, id: str) -> dict[str, Any]:
        """Show a group."""
        network = network_service(self._client, request)
        return await self._body(request, await network.show(GROUPS, _checked(id)))

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a group."""
        try:
            made = await network_service(self._client, request).create(GROUPS, _values(request))
        except Conflict as error:  # the quota
            raise Forbidden(error.message) from None
        return await self._body(request, made)

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Change a group's name and description."""
        network = network_service(self._client, request)
        await network.show(GROUPS, _checked(id))
        try:
            changed = await network.update(GROUPS, id, _values(request))
        except Conflict as error:
            raise Invalid(error.message) from None
        return await self._body(request, changed)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a group."""
        try:
            await network_service(self._client, request).delete(GROUPS, _checked(id))
        except Conflict as error:  # it is in use
            raise Invalid(error.message) from None

    async def _body(self, request: Request, group: dict[str, Any]) -> dict[str, Any]:
        known = await views.sources(network_service(self._client, request), [group])
        return {"security_group": views.shown(group, known)}

    async def create_rule(self, request: Request) -> dict[str, Any]:
        """Create a rule."""
        asked: Rule = request.body.security_group_rule
        network = network_service(self._client, request)
        group = await network.show(GROUPS, asked.parent_group_id)
        named = [group] if asked.group_id is None else [group, await network.show(GROUPS, asked.group_id)]
        known = await views.sources(network, named)
        wanted = new_rule(asked)
        if any(all(rule[name] == value for name, value in wanted.items()) for rule in views.incoming(group)):
            raise Invalid(f"This rule already exists in group {group['id']}.")
        try:
            made = await network.create(RULES, {"security_group_id": group["id"], **wanted})
        except Conflict as error:  # the quota
            raise Forbidden(error.message) from None
        return {"security_group_rule": views.shown_rule(made, known)}

    async def delete_rule(self, request: Request, id: str) -> None:
        """Delete a rule."""
        await network_service(self._client, request).delete(RULES, _checked(id))


def _checked(id: str) -> str:
    if not is_uuid(id):
        raise Invalid("Security group id should be uuid")
    return id


def _values(request: Request) -> dict[str, str]:
    asked: Group = request.body.security_group
    return {"name": asked.name, "description": asked.description}


def new_rule(asked: Rule) -> dict[str, Any]:
    """Return the rule in the network service's words; raise Invalid."""
    protocol = str(asked.ip_protocol).lower() if asked.ip_protocol else None
    first, last = asked.from_port, asked.to_port
    cidr = _cidr(asked.cidr) if asked.group_id is None else None
    if asked.group_id is not None and first is None and last is None and protocol in ("tcp", "udp", "icmp"):
        first, last = (-1, -1) if protocol == "icmp" else (1, 65535)
    if protocol is None or first is None or last is None:
        if cidr is not None:
            raise Invalid("Not enough parameters to build a valid rule: ip_protocol, from_port and to_port are needed.")
        protocol = first = last = None
    else:
        first, last = _ports(protocol, first, last)
    return {
        "direction": "ingress",
        "ethertype": "IPv6" if cidr is not None and ":" in cidr else "IPv4",
        "protocol": protocol,
        "port_range_min": first,
        "port_range_max": last,
        "remote_ip_prefix": cidr,
        "remote_group_id": asked.group_id,
    }


def _cidr(value: Any) -> str:
    """Check a network and return it as it was written."""
    if not value:
        return "0.0.0.0/0"
    text = urllib.parse.unquote(str(value))
    address, slash, prefix = text.partition("/")
    try:
        ipaddress.ip_network(text, strict=False)
        if not slash or (int(prefix) == 0 and int(ipaddress.ip_address(address)) != 0):
            raise ValueError
    except ValueError:
        raise Invalid(f"{text[:64]} is not a valid IP network: cidr is ADDRESS/PREFIX.") from None
    return text


def _ports(protocol: str, first: Any, last: Any) -> tuple[int | None, int | None]:
    """Return ports, or type and code of ICMP; None stands for all."""
    if protocol not in ("tcp", "udp", "icmp"):
        raise Invalid(f"Invalid IP protocol {protocol[:64]}: it is tcp, udp or icmp.")
    try:
        low, high = int(first), int(last)
    except (TypeError, ValueError):
        raise Invalid("from_port and to_port must be integers; for icmp they are type and code.") from None
    if protocol == "icmp" and not (-1 <= low <= 255 and -1 <= high <= 255):
        raise Invalid(f"Invalid port range {low}:{high}: type and code of icmp are from -1 to 255.")
    if protocol != "icmp" and not 1 <= low <= high <= 65535:
        raise Invalid(f"Invalid port range {low}:{high}: ports are from 1 to 65535, the first one not above the last.")
    return None if low == -1 else low, None if high == -1 else high


def routes(client: NetworkClient | None, max_limit: int) -> list[Route]:
    """Declare the routes of security groups and rules."""
    handlers = SecurityGroups(client, max_limit)
    groups, rules, rule = "/os-security-groups", "/os-security-group-rules", "os_compute_api:os-security-groups"
    one = f"{groups}/{{id}}"
    route = partial(Route, versions=until(35), errors=(501,))
    group = {"security_group": views.GROUP}
    return [
        route(
            method="GET",
            path=groups,
            handler=handlers.index,
            policy=f"{rule}:get",
            query=ListQuery,
            answer={"security_groups": [views.GROUP]},
        ),
        route(
            method="POST", path=groups, handler=handlers.create, policy=f"{rule}:create", body=GroupBody, answer=group
        ),
        route(method="GET", path=one, handler=handlers.show, policy=f"{rule}:show", query=NoQuery, answer=group),
        route(method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=GroupBody, answer=group),
        route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete", status=202),
        route(
            method="POST",
            path=rules,
            handler=handlers.create_rule,
            policy=f"{rule}:rule:create",
            body=RuleBody,
            answer={"security_group_rule": views.RULE},
        ),
        route(
            method="DELETE",
            path=f"{rules}/{{id}}",
            handler=handlers.delete_rule,
            policy=f"{rule}:rule:delete",
            status=202,
        ),
    ]
