"""The table of changes that concern hosts, written by the transactions that make them.

The desired state of a host has parts (`state_parts.py`), and the name of each part is a topic (`topics.py`). A
transaction that changes a part notes its topic. `state_watch.py` reads the table, and then only the parts that have
changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.embedded.common.chunks import chunks
from micronova.embedded.network import device_owners
from micronova.embedded.network.tables import host_changes, port_security_groups
from micronova.embedded.network.topics import host_topic, members_topic, router_topic


def note(conn: sa.Connection, now: int, topics: Iterable[str]) -> None:
    """Note changed topics, in the transaction that changes them."""
    noted = sorted(set(topics))
    if noted:
        conn.execute(host_changes.insert(), {"created_at": now, "topics": noted})


def topics_of_ports(*ports: Mapping[str, Any]) -> set[str]:
    """Return the topics of the hosts and routers that have these ports.

    They are noted if ports are created, changed or deleted; a changed port is given as it was and as it is.
    """
    topics = set()
    for port in ports:
        if port["host"]:
            topics.add(host_topic(port["host"]))
        if port["device_owner"] in (device_owners.ROUTER_GATEWAY, device_owners.ROUTER_INTERFACE):
            topics.add(router_topic(port["device_id"]))
    return topics


def topics_of_groups(conn: sa.Connection, port_ids: Sequence[str]) -> set[str]:
    """Return the topics of the members of the security groups that have these ports.

    They are noted if addresses of the ports change, or if the ports are deleted.
    """
    g = port_security_groups.c
    topics: set[str] = set()
    for part in chunks(port_ids):
        found = conn.execute(sa.select(g.security_group_id).where(g.port_id.in_(part)).distinct()).scalars()
        topics.update(members_topic(group) for group in found)
    return topics
