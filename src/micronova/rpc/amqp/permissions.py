"""The rights of a compute host's broker user: consume its own queues, and send."""

from __future__ import annotations

import re
from dataclasses import dataclass

from micronova.rpc.amqp.session import DEAD_EXCHANGE, PREFIX, REPLY_PREFIX


@dataclass(frozen=True)
class Permissions:
    """The three patterns of `rabbitmqctl set_permissions`."""

    configure: str
    write: str
    read: str


def for_host(user: str, host: str, topic: str = "compute") -> Permissions:
    """Return the rights that a process needs to serve a topic on one host with shared=False, and no others.

    A host can write to every queue through the default exchange. So servers check context.sender, which the broker
    verifies. These rights prevent a host from reading, declaring or deleting the queues of others.
    """
    topic_queue, replies = re.escape(PREFIX + topic), re.escape(REPLY_PREFIX + user)
    own = rf"{topic_queue}(:\w+)?\.{re.escape(host)}|{replies}\..+"
    return Permissions(
        configure=f"^({own})$",
        # The broker asks for this right of who declares a queue whose dead letters go to the exchange.
        write=rf"^(amq\.default|{re.escape(DEAD_EXCHANGE)}|{own})$",
        read=f"^({own})$",
    )
