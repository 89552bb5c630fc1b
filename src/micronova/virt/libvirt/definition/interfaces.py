"""The interfaces of a guest, from its ports.

QEMU's taps are created with the guest. The network agent connects them to their bridge once its firewall rules for them
are in force. So no frame passes before the rules, also after a restart, and the bridge need not exist first.
"""

import re
from collections.abc import Collection

from micronova.objects.errors import BuildAborted, BuildFailed, NotSupported
from micronova.objects.guest_properties import choices
from micronova.objects.network import VIF, tap_name
from micronova.virt.libvirt.definition.types import Interface
from micronova.virt.libvirt.host import is_qemu

MODELS = choices("hw_vif_model", unsupported=("igb", "lan9118", "spapr-vlan", "sriov", "vmxnet"))
_DEVICE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}\Z")
_MAC = re.compile(r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")


def interface(
    vif: VIF, *, model: str = "virtio", queues: int = 1, virt_type: str = "qemu", linked: bool = True
) -> Interface:
    """Return the interface for a port; raise an error with the reason if it cannot be plugged here."""
    if vif.vif_type in ("unbound", "binding_failed"):
        raise BuildFailed(f"The network service did not bind the port {vif.port_id} to this host.")
    if vif.vif_type != "bridge":
        raise NotSupported(
            f"The port {vif.port_id} is of the kind {vif.vif_type}; this host plugs into Linux bridges only."
        )
    if vif.vnic_type not in ("normal", "virtio-forwarder"):
        raise NotSupported(f"The port {vif.port_id} is of the kind {vif.vnic_type}; this host has no such devices.")
    bridge = str(vif.details.get("bridge_name") or "")
    device = tap_name(vif.port_id)
    if not _DEVICE.match(bridge) or not _DEVICE.match(device):
        raise BuildFailed(f"The network service names no usable bridge for the port {vif.port_id}.")
    mac = vif.mac_address.lower()
    if not _MAC.match(mac):
        raise BuildFailed(f"The port {vif.port_id} has no usable MAC address.")
    return Interface(
        mac=mac,
        device=device,
        bridge="" if is_qemu(virt_type) else bridge,
        model="" if virt_type == "parallels" else model,
        mtu=vif.mtu or None,
        queues=queues,
        linked=linked,
        script="vif-bridge" if virt_type == "xen" else "",
    )


def interfaces(
    vifs: Collection[VIF], *, model: str | None, queues: int = 1, virt_type: str = "qemu", linked: bool = True
) -> tuple[Interface, ...]:
    """Return all interfaces of a guest, in the order in which it sees them."""
    if model is not None and model not in MODELS:
        raise BuildAborted(f"hw_vif_model is {model!r}: it should be one of {', '.join(MODELS)}.")
    chosen = model or ("netfront" if virt_type == "xen" else "virtio")
    return tuple(interface(vif, model=chosen, queues=queues, virt_type=virt_type, linked=linked) for vif in vifs)
