"""Guaranteed bandwidth: QoS policies and ports of the network service, and providers below nodes as its agents make."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from micronova.http.client import Answer
from tests.functional.cloud import Caller
from tests.functional.servers.embedded_services import call, make, ok

EGRESS, INGRESS = "NET_BW_EGR_KILOBIT_PER_SEC", "NET_BW_IGR_KILOBIT_PER_SEC"
TRAITS = ["CUSTOM_NETWORK_TUNNEL_PROVIDER", "CUSTOM_VNIC_TYPE_NORMAL"]
QOS = "/network/v2.0/qos/policies"


async def placement(user: Caller, method: str, path: str, body: Any = None) -> Answer:
    """Send a request to the Placement API as an admin."""
    return await call(user.admin, method, f"/placement{path}", body, {"openstack-api-version": "placement 1.39"})


async def _done(user: Caller, method: str, path: str, body: Any = None) -> Any:
    answer = await placement(user, method, path, body)
    assert answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:300]!r}"
    return answer.json() if answer.body else None


async def policy(user: Caller, **minimum: int) -> str:
    """Create a QoS policy with a minimum bandwidth for each direction; return its id."""
    body = {"policy": {"name": uuid.uuid4().hex, "project_id": user.project}}
    made = (await ok(user.admin, "POST", QOS, body))["policy"]["id"]
    for direction, kbps in minimum.items():
        rule = {"minimum_bandwidth_rule": {"min_kbps": kbps, "direction": direction}}
        await ok(user.admin, "POST", f"{QOS}/{made}/minimum_bandwidth_rules", rule)
    return str(made)


async def asking_port(user: Caller, network: Mapping[str, Any], **minimum: int) -> dict[str, Any]:
    """Create a port with a minimum bandwidth, and return it as services see it."""
    made = await make(user, "port", network_id=network["id"], qos_policy_id=await policy(user, **minimum))
    return await port_of(user, made["id"])


async def port_of(user: Caller, id: str) -> dict[str, Any]:
    """Return a port as services see it."""
    return dict((await ok(user.admin, "GET", f"/network/v2.0/ports/{id}"))["port"])


async def node(user: Caller, host: str) -> str:
    """Return the uuid of a host's compute node."""
    [found] = (await _done(user, "GET", f"/resource_providers?name={host}"))["resource_providers"]
    return str(found["uuid"])


@asynccontextmanager
async def interfaces(user: Caller, total: Mapping[str, int], ratio: float = 1.0) -> AsyncIterator[dict[str, str]]:
    """Have a network interface with so much bandwidth, in each direction, below the nodes of these hosts.

    No server gets more than all of it, whatever the allocation ratio.
    Yield the uuids of their providers by host. At the end nothing may be used of them any more.
    """
    made = {}
    for host, kbps in total.items():
        body = {"name": f"{host}:{uuid.uuid4().hex[:6]}", "parent_provider_uuid": await node(user, host)}
        made[host] = (await _done(user, "POST", "/resource_providers", body))["uuid"]
        for trait in TRAITS:
            await _done(user, "PUT", f"/traits/{trait}")
        path = f"/resource_providers/{made[host]}"
        stock = {
            "inventories": {
                name: {"total": kbps, "max_unit": kbps, "allocation_ratio": ratio} for name in (EGRESS, INGRESS)
            },
            "resource_provider_generation": 0,
        }
        await _done(user, "PUT", f"{path}/inventories", stock)
        await _done(user, "PUT", f"{path}/traits", {"traits": TRAITS, "resource_provider_generation": 1})
    yield made
    for provider in made.values():
        assert await used(user, provider) == {EGRESS: 0, INGRESS: 0}
        await _done(user, "DELETE", f"/resource_providers/{provider}")


async def used(user: Caller, provider: str) -> dict[str, int]:
    """Return what is used of a provider."""
    return dict((await _done(user, "GET", f"/resource_providers/{provider}/usages"))["usages"])


async def held(user: Caller, consumer: str) -> dict[str, dict[str, int]]:
    """Return what a consumer holds, by provider."""
    found = (await _done(user, "GET", f"/allocations/{consumer}"))["allocations"]
    return {provider: each["resources"] for provider, each in found.items()}


async def _moved(user: Caller, consumer: str, before: str, after: str) -> Any:
    """Return the allocations of a consumer, as the API takes them, with one provider in place of another."""
    found = await _done(user, "GET", f"/allocations/{consumer}")
    own = {provider: {"resources": each["resources"]} for provider, each in found["allocations"].items()}
    own[after] = own.pop(before)
    return {**found, "allocations": own}


async def move_allocations(user: Caller, consumer: str, before: str, after: str) -> None:
    """Let a consumer hold of one provider what it holds of another."""
    await _done(user, "PUT", f"/allocations/{consumer}", await _moved(user, consumer, before, after))


async def reshape(user: Caller, consumer: str, before: str, after: str) -> None:
    """Move all that a provider has, and what the consumer holds of it, to another one, in one request."""
    stock = {each: await _done(user, "GET", f"/resource_providers/{each}/inventories") for each in (before, after)}
    stock[before]["inventories"] = {}
    body = {"inventories": stock, "allocations": {consumer: await _moved(user, consumer, before, after)}}
    await _done(user, "POST", "/reshaper", body)


async def restock(user: Caller, provider: str, kbps: int) -> None:
    """Let a provider have so much bandwidth in each direction."""
    path = f"/resource_providers/{provider}"
    stock = await _done(user, "GET", f"{path}/inventories")
    stock["inventories"] = {name: {"total": kbps} for name in (EGRESS, INGRESS)}
    await _done(user, "PUT", f"{path}/inventories", stock)
