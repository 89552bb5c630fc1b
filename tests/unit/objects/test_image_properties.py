"""Properties of images by their newest names, in one spelling."""

from typing import Any

import pytest

from micronova.objects.image_properties import canonical_name, canonical_properties, is_off


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"architecture": "amd64"}, {"hw_architecture": "x86_64"}),
        (
            {"architecture": "i686", "hw_architecture": "AARCH64"},
            {"hw_architecture": "aarch64"},
        ),  # the newest name wins
        ({"architecture": "i686", "hw_architecture": None}, {"hw_architecture": "i686"}),
        ({"hypervisor_type": "XAPI", "vm_mode": "HV"}, {"img_hv_type": "xen", "hw_vm_mode": "hvm"}),
        ({"hw_vm_mode": "pv"}, {"hw_vm_mode": "xen"}),
        ({"os_type": "Windows", "vmware_ostype": "WS2025"}, {"os_type": "windows", "os_distro": "WS2025"}),
        ({"hw_vif_model": "VirtualE1000"}, {"hw_vif_model": "e1000"}),
        ({"vmware_adaptertype": "ide"}, {"hw_disk_bus": "ide"}),
        ({"vmware_adaptertype": "lsiLogicsas"}, {"hw_disk_bus": "scsi", "hw_scsi_model": "lsisas1068"}),
        ({"vmware_adaptertype": "ide", "hw_disk_bus": "virtio"}, {"hw_disk_bus": "virtio"}),
        ({"hw_boot_menu": "Yes", "hw_pmu": False}, {"hw_boot_menu": "True", "hw_pmu": "False"}),
        ({"hw_numa_nodes": "02", "hw_video_ram": 8}, {"hw_numa_nodes": "2", "hw_video_ram": "8"}),
        ({"hw_numa_nodes": "many"}, {"hw_numa_nodes": "many"}),  # of a server that is older than the check
        ({"own_colour": "Red"}, {"own_colour": "Red"}),
        ({"trait:CUSTOM_A": "required", "trait:CUSTOM_B": "forbidden"}, {"traits_required": "['CUSTOM_A']"}),
    ],
)
def test_canonical_properties(given: dict[str, Any], expected: dict[str, str]) -> None:
    assert canonical_properties(given) == expected


def test_what_asks_for_nothing() -> None:
    assert is_off("hw_boot_menu", "False") and is_off("hw_video_ram", "0") and is_off("os_distro", "")
    assert not is_off("hw_boot_menu", "True") and not is_off("os_distro", "False") and not is_off("os_distro", "0")


def test_the_newest_names() -> None:
    assert [canonical_name(name) for name in ("vmware_adaptertype", "vm_mode", "own")] == [
        "hw_disk_bus",
        "hw_vm_mode",
        "own",
    ]
