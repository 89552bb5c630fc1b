"""The disks and mediated devices of simulated guests, and what a resize changes.

Both are on the host of their guest. A disk moves with it; mediated devices are made anew.
"""

from typing import Final
from uuid import UUID, uuid5

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.volume import AttachedVolume
from micronova.placement import extra_specs
from micronova.virt.driver import GuestPlan
from micronova.virt.fake.guests import FakeDisk, FakeGuest, FakeMdev, FakeSize, FakeVolume

_MDEVS: Final = UUID("0e8a3d1f-7c26-4f0e-9a5b-6d6963726f6e")
"""Namespace of the uuids of mediated devices."""


def disks_of(plan: GuestPlan) -> tuple[FakeDisk, ...]:
    """Return the empty disks of a new guest."""
    return tuple(FakeDisk(name=name, size_gb=size) for name, size in _sizes(plan).items())


def local_gb(plan: GuestPlan) -> int:
    """Return what the disks of a guest take on its host."""
    return sum(_sizes(plan).values())


def volumes_of(plan: GuestPlan) -> tuple[FakeVolume, ...]:
    """Return the volumes of a guest."""
    return tuple(as_volume(each) for each in plan.volumes)


def as_volume(volume: AttachedVolume) -> FakeVolume:
    """Return a volume as a guest has it; raise Invalid for an encrypted one without its key."""
    if volume.connection.encrypted and not volume.secret:
        raise Invalid(f"Volume {volume.volume_id} is encrypted, and the order has no key for it.")
    return FakeVolume(
        volume_id=volume.volume_id,
        attachment_id=volume.attachment_id,
        device=volume.device_name,
        size=None if volume.size_gb is None else volume.size_gb << 30,
        root=volume.boot_index == 0,
        read_only=volume.read_only,
        tag=volume.tag,
        encrypted=volume.connection.encrypted,
    )


def mdevs_of(plan: GuestPlan) -> tuple[FakeMdev, ...]:
    """Return the mediated devices that are made for a guest."""
    assignment = plan.instance.assignment
    return tuple(
        FakeMdev(
            uuid=str(uuid5(_MDEVS, f"{plan.instance.uuid}/{plan.epoch}/{number}")),
            parent=each.parent,
            mdev_type=each.mdev_type,
        )
        for number, each in enumerate(() if assignment is None else assignment.mdevs)
    )


def booted(disks: tuple[FakeDisk, ...]) -> tuple[FakeDisk, ...]:
    """Return the disks after one more boot, which the operating system writes to the first of them."""
    if not disks:
        return ()
    return msgspec.structs.replace(disks[0], boots=disks[0].boots + 1), *disks[1:]


def written(disks: tuple[FakeDisk, ...], text: str) -> tuple[FakeDisk, ...]:
    """Return the disks with a text on the first of them."""
    if not disks:
        return ()
    return msgspec.structs.replace(disks[0], text=text), *disks[1:]


def encode_disks(disks: tuple[FakeDisk, ...]) -> bytes:
    """Return disks as the source sends them."""
    return msgspec.json.encode(disks)


def decode_disks(disks: bytes) -> tuple[FakeDisk, ...]:
    """Return the disks that the source has sent."""
    return msgspec.json.decode(disks, type=tuple[FakeDisk, ...])


class LiveState(msgspec.Struct, frozen=True):
    """What a source sends of a guest that runs: its disks, and where its memory and its processor are."""

    disks: tuple[FakeDisk, ...]
    power_state: int
    boots: int
    booted_at: float
    silent_for: float
    hung: tuple[int, ...]


def encode_state(guest: FakeGuest) -> bytes:
    """Return the state of a guest that was sent."""
    power = guest.power_state if guest.sent is None else guest.sent
    state = LiveState(guest.disks, power, guest.boots, guest.booted_at, guest.silent_for, guest.hung)
    return msgspec.json.encode(state)


def give_state(guest: FakeGuest, state: bytes) -> None:
    """Let a guest continue where the one that was sent has stopped."""
    sent = msgspec.json.decode(state, type=LiveState)
    guest.disks, guest.power_state = sent.disks, sent.power_state
    guest.boots, guest.booted_at, guest.silent_for, guest.hung = sent.boots, sent.booted_at, sent.silent_for, sent.hung


def size_of(guest: FakeGuest) -> FakeSize:
    """Return what a guest is now."""
    return FakeSize(
        epoch=guest.epoch,
        vcpus=guest.vcpus,
        memory_mb=guest.memory_mb,
        local_gb=guest.local_gb,
        claimed=guest.claimed,
        disks=guest.disks,
        assignment=guest.assignment,
        mdevs=guest.mdevs,
    )


def give_size(guest: FakeGuest, plan: GuestPlan) -> None:
    """Give a guest the flavor and the epoch of a plan; its disks grow."""
    flavor = plan.instance.flavor
    guest.epoch, guest.vcpus, guest.memory_mb = plan.epoch, flavor.vcpus, flavor.ram
    guest.local_gb = local_gb(plan)
    guest.claimed = extra_specs.node_resources(flavor, plan.instance.image)
    guest.assignment, guest.mdevs = plan.instance.assignment, mdevs_of(plan)
    known = {disk.name: disk for disk in guest.disks}
    guest.volumes = volumes_of(plan)
    guest.disks = tuple(
        msgspec.structs.replace(known[name], size_gb=size) if name in known else FakeDisk(name=name, size_gb=size)
        for name, size in _sizes(plan).items()
    )


def restore_size(guest: FakeGuest, plan: GuestPlan) -> None:
    """Make a guest what it was before it was resized, at the epoch of a plan; the disks' content is that of then."""
    if guest.previous is not None:
        before = guest.previous
        guest.vcpus, guest.memory_mb, guest.local_gb = before.vcpus, before.memory_mb, before.local_gb
        guest.claimed, guest.disks = before.claimed, before.disks
        guest.assignment, guest.mdevs = before.assignment, before.mdevs
        guest.previous = None
    guest.epoch = plan.epoch


def _sizes(plan: GuestPlan) -> dict[str, int]:
    """Return the local disks of a guest by name, in GiB.

    The root disk is there also without a size, unless a volume takes its place.
    """
    flavor = plan.instance.flavor
    from_volume = any(volume.boot_index == 0 for volume in plan.volumes)
    return {
        **({} if from_volume else {"root": flavor.disk}),
        **({"ephemeral": flavor.ephemeral} if flavor.ephemeral else {}),
        **({"swap": flavor.swap_gb} if flavor.swap else {}),
    }
