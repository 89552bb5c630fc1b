"""Topics: the names of the parts that desired states of hosts consist of (`state_parts.py`).

A transaction that changes a part notes its topic (`host_changes.py`), and agents get parts by topic. A topic is
KIND:ID, or KIND alone if there is one part of its kind.
"""

from enum import StrEnum


class PartKind(StrEnum):
    """What a part is about."""

    HOST = "host"  # the ports that are bound to a host
    NETWORK = "network"  # a network with its subnets
    RULES = "rules"  # the rules of a security group
    MEMBERS = "members"  # the addresses of a security group's ports
    QOS_POLICY = "policy"  # the bandwidth limits and the DSCP mark of a QoS policy
    ROUTERS = "routers"  # which routers there are
    ROUTER = "router"  # a router with its ports and floating IPs
    OVERSIZED = "oversized"  # groups whose members a state leaves out; it follows from other parts, and nobody notes it


def topic(kind: str, id: str = "") -> str:
    """Return the topic of a part; the only part of a kind has no id."""
    return f"{kind}:{id}" if id else str(kind)


def kind_and_id(topic: str) -> tuple[str, str]:
    """Return the kind of a topic, and the id of what it is about, or the name of the host."""
    kind, _, id = topic.partition(":")
    return kind, id


ROUTERS_TOPIC = topic(PartKind.ROUTERS)
OVERSIZED_TOPIC = topic(PartKind.OVERSIZED)


def host_topic(name: str) -> str:
    """Return the topic of the ports that are bound to a host."""
    return topic(PartKind.HOST, name)


def network_topic(id: str) -> str:
    """Return the topic of a network with its subnets."""
    return topic(PartKind.NETWORK, id)


def rules_topic(group_id: str) -> str:
    """Return the topic of the rules of a security group."""
    return topic(PartKind.RULES, group_id)


def members_topic(group_id: str) -> str:
    """Return the topic of the addresses of a security group's ports."""
    return topic(PartKind.MEMBERS, group_id)


def qos_policy_topic(id: str) -> str:
    """Return the topic of a QoS policy."""
    return topic(PartKind.QOS_POLICY, id)


def router_topic(id: str) -> str:
    """Return the topic of a router with its ports and floating IPs."""
    return topic(PartKind.ROUTER, id)
