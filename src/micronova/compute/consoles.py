"""The addresses of the consoles of a host's guests."""

from micronova.console.relay import ConsoleRelay
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.errors import Invalid
from micronova.virt.driver import Driver, SerialConsole, SpiceConsole, VncConsole, if_capable


async def find_console(
    host: str, driver: Driver, relay: ConsoleRelay, uuid: str, protocol: ConsoleProtocol
) -> ConsoleEndpoint:
    """Return the address of a guest's console; raise Invalid if the host offers no such console.

    Without a relay, a console that listens on every address is reached by the host's name.
    """
    if protocol == "vnc" and (vnc := if_capable(driver, VncConsole)) is not None:
        found = await vnc.get_vnc_console(uuid)
    elif protocol == "spice" and (spice := if_capable(driver, SpiceConsole)) is not None:
        found = await spice.get_spice_console(uuid)
    elif protocol == "serial" and (serial := if_capable(driver, SerialConsole)) is not None:
        found = await serial.get_serial_console(uuid)
    else:
        raise Invalid(f"Unavailable console type {protocol}: the host of instance {uuid} does not offer it.")
    offered = relay.offer(found)
    if offered.host in ("0.0.0.0", "::"):  # noqa: S104 - listened on, not connected to
        return ConsoleEndpoint(host=host, port=found.port)
    return offered
