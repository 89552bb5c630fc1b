"""The addresses of the consoles of a host's guests."""

from micronova.console.relay import ConsoleRelay
from micronova.objects.console import ConsoleEndpoint, ConsoleProtocol
from micronova.objects.errors import Invalid, NotSupported
from micronova.virt.driver import Driver, SerialConsole, SpiceConsole, VncConsole


async def find_console(
    host: str, driver: Driver, relay: ConsoleRelay, uuid: str, protocol: ConsoleProtocol
) -> ConsoleEndpoint:
    """Return the address of a guest's console; raise NotSupported or Invalid if the host offers no such console.

    Without a relay, a console that listens on every address is reached by the host's name.
    """
    if protocol == "vnc" and isinstance(driver, VncConsole):
        _check(driver, "vnc_console", "VNC")
        found = await driver.get_vnc_console(uuid)
    elif protocol == "spice" and isinstance(driver, SpiceConsole):
        _check(driver, "spice_console", "SPICE")
        found = await driver.get_spice_console(uuid)
    elif protocol == "serial" and isinstance(driver, SerialConsole):
        _check(driver, "serial_console", "serial")
        found = await driver.get_serial_console(uuid)
    else:
        raise NotSupported(f"The hypervisor of instance {uuid} has no {protocol} consoles.")
    offered = relay.offer(found)
    if offered.host in ("0.0.0.0", "::"):  # noqa: S104 - listened on, not connected to
        return ConsoleEndpoint(host=host, port=found.port)
    return offered


def _check(driver: Driver, capability: str, word: str) -> None:
    if capability not in driver.capabilities():
        raise Invalid(f"Unavailable console type: {word} consoles are switched off on the instance's host.")
