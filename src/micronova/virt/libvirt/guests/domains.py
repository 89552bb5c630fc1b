"""Reading and changing guests through libvirt. Every function here blocks."""

from dataclasses import dataclass
from typing import Final

from micronova.objects import power_state
from micronova.objects.errors import Conflict, InstanceNotFound
from micronova.virt.libvirt.client.binding import Connect, Domain
from micronova.virt.libvirt.client.library import has_code, load
from micronova.virt.libvirt.client.xmltree import Element, parse, unparse
from micronova.virt.libvirt.definition.guest_xml import NAMESPACE, owner_of
from micronova.virt.libvirt.definition.types import Owner

NO_LIMIT: Final = 9_007_199_254_740_991
"""VIR_DOMAIN_MEMORY_PARAM_UNLIMITED, which libvirt's binding does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainInfo:
    """A guest as libvirt knows it."""

    uuid: str
    owner: Owner | None  # None: it was not made by this driver, or it is a copy of another guest's definition
    power: int
    active: bool
    vcpus: int = 0
    memory_mb: int = 0


def find(connection: Connect, uuid: str) -> Domain | None:
    """Return a guest of any owner, or None."""
    try:
        return connection.lookupByUUIDString(uuid)
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN"):
            return None
        raise


def find_ours(connection: Connect, uuid: str, cloud: str) -> Domain | None:
    """Return a guest of this cloud, or None; other guests are ignored."""
    domain = find(connection, uuid)
    if domain is None:
        return None
    owner = _owner(domain)
    return domain if owner is not None and owner.cloud == cloud else None


def require_ours(connection: Connect, uuid: str, cloud: str) -> Domain:
    """Return a guest of this cloud; raise InstanceNotFound if there is none."""
    domain = find_ours(connection, uuid, cloud)
    if domain is None:
        raise no_guest(uuid)
    return domain


def no_guest(uuid: str) -> InstanceNotFound:
    """Return the error for a guest that this host does not have."""
    return InstanceNotFound(f"There is no guest {uuid} on this host.")


def describe(connection: Connect, uuid: str) -> DomainInfo | None:
    """Return what libvirt knows about one guest, or None."""
    domain = find(connection, uuid)
    return None if domain is None else _info(domain)


def describe_all(connection: Connect) -> list[DomainInfo]:
    """Return what libvirt knows about all guests of any owner."""
    found = (_info(domain) for domain in connection.listAllDomains(0))
    return [info for info in found if info is not None]


def define(connection: Connect, xml: str) -> None:
    """Define a guest, or replace its definition."""
    library = load()
    connection.defineXMLFlags(xml, getattr(library, "VIR_DOMAIN_DEFINE_VALIDATE", 0))


def start(domain: Domain) -> None:
    """Start a guest that does not run, with its CPUs paused; saved memory is restored."""
    domain.createWithFlags(load().VIR_DOMAIN_START_PAUSED)


def limit_memory(domain: Domain, megabytes: int | None) -> bool:
    """Limit the memory of a guest's process, or lift the limit; return False if its libvirt has no control groups."""
    library = load()
    limit = NO_LIMIT if megabytes is None else megabytes * 1024
    try:
        domain.setMemoryParameters({library.VIR_DOMAIN_MEMORY_HARD_LIMIT: limit}, library.VIR_DOMAIN_AFFECT_LIVE)
    except Exception as error:
        if not has_code(error, "VIR_ERR_OPERATION_INVALID", "VIR_ERR_NO_SUPPORT"):
            raise
        return False
    return True


def pause(domain: Domain) -> None:
    """Stop a guest's CPUs."""
    domain.suspend()


def resume(domain: Domain) -> None:
    """Let the CPUs of a paused guest run again."""
    domain.resume()


def inject_nmi(domain: Domain) -> None:
    """Send a guest a non-maskable interrupt."""
    try:
        domain.injectNMI(0)
    except Exception as error:
        if has_code(error, "VIR_ERR_OPERATION_INVALID"):
            raise Conflict("The guest does not run: it cannot dump its memory.") from error
        raise


def power_off(domain: Domain, *, discard_memory: bool = True) -> None:
    """Stop a guest at once, if it runs, and discard its saved memory unless told otherwise."""
    try:
        if domain.isActive():
            domain.destroyFlags(0)
    except Exception as error:
        if not has_code(error, "VIR_ERR_OPERATION_INVALID", "VIR_ERR_NO_DOMAIN"):  # it has just stopped
            raise
    if discard_memory and domain.isPersistent() and domain.hasManagedSaveImage(0):
        domain.managedSaveRemove(0)


