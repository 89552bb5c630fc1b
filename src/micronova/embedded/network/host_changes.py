"""The table of changes that concern hosts, written by the transactions that make them.

The desired state of a host has parts (`host_document.py`), and the name of each part is a topic. A transaction that
changes a part notes its topic. `state_watch.py` reads the table, and then only the parts that have changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import device_owners
from micronova.embedded.network.tables import host_changes, port_security_groups

ROUTERS = "routers"  # the topic of which routers there are


def host_topic(name: str) -> str:
    """Return the topic of the ports that are bound to a host."""
    return f"host:{name}"


def network_topic(id: str) -> str:
    """Return the topic of a network with its subnets."""
    return f"network:{id}"


def rules_topic(group: str) -> str:
    """Return the topic of the rules of a security group."""
    return f"rules:{group}"


def members_topic(group: str) -> str:
    """Return the topic of the addresses of a security group's ports."""
    return f"members:{group}"


def policy_topic(id: str) -> str:
    """Return the topic of a QoS policy."""
    return f"policy:{id}"


def router_topic(id: str) -> str:
    """Return the topic of a router with its ports and floating IPs."""
    return f"router:{id}"


def note(conn: sa.Connection, now: int, topics: Iterable[str]) -> None:
    """Note changed topics, in the transaction that changes them."""
    noted = sorted(set(topics))
    if noted:
        conn.execute(host_changes.insert(), {"created_at": now, "topics": noted})


def topics_of_ports(*ports: Mapping[str, Any]) -> set[str]:
    """Return the topics of ports that are created, changed or deleted; a changed port is given as before and after."""
    topics = set()
    for port in ports:
        if port["host"]:
            topics.add(host_topic(port["host"]))
        if port["device_owner"] in (device_owners.ROUTER_GATEWAY, device_owners.ROUTER_INTERFACE):
            topics.add(router_topic(port["device_id"]))
    return topics


def topics_of_members(conn: sa.Connection, port_ids: Sequence[str]) -> set[str]:
    """Return the topics of the security groups of ports whose addresses change."""
    g = port_security_groups.c
    topics: set[str] = set()
    for part in chunks(port_ids):
        found = conn.execute(sa.select(g.security_group_id).where(g.port_id.in_(part)).distinct()).scalars()
        topics.update(members_topic(group) for group in found)
    return topics
