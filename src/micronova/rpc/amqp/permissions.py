"""What the broker user of a compute host may do: take its own orders, hear fan-outs, send; nothing of other hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from micronova.rpc.amqp.session import HOST_TOPIC, PREFIX, REPLY_PREFIX


@dataclass(frozen=True)
class Permissions:
    """The three patterns of `rabbitmqctl set_permissions`."""

    configure: str
    write: str
    read: str


def for_host(user: str, host: str, topic: str = HOST_TOPIC) -> Permissions:
    """Give the rights that a process needs which serves a topic on one host, with shared=False, and no more.

    Writing to the default exchange reaches every queue by name. So servers must look at context.sender, which the
    broker has verified; what these rights prevent is reading, making or emptying what belongs to others.
    """
    place = re.escape(PREFIX + topic) + r"(:\w+)?"
    own = rf"{place}\.{re.escape(host)}|{re.escape(REPLY_PREFIX + user)}\..+|{re.escape(f'{PREFIX}fanout.{user}')}\..+"
    return Permissions(
        configure=f"^({own})$",
        write=rf"^(amq\.default|{own})$",
        read=rf"^({place}\.fanout|{own})$",
    )
