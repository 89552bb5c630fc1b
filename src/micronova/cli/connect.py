"""`micronova connect`: reach a floating IP from this machine; guests' networks are in namespaces of their own."""

import asyncio
import ipaddress
import os
import select
import socket
from pathlib import Path

from micronova.cli import root_records
from micronova.cli.state import StateDirectory, default_directory
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.privileged.client import PrivilegedClient, PrivilegedError, helper_socket
from micronova.privileged.names import prefix_of
from micronova.privileged.verbs import Connect

_BLOCK = 1 << 16


def connect(address: str, port: int, directory: Path | None) -> None:
    """Join standard input and output to a TCP connection: what ssh expects of a ProxyCommand."""
    place = StateDirectory((directory or default_directory()).absolute())
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise MicronovaError(f"{address} is no IP address: `openstack floating ip list` shows those to use.") from None
    try:
        connection = asyncio.run(_open(place, address, port))
    except Unavailable:
        raise MicronovaError(
            f"No cloud with real guests runs in {place.path}, or you may not use it: name its --dir, or use sudo."
        ) from None
    except PrivilegedError as error:
        raise MicronovaError(explain(address, port, str(error).removeprefix("Connect: "))) from None
    with connection:
        _relay(connection)


def explain(address: str, port: int, reason: str) -> str:
    """Return what to do about a connection that failed for a reason of the kernel's."""
    reached = f"{address} port {port} cannot be reached"
    if "timed out" in reason:
        return (
            f"{reached}: nothing answers. Packets are dropped if no security group of the server lets them in: "
            f"`openstack security group rule create --protocol tcp --dst-port {port} GROUP`. "
            "A guest that is still booting does not answer either."
        )
    if "refused" in reason:
        return f"{reached}: the guest answers, but no program listens there. Is it still booting?"
    if "No route" in reason or "unreachable" in reason:
        return (
            f"{reached}: no running server has this address, or its guest is still booting. "
            "`openstack floating ip list` shows which server should have it."
        )
    return f"{reached}: {reason}."


def socket_of(place: StateDirectory) -> Path:
    """Return the socket of the helper of the cloud in DIR; raise Unavailable if its keys cannot be read."""
    try:
        if place.has_keys():
            return helper_socket(prefix_of(root_records.cloud_id(place)))
    except OSError as error:
        raise Unavailable(f"{place.path} cannot be read: {error.strerror}.") from None
    raise Unavailable(f"There is no cloud in {place.path}.")


async def _open(place: StateDirectory, address: str, port: int) -> socket.socket:
    client = PrivilegedClient(socket_of(place))
    try:
        return await client.open(Connect(address=address, port=port))
    finally:
        await client.close()


def _relay(connection: socket.socket) -> None:
    """Copy both ways until the other end closes the connection."""
    sources: list[int | socket.socket] = [0, connection]
    while connection in sources:
        ready, _, _ = select.select(sources, [], [])
        if 0 in ready:
            data = os.read(0, _BLOCK)
            if data:
                connection.sendall(data)
            else:
                sources.remove(0)
                connection.shutdown(socket.SHUT_WR)
        if connection in ready:
            data = connection.recv(_BLOCK)
            if not data:
                return
            while data:
                data = data[os.write(1, data) :]
