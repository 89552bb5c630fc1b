"""What an operator can decide about the libvirt driver."""

from typing import Literal

import msgspec

VirtType = Literal["auto", "kvm", "qemu", "xen", "parallels"]
CpuMode = Literal["auto", "none", "custom", "host-model", "host-passthrough", "maximum"]


class LibvirtSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The driver's section of the settings; names are Nova's where the meaning is the same. Times are seconds."""

    connection_uri: str = ""  # of a libvirt that runs already; empty: a private libvirtd under the state directory
    virt_type: VirtType = "auto"  # auto: kvm where the CPU can (vmx, svm), else qemu
    instances_path: str = ""  # disks and cached images; empty: in the state directory
    network_namespace: str = ""  # the private libvirtd runs in it; empty: in the machine's own

    cpu_mode: CpuMode = "auto"  # auto: host-model with kvm, else a plain model that today's systems run on
    cpu_models: tuple[str, ...] = ()  # with "custom"; the first one that the host knows
    cpu_model_extra_flags: tuple[str, ...] = ()  # "aes", "+aes", "-vmx"
    cpu_shared_set: str = ""  # host CPUs for guests that are not pinned, e.g. "2-7,^5"; empty: all
    cpu_dedicated_set: str = ""  # host CPUs that pinned guests get for themselves
    hw_machine_type: str = ""  # pc or q35, or a version of them; empty: pc
    images_type: Literal["qcow2", "raw"] = "qcow2"  # root disks: an overlay on the cached image, or a copy
    disk_cachemode: str = ""  # none, writeback, writethrough, directsync, unsafe; empty: none where it works
    rng_dev_path: str = "/dev/urandom"
    force_config_drive: bool = False
    vnc_enabled: bool = True
    vnc_server_listen: str = ""  # an address; empty: a Unix socket, or loopback with a libvirt that is not ours
    wait_soft_reboot_seconds: float = 120.0

    call_timeout: float = 60.0  # a libvirt that takes longer for a simple call counts as hung
    remove_unused_base_images: bool = True
    remove_unused_original_minimum_age_seconds: float = 86_400.0
    image_cache_manager_interval: float = 2_400.0
    qemu_user: str = ""  # whom the private libvirtd runs guests as; empty: the user that the packages made
    qemu_group: str = ""
