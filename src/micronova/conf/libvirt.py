"""The section `libvirt`: what an operator can decide about the libvirt driver. Times are seconds."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

VirtType = Literal["auto", "kvm", "qemu", "xen", "parallels"]
CpuMode = Literal["auto", "none", "custom", "host-model", "host-passthrough", "maximum"]
ImagesType = Literal["qcow2", "raw"]


class LibvirtSectionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The libvirt driver."""

    connection_uri: Annotated[
        str,
        Meta(description="URI of an existing libvirt, e.g. qemu:///system; empty: a private libvirtd in state_path."),
    ] = ""
    virt_type: Annotated[
        VirtType, Meta(description="Virtualisation: auto is kvm if the CPU has it (vmx, svm), else qemu (emulation).")
    ] = "auto"
    instances_path: Annotated[
        str, Meta(description="Directory of guests' disks and cached images; empty: in state_path.")
    ] = ""
    network_namespace: Annotated[
        str, Meta(description="Network namespace that the private libvirtd runs in; empty: the network agent's.")
    ] = ""

    cpu_mode: Annotated[
        CpuMode,
        Meta(description="CPU of guests: auto is host-model with kvm, else a model that current systems run on."),
    ] = "auto"
    cpu_models: Annotated[
        tuple[str, ...], Meta(description='With cpu_mode "custom": the first one that the host knows.')
    ] = ()
    cpu_model_extra_flags: Annotated[
        tuple[str, ...], Meta(description='Features to add or take away: "aes", "+aes", "-vmx".')
    ] = ()
    hw_machine_type: Annotated[
        str,
        Meta(
            description="Machine type of guests: pc, q35 or a version of them; empty: pc, q35 for secure boot, virt on "
            "other architectures than x86."
        ),
    ] = ""
    images_type: Annotated[
        ImagesType, Meta(description="Format of root disks: qcow2 is an overlay on the cached image, raw a copy of it.")
    ] = "qcow2"
    rescue_image_id: Annotated[
        str,
        Meta(
            description="Id of the image that servers are rescued with if the request names none; empty: each server's "
            "own image. The API reads it, so it is set there."
        ),
    ] = ""
    disk_cachemode: Annotated[
        str,
        Meta(
            description="Cache mode of disks: none, writeback, writethrough, directsync or unsafe; "
            "empty: none if the file system allows it."
        ),
    ] = ""
    interfaces_linked: Annotated[
        bool,
        Meta(
            description="Whether the interfaces of guests have a link. `up` switches it off if no network agent "
            "connects them."
        ),
    ] = True
    rng_dev_path: Annotated[str, Meta(description="Device that the random numbers of guests come from.")] = (
        "/dev/urandom"
    )
    force_config_drive: Annotated[bool, Meta(description="Whether every guest gets a config drive.")] = False
    vnc_enabled: Annotated[bool, Meta(description="Whether the screens of guests are available by VNC.")] = True
    vnc_server_listen: Annotated[
        str,
        Meta(
            description="Address that guests' VNC servers listen on; empty: a Unix socket, or loopback with "
            "connection_uri."
        ),
    ] = ""
    spice_enabled: Annotated[bool, Meta(description="Whether the screens of guests are also available by SPICE.")] = (
        False
    )
    wait_soft_reboot_seconds: Annotated[
        float, Meta(description="Seconds after which a soft reboot that has not ended becomes a hard one.")
    ] = 120.0

    call_timeout: Annotated[
        float, Meta(description="Seconds after which a libvirt that does not answer a simple call counts as hung.")
    ] = 60.0
    remove_unused_base_images: Annotated[
        bool, Meta(description="Whether cached images that no guest uses are removed.")
    ] = True
    remove_unused_original_minimum_age_seconds: Annotated[
        float, Meta(description="Seconds that a cached image must be unused before it is removed.")
    ] = 86_400.0
    image_cache_manager_interval: Annotated[
        float, Meta(description="Seconds between searches for unused images in the cache.")
    ] = 2_400.0
    image_cache_max_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Percent of its file system that the image cache may take. For a new image unused ones are "
            "removed; if that does not suffice, the build goes to another host.",
        ),
    ] = 50
    qemu_user: Annotated[
        str,
        Meta(
            description="User that a private libvirtd probes QEMU as; empty: the user of the distribution's packages."
        ),
    ] = ""
    qemu_group: Annotated[
        str,
        Meta(
            description="Group that a private libvirtd probes QEMU as; empty: the group of the distribution's packages."
        ),
    ] = ""
    security_driver: Annotated[
        Literal["", "selinux", "apparmor", "none"],
        Meta(
            description="What separates guests of a private libvirtd beside their users; empty: SELinux or "
            "AppArmor, if the "
            "machine has one. Set it to none if a policy of the machine does not let guests start."
        ),
    ] = ""
    guest_uids: Annotated[
        str,
        Meta(
            description="User ids of guests, FIRST-LAST: each guest runs as a user of its own, and a cloud uses up "
            "to 4096 of "
            "them. Change it if users or containers of this machine have such ids."
        ),
    ] = "2013265920-2147483647"


class LibvirtSettings(LibvirtSectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the driver itself needs: its section, and what other sections say of the host."""

    cpu_shared_set: str = ""
    cpu_dedicated_set: str = ""
    reserved_huge_pages: tuple[dict[str, Any], ...] = ()
