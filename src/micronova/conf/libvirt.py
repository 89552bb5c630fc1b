"""The section `libvirt`: what an operator can decide about the libvirt driver. Times are seconds."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

VirtType = Literal["auto", "kvm", "qemu", "xen", "parallels"]
CpuMode = Literal["auto", "none", "custom", "host-model", "host-passthrough", "maximum"]
ImagesType = Literal["qcow2", "raw"]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class LibvirtSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The libvirt driver."""

    connection_uri: Annotated[str, _doc("A libvirt that runs already; empty: a private libvirtd in state_path.")] = ""
    virt_type: Annotated[VirtType, _doc("auto: kvm where the CPU can (vmx, svm), else qemu.")] = "auto"
    instances_path: Annotated[str, _doc("Disks and cached images; empty: in state_path.")] = ""
    network_namespace: Annotated[
        str, _doc("Network namespace of the private libvirtd; empty: the one that the network agent uses.")
    ] = ""

    cpu_mode: Annotated[CpuMode, _doc("auto: host-model with kvm, else a plain model that today's systems run on.")] = (
        "auto"
    )
    cpu_models: Annotated[tuple[str, ...], _doc('With cpu_mode "custom": the first one that the host knows.')] = ()
    cpu_model_extra_flags: Annotated[tuple[str, ...], _doc('Features to add or take away: "aes", "+aes", "-vmx".')] = ()
    cpu_shared_set: Annotated[str, _doc('CPUs for guests that are not pinned, e.g. "2-7,^5"; empty: all.')] = ""
    cpu_dedicated_set: Annotated[str, _doc("CPUs that pinned guests get for themselves.")] = ""
    hw_machine_type: Annotated[str, _doc("pc or q35, or a version of them; empty: pc.")] = ""
    images_type: Annotated[ImagesType, _doc("Root disks: an overlay on the cached image, or a copy of it.")] = "qcow2"
    disk_cachemode: Annotated[
        str, _doc("none, writeback, writethrough, directsync or unsafe; empty: none where it works.")
    ] = ""
    wire: Annotated[
        bool, _doc("Whether guests' interfaces have a link; `up` takes it from them where nobody would wire them.")
    ] = True
    rng_dev_path: Annotated[str, _doc("Where guests' random numbers come from.")] = "/dev/urandom"
    force_config_drive: Annotated[bool, _doc("Whether every guest gets a config drive.")] = False
    vnc_enabled: Annotated[bool, _doc("Whether guests' screens are shown by VNC.")] = True
    vnc_server_listen: Annotated[
        str, _doc("Address of guests' VNC; empty: a Unix socket, or loopback with a libvirt that is not ours.")
    ] = ""
    spice_enabled: Annotated[bool, _doc("Whether guests' screens are shown by SPICE, too.")] = False
    wait_soft_reboot_seconds: Annotated[float, _doc("After so long a soft reboot becomes a hard one.")] = 120.0

    call_timeout: Annotated[float, _doc("A libvirt that takes longer for a simple call counts as hung.")] = 60.0
    remove_unused_base_images: Annotated[bool, _doc("Whether cached images that nobody uses go.")] = True
    remove_unused_original_minimum_age_seconds: Annotated[float, _doc("How long they stay.")] = 86_400.0
    image_cache_manager_interval: Annotated[float, _doc("Time between looks at the cache.")] = 2_400.0
    qemu_user: Annotated[str, _doc("Whom a private libvirtd runs guests as; empty: the packages' user.")] = ""
    qemu_group: Annotated[str, _doc("The guests' group; empty: the packages' group.")] = ""
