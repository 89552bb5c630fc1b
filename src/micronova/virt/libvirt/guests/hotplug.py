"""Plugging and unplugging interfaces of guests, running or not."""

import logging
from dataclasses import replace
from typing import Final

from micronova.objects.clock import Clock
from micronova.objects.errors import MicronovaError
from micronova.objects.guest_properties import image_property
from micronova.objects.network import VIF
from micronova.virt.driver import DriverFailed, GuestPlan
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from micronova.virt.libvirt.client.events import EventQueues
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.client.xmltree import unparse
from micronova.virt.libvirt.definition.device_xml import interface as interface_element
from micronova.virt.libvirt.definition.interfaces import interfaces
from micronova.virt.libvirt.guests import domains

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4
ATTEMPT_SECONDS: Final = 15.0
"""How long a guest may take to release a device before it is asked again."""


async def attach(
    connection: Connection, cloud: str, plan: GuestPlan, vif: VIF, virt_type: str, *, linked: bool = True
) -> None:
    """Plug an interface with its link down, and raise the link when the network has confirmed it."""
    uuid = plan.instance.uuid
    image = plan.instance.image
    model = None if image is None else image_property(image.properties, "hw_vif_model")
    (plugged,) = interfaces((vif,), model=model, virt_type=virt_type, linked=linked)
    down = unparse(interface_element(replace(plugged, linked=False), virt_type))
    up = unparse(interface_element(plugged, virt_type))

    def plug(conn: Connect) -> None:
        domain = domains.require_ours(conn, uuid, cloud)
        live = bool(domain.isActive())
        if domains.interface_xml(domain, plugged.mac, live=live) is None:
            domain.attachDeviceFlags(down if live else up, _flags(live=live))

    def raise_link(conn: Connect) -> None:
        domain = domains.require_ours(conn, uuid, cloud)
        if domain.isActive():
            domain.updateDeviceFlags(up, _flags(live=True))

    await connection.change(uuid, plug, "plug the interface in")
    try:
        await plan.plugged()
        await connection.change(uuid, raise_link, "raise the interface's link")
    except BaseException:
        try:
            await connection.change(uuid, lambda conn: _unplug(conn, uuid, cloud, plugged.mac), "unplug the interface")
        except MicronovaError as error:
            log.warning(
                "guest %s: the interface %s could not be unplugged after a failure: %s", uuid, plugged.mac, error
            )
        raise


async def detach(connection: Connection, queues: EventQueues, clock: Clock, cloud: str, uuid: str, mac: str) -> None:
    """Unplug an interface. A running guest must release it, and is asked several times."""
    with queues.watch(uuid) as watch:
        for _ in range(ATTEMPTS):
            if not await connection.change(uuid, lambda conn: _unplug(conn, uuid, cloud, mac), "unplug it"):
                return
            until = clock.monotonic() + ATTEMPT_SECONDS
            while (left := until - clock.monotonic()) > 0:
                if not await connection.read(lambda conn: _is_plugged(conn, uuid, cloud, mac)):
                    return
                await watch.next(min(left, 2.0))
    raise DriverFailed("The guest does not release the interface.")


def _unplug(connection: Connect, uuid: str, cloud: str, mac: str) -> bool:
    """Unplug a device from definition and guest; return whether a running guest still has it."""
    domain = domains.require_ours(connection, uuid, cloud)
    defined = domains.interface_xml(domain, mac, live=False)
    if defined is not None:
        domain.detachDeviceFlags(defined, load().VIR_DOMAIN_AFFECT_CONFIG)
    if not domain.isActive():
        return False
    running = domains.interface_xml(domain, mac, live=True)
    if running is None:
        return False
    try:
        domain.detachDeviceFlags(running, load().VIR_DOMAIN_AFFECT_LIVE)
    except Exception as error:
        # It is being removed, or was removed.
        if not has_code(error, "VIR_ERR_DEVICE_MISSING", "VIR_ERR_OPERATION_FAILED", "VIR_ERR_OPERATION_INVALID"):
            raise
    return domains.interface_xml(domain, mac, live=True) is not None


def _is_plugged(connection: Connect, uuid: str, cloud: str, mac: str) -> bool:
    domain = domains.find_ours(connection, uuid, cloud)
    return domain is not None and bool(domain.isActive()) and domains.interface_xml(domain, mac, live=True) is not None


def _flags(*, live: bool) -> int:
    library = load()
    flags = int(library.VIR_DOMAIN_AFFECT_CONFIG)
    return flags | int(library.VIR_DOMAIN_AFFECT_LIVE) if live else flags
