"""The console log of a simulated guest."""

from micronova.objects import power_state
from micronova.virt.fake.guests import FakeGuest

_RESET = "\x1bc\x1b[?7l\x1b[2J"  # as firmware sends to a terminal; a real serial port has carriage returns, too
_FIRMWARE = "Booting from Hard Disk..."
_INTERRUPT = "[   42.000000] Uhhuh. NMI received for unknown reason 30 on CPU 0."


def console_text(guest: FakeGuest) -> str:
    """Return the console log of a guest, with all its boots."""
    if not guest.boots:
        return ""
    lines: list[str] = []
    for boot in range(1, guest.boots + 1):
        hung = boot in guest.hung
        lines += [_FIRMWARE] if hung else _boot(guest, boot)
        if boot == guest.boots:
            lines += [_INTERRUPT] * guest.interrupts
        if boot < guest.boots and not hung:
            lines.append("[   61.204511] reboot: Restarting system")
    if guest.power_state == power_state.SHUTDOWN:
        lines.append("[   61.204511] reboot: Power down")
    elif guest.power_state == power_state.CRASHED:
        lines.append("[   61.204511] Kernel panic - not syncing: Fatal exception (simulated)")
    return _RESET + "\r\n".join(lines) + "\r\n"


def _boot(guest: FakeGuest, boot: int) -> list[str]:
    interfaces = [
        f"[    2.{101 + number:03d}000] eth{number}: address {address}"
        for number, interface in enumerate(guest.interfaces)
        for address in interface.addresses
    ]
    kernel = dict(guest.rescue_kernels).get(boot, "") if boot in dict(guest.rescues) else guest.kernel
    booted = [f"[    0.000000] Booted by kernel {kernel}"] if kernel else []
    return [
        "[    0.000000] Linux version 6.1.0-simulated (micronova) #1 SMP",
        *booted,
        f"[    0.000000] Command line: root=/dev/vda1 console=ttyS0 # boot {boot}",
        f"[    0.010000] Memory: {guest.memory_mb * 1024}K available",
        f"[    0.084000] smpboot: Total of {guest.vcpus} processors activated",
        f"[    0.220000] DMI: Micronova simulated guest, instance {guest.uuid}",
        *_disks(guest, boot),
        "[    1.730000] EXT4-fs (vda1): mounted filesystem with ordered data mode",
        *interfaces,
        f"[    2.480000] init: hostname set to {guest.hostname}",
        f"[    2.950000] init: server {guest.name} is ready",
        "",
        f"{guest.hostname} login: ",
    ]


def _disks(guest: FakeGuest, boot: int) -> list[str]:
    own = f"{guest.local_gb} GiB, image {guest.image or 'none'}"
    rescue = dict(guest.rescues).get(boot)
    if rescue is None:
        return [f"[    1.402000] virtio_blk vda: {own}"]
    return [f"[    1.402000] virtio_blk vda: image {rescue}", f"[    1.403000] virtio_blk vdb: {own}"]
