"""Reading settings."""

from pathlib import Path

import pytest

from micronova.cli.maintain import show_settings
from micronova.conf.settings import SettingsError, load, options


def _load(tmp_path: Path, text: str) -> dict[str, tuple[tuple[str, ...], str, int | None]]:
    file = tmp_path / "micronova.toml"
    file.write_text(text)
    devices = load(file, {}).devices
    assert devices.enabled_mdev_types == ("nvidia-35", "i915-GVTg_V5_4")
    return {name: (each.device_addresses, each.mdev_class, each.max_instances) for name, each in devices.mdev.items()}


def test_each_type_of_mediated_devices_may_have_a_section(tmp_path: Path) -> None:
    """As in Nova; the order of the sections does not matter, and names of types have capital letters."""
    sections = """
        [mdev_i915-GVTg_V5_4]
        device_addresses = ["0000:86:00.0"]
        mdev_class = "CUSTOM_ENCODER"

        [devices]
        enabled_mdev_types = ["nvidia-35", "i915-GVTg_V5_4"]
        mdev = { nvidia-35 = { max_instances = 8 } }
    """
    assert _load(tmp_path, sections) == {
        "nvidia-35": ((), "VGPU", 8),
        "i915-GVTg_V5_4": (("0000:86:00.0",), "CUSTOM_ENCODER", None),
    }


@pytest.mark.parametrize("line", ["max_instances = 0", 'addresses = ["0000:86:00.0"]'])
def test_a_wrong_section_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(f'[devices]\nenabled_mdev_types = ["nvidia-35"]\n[mdev_nvidia-35]\n{line}\n')
    with pytest.raises(SettingsError, match=r"devices\.mdev"):
        load(file, {})


def test_settings_that_are_shown_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(
        'pci.alias = [{ name = "gpu", vendor_id = "10de", product_id = "1eb8" }]\n'
        '[devices]\nenabled_mdev_types = ["nvidia-35"]\n[mdev_nvidia-35]\ndevice_addresses = ["0000:84:00.0"]\n'
    )
    show_settings(file)
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(again, {}) == load(file, {})
    assert load(again, {}).pci.alias[0]["name"] == "gpu"


def test_settings_of_cpus_and_pages_are_where_nova_has_them(tmp_path: Path) -> None:
    """Earlier versions had them in the section of the driver, which still works."""
    pages = [{"node": 0, "size": 2048, "count": 64}]
    new = load(
        None, {}, compute={"cpu_shared_set": "0-1", "cpu_dedicated_set": "2-3"}, default={"reserved_huge_pages": pages}
    )
    moved = {"cpu_shared_set": "0-1", "cpu_dedicated_set": "2-3", "reserved_huge_pages": pages}
    assert load(None, {}, libvirt=moved) == new
    assert new.compute.cpu_dedicated_set == "2-3" and new.default.reserved_huge_pages == tuple(pages)
    assert load(None, {"MICRONOVA__LIBVIRT__CPU_SHARED_SET": "0"}).compute.cpu_shared_set == "0"
    file = tmp_path / "both.toml"
    file.write_text("reserved_huge_pages = []\n[libvirt]\nreserved_huge_pages = []\n")
    with pytest.raises(SettingsError, match=r"set default\.reserved_huge_pages only"):
        load(file, {})
    listed = {name for name, *_ in options()}
    assert "compute.cpu_shared_set" in listed and "libvirt.cpu_shared_set" not in listed
