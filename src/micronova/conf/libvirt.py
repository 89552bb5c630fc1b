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
        Meta(
            description="URI of an existing libvirt, e.g. qemu:///system; empty: a private libvirtd in state_path. "
            "Set it if a libvirt of this machine should have the guests.",
            examples=["qemu:///system"],
        ),
    ] = ""
    virt_type: Annotated[
        VirtType,
        Meta(
            description="Virtualisation: auto is kvm if the CPU has it (vmx, svm), else qemu (emulation). Set it "
            "to qemu if KVM does not work on this machine."
        ),
    ] = "auto"
    instances_path: Annotated[
        str,
        Meta(
            description="Directory of guests' disks and cached images; empty: in state_path. Set it if guests have "
            "a disk of their own.",
            examples=["/srv/instances"],
        ),
    ] = ""
    network_namespace: Annotated[
        str,
        Meta(
            description="Network namespace that the private libvirtd runs in; empty: the network agent's. Set it "
            "if another program makes the network of guests.",
            examples=["guests"],
        ),
    ] = ""

    cpu_mode: Annotated[
        CpuMode,
        Meta(
            description="CPU of guests: auto is host-model with kvm, else a model that current systems run on. "
            "Change it if guests migrate between hosts with different CPUs, or need all features of "
            "the CPU."
        ),
    ] = "auto"
    cpu_models: Annotated[
        tuple[str, ...],
        Meta(
            description='Models of the CPU of guests, with cpu_mode "custom": the first one that the host knows is '
            "taken. Set it to the oldest model of your hosts.",
            examples=[["Skylake-Server", "Haswell"]],
        ),
    ] = ()
    cpu_model_extra_flags: Annotated[
        tuple[str, ...],
        Meta(
            description="Features of the CPU to add to the model or to take away from it. Set it if guests need a "
            "feature that the model lacks.",
            examples=[["+aes", "-vmx"]],
        ),
    ] = ()
    hw_machine_type: Annotated[
        str,
        Meta(
            description="Machine type of guests: pc, q35, or a version such as pc-q35-7.2; empty: pc, q35 for "
            "secure boot, virt on other architectures than x86. Set it if guests need another chipset.",
            examples=["q35"],
        ),
    ] = ""
    images_type: Annotated[
        ImagesType,
        Meta(
            description="Format of root disks: qcow2 is an overlay on the cached image, raw a copy of the cached "
            "image. Set it to raw if the disks of guests must not depend on a cached image.",
        ),
    ] = "qcow2"
    rescue_image_id: Annotated[
        str,
        Meta(
            description="Id of the image that servers are rescued with if the request names none; empty: each "
            "server's own image. The API reads it, so it is set there. Set it if images of servers are "
            "not fit to repair them.",
            examples=["6f70656e-7374-4163-8b00-6d6963726f6e"],
        ),
    ] = ""
    disk_cachemode: Annotated[
        str,
        Meta(
            description="Cache mode of disks: none, writeback, writethrough, directsync or unsafe; empty: none if "
            "the file system allows it. Change it if disks are slow and their content may be lost with "
            "the power.",
            examples=["writeback"],
        ),
    ] = ""
    interfaces_linked: Annotated[
        bool,
        Meta(
            description="Whether the interfaces of guests have a link. `up` switches this off if no network agent "
            "connects the guests. Set it to false if nothing connects the guests.",
        ),
    ] = True
    rng_dev_path: Annotated[
        str,
        Meta(
            description="Device that the random numbers of guests come from. Change it if the host has a hardware "
            "source of random numbers."
        ),
    ] = "/dev/urandom"
    force_config_drive: Annotated[
        bool,
        Meta(
            description="Whether every guest gets a config drive. Set it to true if guests cannot reach the "
            "metadata service."
        ),
    ] = False
    vnc_enabled: Annotated[
        bool,
        Meta(
            description="Whether the screens of guests are available by VNC. Set it to false if nobody needs the "
            "screens of guests."
        ),
    ] = True
    vnc_server_listen: Annotated[
        str,
        Meta(
            description="Address that guests' VNC servers listen on; empty: a Unix socket, or loopback with "
            "connection_uri. Set it if a console proxy on another machine connects to it.",
            examples=["192.0.2.17"],
        ),
    ] = ""
    spice_enabled: Annotated[
        bool,
        Meta(
            description="Whether the screens of guests are also available by SPICE. Set it to true if users have "
            "clients for SPICE."
        ),
    ] = False
    wait_soft_reboot_seconds: Annotated[
        float,
        Meta(
            description="Seconds after which a soft reboot that has not ended becomes a hard one. Raise it if "
            "guests take longer to stop their programs."
        ),
    ] = 120.0

    call_timeout: Annotated[
        float,
        Meta(
            description="Seconds after which a libvirt that does not answer a simple call counts as hung. Raise it "
            "if libvirt is slow and works."
        ),
    ] = 60.0
    remove_unused_base_images: Annotated[
        bool,
        Meta(
            description="Whether cached images that no guest uses are removed. Set it to false if images are "
            "downloaded slowly and the disk is large."
        ),
    ] = True
    remove_unused_original_minimum_age_seconds: Annotated[
        float,
        Meta(
            description="Seconds that a cached image must be unused before it is removed. Lower it if the disk is "
            "small."
        ),
    ] = 86_400.0
    image_cache_manager_interval: Annotated[
        float,
        Meta(description="Seconds between searches for unused images in the cache. Lower it if the disk is small."),
    ] = 2_400.0
    image_cache_max_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Percent of the file system of instances_path that the image cache may take. For a new "
            "image unused ones are removed; if that does not suffice, the build goes to another host. "
            "Lower it if guests need the space.",
        ),
    ] = 50
    qemu_user: Annotated[
        str,
        Meta(
            description="User that a private libvirtd probes QEMU as; empty: the user of the distribution's "
            "packages. Set it if the distribution has another user.",
            examples=["libvirt-qemu"],
        ),
    ] = ""
    qemu_group: Annotated[
        str,
        Meta(
            description="Group that a private libvirtd probes QEMU as; empty: the group of the distribution's "
            "packages. Set it if the distribution has another group.",
            examples=["kvm"],
        ),
    ] = ""
    security_driver: Annotated[
        Literal["", "selinux", "apparmor", "none"],
        Meta(
            description="What separates guests of a private libvirtd beside their users: selinux, apparmor or "
            "none; empty: SELinux or AppArmor, if the machine has one. Set it to none if a policy of "
            "the machine does not let guests start.",
            examples=["none"],
        ),
    ] = ""
    guest_uids: Annotated[
        str,
        Meta(
            description="User ids of guests, FIRST-LAST: each guest has another user id, and a cloud uses up to "
            "4096 ids. Change it if users or containers of this machine have such ids.",
        ),
    ] = "2013265920-2147483647"


class LibvirtSettings(LibvirtSectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the driver itself needs: its section, and what other sections say of the host."""

    cpu_shared_set: str = ""
    cpu_dedicated_set: str = ""
    reserved_huge_pages: tuple[dict[str, Any], ...] = ()
