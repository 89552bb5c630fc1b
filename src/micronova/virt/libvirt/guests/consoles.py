"""Where the consoles of running guests are, and their console logs."""

import asyncio
import logging
from functools import partial
from typing import Literal

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.console import ConsoleEndpoint
from micronova.objects.errors import Invalid, MicronovaError
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.guests.access import GuestAccess
from micronova.virt.libvirt.guests.console_log import (
    from_files,
    log_pool_name,
    read_console,
    remove_pool,
    through_libvirt,
)
from micronova.virt.libvirt.storage.layout import Layout

log = logging.getLogger(__name__)


class Consoles:
    """The consoles of one host's guests."""

    def __init__(
        self,
        guests: GuestAccess,
        connection: Connection,
        layout: Layout,
        files: ThreadPool,
        settings: LibvirtSettings,
        *,
        sockets: bool,
    ) -> None:
        """Give access to consoles; with `sockets`, the hypervisor can offer screens at Unix sockets."""
        self._guests = guests
        self._connection = connection
        self._layout = layout
        self._files = files
        self._settings = settings
        self._sockets = sockets
        self._log_pool = log_pool_name(layout.root)
        self._log_pool_used = False
        self._log_lock = asyncio.Lock()

    @property
    def vnc_on_socket(self) -> bool:
        """Whether VNC is at a Unix socket."""
        return self._sockets and not self._settings.vnc_server_listen

    async def close(self) -> None:
        """Remove the storage pool through which console logs were read."""
        if self._log_pool_used:
            try:
                await self._connection.read(lambda connection: remove_pool(connection, self._log_pool), "remove a pool")
            except MicronovaError as error:
                log.warning("the storage pool %s could not be removed from libvirt: %s", self._log_pool, error)

    async def output(self, uuid: str, length: int | None) -> str:
        """Return the last lines of a guest's console log, or all of it."""
        await self._guests.require(uuid)
        folder, name = self._layout.console, self._layout.console_log(uuid).name
        try:
            return await self._files.run(read_console, from_files(folder), name, length)
        except PermissionError:
            pass

        def read(connection: Connect) -> str:
            return read_console(through_libvirt(connection, self._layout.seen(folder), self._log_pool), name, length)

        async with self._log_lock:
            self._log_pool_used = True
            return await self._connection.read(read, "read the console log")

    async def vnc(self, uuid: str) -> ConsoleEndpoint:
        """Return where a guest's VNC console is."""
        if not self._settings.vnc_enabled:
            raise Invalid("Unavailable console type vnc: the setting vnc_enabled of this host is off.")
        await self._guests.require_running(uuid)
        if self.vnc_on_socket:
            return ConsoleEndpoint(path=str(self._layout.socket(uuid, "vnc")))
        return await self._port(uuid, "vnc")

    async def spice(self, uuid: str) -> ConsoleEndpoint:
        """Return where a guest's SPICE console is."""
        if not self._settings.spice_enabled:
            raise Invalid("Unavailable console type spice: the setting spice_enabled of this host is off.")
        await self._guests.require_running(uuid)
        if not self._sockets:
            return await self._port(uuid, "spice")
        path = self._layout.socket(uuid, "spice")
        if not await self._files.run(path.exists):
            raise _started_without("spice")
        return ConsoleEndpoint(path=str(path))

    async def serial(self, uuid: str, number: int) -> ConsoleEndpoint:
        """Return where the console of a guest's serial port is."""
        await self._guests.require_running(uuid)
        path = self._layout.socket(uuid, f"serial{number}")
        if not await self._files.run(path.exists):
            raise Invalid(f"Unavailable console type serial: the guest {uuid} has no serial port {number}.")
        return ConsoleEndpoint(path=str(path))

    async def _port(self, uuid: str, protocol: Literal["vnc", "spice"]) -> ConsoleEndpoint:
        find = partial(_screen_address, protocol=protocol)
        host, port = await self._guests.read(uuid, find, "say where its screen is")
        return ConsoleEndpoint(host=host, port=port)


def _screen_address(domain: Domain, protocol: Literal["vnc", "spice"]) -> tuple[str, int]:
    graphics = parse(domain.XMLDesc(0)).find(f"./devices/graphics[@type='{protocol}']")
    port = int(graphics.get("port", "-1")) if graphics is not None else -1
    if graphics is None or port < 0:
        raise _started_without(protocol)
    return graphics.get("listen") or "127.0.0.1", port


def _started_without(protocol: Literal["vnc", "spice"]) -> Invalid:
    return Invalid(
        f"Unavailable console type {protocol}: the guest was started without it, and has it after a hard reboot."
    )
