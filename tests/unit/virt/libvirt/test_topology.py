"""NUMA nodes and PCI devices of a host, read from libvirt's descriptions."""

from typing import Any

import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import Invalid
from micronova.objects.mediated_devices import parse_mdev_types
from micronova.objects.pci_devices import parse_device_specs
from micronova.objects.topology import MdevParent, MemoryPages, PciDevice
from micronova.virt.libvirt.client.node_devices import Mdev
from micronova.virt.libvirt.client.xmltree import parse
from micronova.virt.libvirt.host import parse_cells
from micronova.virt.libvirt.topology import host_cells, offered, parse_device, read_mdevs
from tests.unit.virt.libvirt.node_devices import NodeDevices
from tests.unit.virt.libvirt.world import CELLS

CAPABILITIES = """<capabilities><host><topology><cells num='1'><cell id='3'>
  <memory unit='KiB'>2097152</memory><pages unit='KiB' size='4'>500000</pages><pages unit='KiB' size='2048'>64</pages>
  <cpus num='2'><cpu id='4' socket_id='1' core_id='0' siblings='4-5'/>
  <cpu id='5' socket_id='1' core_id='0' siblings='4-5'/></cpus></cell></cells></topology></host></capabilities>"""
FUNCTION = """<device><name>pci_0000_5e_02_1</name><capability type='pci'>
  <domain>0</domain><bus>94</bus><slot>2</slot><function>1</function>
  <product id='0x154c'>VF</product><vendor id='0x8086'>Intel</vendor>
  <capability type='phys_function'><address domain='0x0000' bus='0x5e' slot='0x00' function='0x0'/></capability>
  <numa node='1'/></capability></device>"""
PHYSICAL = """<device><capability type='pci'><domain>0</domain><bus>94</bus><slot>0</slot><function>0</function>
  <product id='0x1572'/><vendor id='0x8086'/>
  <capability type='virt_functions' maxCount='64'>{}</capability></capability></device>"""


def test_cells() -> None:
    [cell] = parse_cells(parse(CAPABILITIES))
    assert (cell.id, cell.memory_mb, cell.cpus, cell.siblings, cell.socket) == (3, 2048, (4, 5), ((4, 5),), 1)
    [host] = host_cells([cell], LibvirtSettings())
    assert host.shared == (4, 5) and host.dedicated == () and host.socket == 1
    assert host.pages == (MemoryPages(size_kib=4, total=500000), MemoryPages(size_kib=2048, total=64))


def test_cpus_and_pages_that_guests_may_use() -> None:
    settings = LibvirtSettings(
        cpu_shared_set="0-1",
        cpu_dedicated_set="2-3,6",
        reserved_huge_pages=({"node": 1, "size": 2048, "count": 24},),
    )
    first, second = host_cells(CELLS, settings)
    assert (first.shared, first.dedicated, second.shared, second.dedicated) == ((0, 1), (2, 3), (), (6,))
    assert [each.reserved for each in first.pages + second.pages] == [0, 0, 0, 24]
    with pytest.raises(Invalid, match="reserved_huge_pages"):
        host_cells(CELLS, LibvirtSettings(reserved_huge_pages=({"node": 1},)))


def test_devices_that_are_divided() -> None:
    made = Mdev(uuid="4b20d080-1b54-4048-85b3-a6a62d165c01", parent="pci_0000_84_00_0", mdev_type="nvidia-35")
    host: Any = NodeDevices(4, made)
    types = parse_mdev_types(["nvidia-35"], {"nvidia-35": {"mdev_class": "CUSTOM_GPU"}})
    expected = MdevParent(name="pci_0000_84_00_0", mdev_type="nvidia-35", total=4, resource_class="CUSTOM_GPU")
    assert read_mdevs(host, types) == (expected,)
    assert read_mdevs(host, parse_mdev_types(["nvidia-99"], {})) == ()


def test_devices() -> None:
    virtual = PciDevice(
        address="0000:5e:02.1", vendor_id="8086", product_id="154c", dev_type="type-VF", numa_node=1,
        parent="0000:5e:00.0",
    )  # fmt: skip
    assert parse_device(parse(FUNCTION)) == virtual
    physical = parse_device(parse(PHYSICAL.format("<address domain='0' bus='0x5e' slot='2' function='1'/>")))
    assert physical is not None and (physical.dev_type, physical.numa_node) == ("type-PF", None)
    without = parse_device(parse(PHYSICAL.format("")))
    assert without is not None and without.dev_type == "type-PCI"
    assert parse_device(parse("<device><capability type='net'/></device>")) is None
    specs = parse_device_specs([{"vendor_id": "8086", "product_id": "154c"}])
    assert offered([None, physical, virtual], specs) == (virtual,)
    # The address of a physical function names its virtual ones, too.
    specs = parse_device_specs([{"address": "0000:5e:00.*"}])
    assert offered([None, virtual, physical], specs) == (physical, virtual)
    assert offered([virtual], ()) == ()
    # The first spec that names a device says whether it can be live migrated.
    specs = parse_device_specs([{"product_id": "154c", "live_migratable": "yes"}, {"live_migratable": "no"}])
    found = {each.dev_type: each.live_migratable for each in offered([virtual, physical], specs)}
    assert found == {"type-VF": True, "type-PF": False}
