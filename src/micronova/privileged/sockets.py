"""Sockets that the helper opens inside a namespace for a process that may not enter it."""

import socket
from contextlib import nullcontext

from micronova.privileged import verbs as v
from micronova.privileged.kernel import inside
from micronova.privileged.names import METADATA_ADDRESS

_RTMGRP_LINK = 1


def watch_links(namespace: str) -> socket.socket:
    """Return a netlink socket that receives changes of devices; only root could change devices with it.

    An empty name is the namespace in which the helper was started.
    """
    with inside(namespace) if namespace else nullcontext():
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        made.bind((0, _RTMGRP_LINK))
        return made


def listen_metadata(namespace: str) -> socket.socket:
    """Return a socket that listens at the metadata address."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A new agent may listen before the old one has closed its socket, so that no request is refused.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((METADATA_ADDRESS, 80))
        made.listen(128)
        return made


def connect(verb: v.Connect, namespace: str) -> socket.socket:
    """Return a TCP connection from the cloud's namespace."""
    with inside(namespace):
        made = socket.socket(socket.AF_INET6 if ":" in verb.address else socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(verb.timeout)
    try:
        made.connect((verb.address, verb.port))
    except BaseException:
        made.close()
        raise
    made.settimeout(None)
    return made
