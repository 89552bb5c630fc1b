"""What is asked of libvirt about guests, and done to them. Everything here blocks and gets a connection."""

from dataclasses import dataclass
from typing import Any

from micronova.virt import power_state
from micronova.virt.libvirt.definition import Owner
from micronova.virt.libvirt.guest_xml import NAMESPACE, owner_of
from micronova.virt.libvirt.library import has_code, load
from micronova.virt.libvirt.xmltree import parse, unparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A guest as libvirt shows it."""

    uuid: str
    owner: Owner | None  # None: not made by any cloud of ours, or not for this uuid
    power: int
    active: bool
    vcpus: int = 0
    memory_mb: int = 0


def find(connection: Any, uuid: str) -> Any:
    """Find a guest, whoever made it; None if there is none."""
    try:
        return connection.lookupByUUIDString(uuid)
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN"):
            return None
        raise


def find_ours(connection: Any, uuid: str, cloud: str) -> Any:
    """Find a guest of this cloud; anybody else's is as good as not there."""
    domain = find(connection, uuid)
    if domain is None:
        return None
    owner = _owner(domain)
    return domain if owner is not None and owner.cloud == cloud else None


def look(connection: Any, uuid: str) -> Seen | None:
    """Describe one guest."""
    domain = find(connection, uuid)
    return None if domain is None else _seen(domain)


def look_at_all(connection: Any) -> list[Seen]:
    """Describe all guests, whoever made them."""
    found = (_seen(domain) for domain in connection.listAllDomains(0))
    return [seen for seen in found if seen is not None]


def define(connection: Any, xml: str) -> None:
    """Let libvirt know a guest, or know it anew."""
    library = load()
    connection.defineXMLFlags(xml, getattr(library, "VIR_DOMAIN_DEFINE_VALIDATE", 0))


def start(domain: Any, *, paused: bool) -> None:
    """Start a guest that does not run; a saved state is restored."""
    library = load()
    domain.createWithFlags(library.VIR_DOMAIN_START_PAUSED if paused else 0)


def pause(domain: Any) -> None:
    """Let a guest stand still."""
    domain.suspend()


def resume(domain: Any) -> None:
    """Let a guest that stands still go on."""
    domain.resume()


def switch_off(domain: Any, *, forget: bool = True) -> None:
    """Cut the power, if it is on; a saved state goes too, for it belongs to a run that is over."""
    try:
        if domain.isActive():
            domain.destroyFlags(0)
    except Exception as error:
        if not has_code(error, "VIR_ERR_OPERATION_INVALID", "VIR_ERR_NO_DOMAIN"):  # it has just stopped by itself
            raise
    if forget and domain.isPersistent() and domain.hasManagedSaveImage(0):
        domain.managedSaveRemove(0)


def save(domain: Any) -> None:
    """Put a guest's memory away; it will run when it is taken back, even if it stands still just now."""
    domain.managedSave(load().VIR_DOMAIN_SAVE_RUNNING)


def remove(domain: Any) -> None:
    """Cut the power and let libvirt forget the guest, with all that libvirt keeps of it."""
    library = load()
    try:
        switch_off(domain, forget=False)
        if domain.isPersistent():
            flags = library.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | library.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
            flags |= library.VIR_DOMAIN_UNDEFINE_NVRAM | library.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
            domain.undefineFlags(flags)
    except Exception as error:
        if not has_code(error, "VIR_ERR_NO_DOMAIN"):
            raise


def interface_xml(domain: Any, mac: str, *, live: bool) -> str | None:
    """Find one of a guest's interfaces by its address, as it runs or as it is defined."""
    library = load()
    flags = 0 if live else library.VIR_DOMAIN_XML_INACTIVE
    for found in parse(domain.XMLDesc(flags)).iterfind("./devices/interface"):
        address = found.find("mac")
        if address is not None and address.get("address", "").lower() == mac.lower():
            return unparse(found)
    return None


def power_of(state: int, *, saved: bool) -> int:
    """Translate libvirt's states."""
    library = load()
    if state == library.VIR_DOMAIN_PAUSED:
        return power_state.PAUSED
    if state == library.VIR_DOMAIN_CRASHED:
        return power_state.CRASHED
    if state == library.VIR_DOMAIN_PMSUSPENDED:
        return power_state.SUSPENDED
    if state == library.VIR_DOMAIN_SHUTOFF:
        # Why it is off is remembered until it runs again: by that it would still be crashed after it was stopped.
        return power_state.SUSPENDED if saved else power_state.SHUTDOWN
    # Also while it shuts itself down: it runs until it has.
    return power_state.RUNNING


def _seen(domain: Any) -> Seen | None:
    library = load()
    try:
        state, _ = domain.state(0)
        off = state == library.VIR_DOMAIN_SHUTOFF
        numbers = domain.info()
        saved = off and bool(domain.hasManagedSaveImage(0))
        return Seen(
            uuid=domain.UUIDString(),
            owner=_owner(domain),
            power=power_of(state, saved=saved),
            active=not off,
            vcpus=int(numbers[3]),
            memory_mb=int(numbers[1]) // 1024,
        )
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN"):  # gone while we looked
            return None
        raise


def _owner(domain: Any) -> Owner | None:
    library = load()
    try:
        owner = owner_of(domain.metadata(library.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE, 0))
    except Exception as error:
        if has_code(error, "VIR_ERR_NO_DOMAIN_METADATA"):
            return None
        raise
    # A definition that somebody copied by hand still names the guest that it was copied from.
    return owner if owner is not None and owner.uuid == domain.UUIDString() else None
