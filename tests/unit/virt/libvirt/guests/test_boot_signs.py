"""What libvirt's figures tell about a guest that was started."""

from typing import Any

import pytest

from micronova.virt.libvirt.guests.boot_signs import BIOS_READS, UEFI_READS, read_sign


def figures(*, read: tuple[int, ...] = (512,), written: int = 0, sent: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"state.state": 1, "block.count": len(read), "net.count": 1, "net.0.tx.pkts": sent}
    for number, amount in enumerate(read):
        found |= {f"block.{number}.name": "vda", f"block.{number}.rd.bytes": amount, f"block.{number}.wr.bytes": 0}
    return found | {"block.0.wr.bytes": written}


def booted(*, uefi: bool = False, **numbers: Any) -> bool:
    sign = read_sign(figures(**numbers), uefi=uefi)
    assert sign is not None
    return sign.booted


def test_firmware_alone_is_not_a_boot() -> None:
    # As measured: a BIOS that starts a sector that hangs, with a config drive beside it; UEFI that finds no loader.
    assert not booted(read=(512, 2048))
    assert not booted(read=(82_432,), uefi=True)
    assert not booted(read=(9_728,), sent=40, uefi=True), "its firmware asks the network"


@pytest.mark.parametrize("life", [{"read": (BIOS_READS,)}, {"read": (512, BIOS_READS)}, {"written": 1}, {"sent": 1}])
def test_anything_else_is_one(life: dict[str, Any]) -> None:
    assert booted(**life)


@pytest.mark.parametrize("life", [{"read": (UEFI_READS,)}, {"written": 512}])
def test_uefi_does_more_by_itself(life: dict[str, Any]) -> None:
    assert booted(uefi=True, **life)
    assert not booted(read=(UEFI_READS - 1,), uefi=True)


def test_it_says_what_it_saw() -> None:
    sign = read_sign(figures(), uefi=False)
    assert sign is not None
    assert sign.seen == "read 512 bytes of its disks, wrote none, and sent nothing on its network"
    sign = read_sign(figures(read=(82_432,)), uefi=True)
    assert sign is not None and sign.seen.startswith("read 82432 bytes of its disks and wrote none, like UEFI")


def test_a_guest_that_cannot_be_measured_has_no_sign() -> None:
    assert read_sign({"state.state": 1}, uefi=False) is None
    assert read_sign({"state.state": 1, "block.count": 1, "block.0.name": "vda"}, uefi=False) is None