def save(domain: Domain) -> None:
    """Save a guest's memory to disk; it runs when it is restored, even if it is paused now."""
    # A definition with a limit is saved with it, and then lets the restored guest lock that much, which may be refused.
    limit_memory(domain, None)
    domain.managedSave(load().VIR_DOMAIN_SAVE_RUNNING)


def remove(domain: Domain) -> None:
    """Stop a guest and remove its definition with everything that libvirt keeps for it."""
    library = load()
    try:
        power_off(domain, discard_memory=False)
        if domain.isPersistent():
            flags = library.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | library.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            flags |= library.VIR_DOMAIN_UNDEFINE_NVRAM | library.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
            domain.undefineFlags(flags)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_DOMAIN"):
            raise


def interface_xml(domain: Domain, mac: str, *, live: bool) -> str | None:
    """Return the XML of an interface by its MAC address, from the running guest or from its definition."""
    library = load()
    flags = 0 if live else library.VIR_DOMAIN_XML_INACTIVE
    for found in parse(domain.XMLDesc(flags)).iterfind("./devices/interface"):
        address = found.find("mac")
        if address is not None and address.get("address", "").lower() == mac.lower():
            return unparse(found)
    return None


def volume_xml(domain: Domain, name: str, *, live: bool) -> str | None:
    """Return the XML of a volume, by its name where it is served, from the running guest or from its definition."""
    found = _volume(domain, name, live=live)
    return None if found is None else unparse(found)


def volume_target(domain: Domain, name: str) -> str | None:
    """Return the name of a volume in a running guest; None if the guest does not have it."""
    found = _volume(domain, name, live=True)
    target = None if found is None else found.find("target")
    return None if target is None else target.get("dev")


def disk_targets(domain: Domain) -> set[str]:
    """Return the names of all disks of a guest, as it runs and as it is defined."""
    flags = (0, load().VIR_DOMAIN_XML_INACTIVE)
    return {
        target.get("dev", "")
        for each in flags
        for target in parse(domain.XMLDesc(each)).iterfind("./devices/disk/target")
    }


def _volume(domain: Domain, name: str, *, live: bool) -> Element | None:
    flags = 0 if live else load().VIR_DOMAIN_XML_INACTIVE
    for found in parse(domain.XMLDesc(flags)).iterfind("./devices/disk"):
        source = found.find("source")
        if source is not None and source.get("protocol") and source.get("name") == name:
            return found
    return None


def power_of(state: int, *, saved: bool) -> int:
    """Return the power state for a state of libvirt's."""
    library = load()
    if state == library.VIR_DOMAIN_PAUSED:
        return power_state.PAUSED
    if state == library.VIR_DOMAIN_CRASHED:
        return power_state.CRASHED
    if state == library.VIR_DOMAIN_PMSUSPENDED:
        return power_state.SUSPENDED
    if state == library.VIR_DOMAIN_SHUTOFF:
        # libvirt keeps the reason until the next start, so by it a crashed guest would stay CRASHED after a stop.
        return power_state.SUSPENDED if saved else power_state.SHUTDOWN
    # Also while it shuts down: it runs until it has stopped.
    return power_state.RUNNING


def _info(domain: Domain) -> DomainInfo | None:
    library = load()
    try:
        state, _ = domain.state(0)
        off = state == library.VIR_DOMAIN_SHUTOFF
        numbers = domain.info()
        saved = off and bool(domain.hasManagedSaveImage(0))
        return DomainInfo(
            uuid=domain.UUIDString(),
            owner=_owner(domain),
            power=power_of(state, saved=saved),
            active=not off,
            vcpus=int(numbers[3]),
            memory_mb=int(numbers[1]) // 1024,
        )
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN"):  # it was removed in the meantime
            return None
        raise


def _owner(domain: Domain) -> Owner | None:
    library = load()
    try:
        owner = owner_of(domain.metadata(library.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0))
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN_METADATA"):
            return None
        raise
    # A definition that was copied by hand still names the guest that it was copied from.
    return owner if owner is not None and owner.uuid == domain.UUIDString() else None
