"""Topics: the names of the parts that desired states of hosts consist of (`state_parts.py`).

Who changes a part notes its topic (`host_changes.py`), and agents get parts by topic. A topic is KIND:ID, or KIND alone
if there is one part of its kind.
"""

HOST = "host"  # the ports that are bound to a host
NETWORK = "network"  # a network with its subnets
RULES = "rules"  # the rules of a security group
MEMBERS = "members"  # the addresses of a security group's ports
POLICY = "policy"  # the bandwidth limits of a QoS policy
ROUTERS = "routers"  # which routers there are
ROUTER = "router"  # a router with its ports and floating IPs
OVERSIZED = "oversized"  # groups whose members a state leaves out; it follows from other parts, and nobody notes it


def host_topic(name: str) -> str:
    """Return the topic of the ports that are bound to a host."""
    return f"{HOST}:{name}"


def network_topic(id: str) -> str:
    """Return the topic of a network with its subnets."""
    return f"{NETWORK}:{id}"


def rules_topic(group_id: str) -> str:
    """Return the topic of the rules of a security group."""
    return f"{RULES}:{group_id}"


def members_topic(group_id: str) -> str:
    """Return the topic of the addresses of a security group's ports."""
    return f"{MEMBERS}:{group_id}"


def policy_topic(id: str) -> str:
    """Return the topic of a QoS policy."""
    return f"{POLICY}:{id}"


def router_topic(id: str) -> str:
    """Return the topic of a router with its ports and floating IPs."""
    return f"{ROUTER}:{id}"


def kind_and_id(topic: str) -> tuple[str, str]:
    """Return the kind of a topic, and the id of what it is about, or the name of the host."""
    kind, _, id = topic.partition(":")
    return kind, id
