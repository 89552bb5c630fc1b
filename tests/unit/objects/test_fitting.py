"""Fitting instances onto hosts. `make nova-numa` compares the same with Nova; here is what holds in any case."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.objects.fitting import fit, given_back, lacking, taken, total_use
from micronova.objects.topology import (
    NOTHING_USED,
    Assignment,
    CellRequest,
    CellUse,
    DeviceRequest,
    HostCell,
    MemoryPages,
    NodeTopology,
    PciDevice,
    TopologyRequest,
    TopologyUse,
    decode_topology,
    decode_use,
    encode,
)
from tests.nova_numa.cases import fit_case

PAGES = (MemoryPages(size_kib=4, total=393216), MemoryPages(size_kib=2048, total=256))


def cell(id: int, *dedicated: int, threads: int = 2, **changes: object) -> HostCell:
    first = id * 8
    siblings = tuple(tuple(range(first + n, first + n + threads)) for n in range(0, 8, threads))
    known: dict[str, object] = {"memory_mb": 2048, "siblings": siblings, "pages": PAGES, "socket": id}
    shared = tuple(cpu for cpu in range(first, first + 8) if cpu not in dedicated)
    return HostCell(id=id, dedicated=dedicated, shared=shared, **(known | changes))  # type: ignore[arg-type]


def pinned(count: int, **changes: object) -> TopologyRequest:
    guest = CellRequest(id=0, memory_mb=512, pinned=tuple(range(count)))
    known: dict[str, object] = {"cells": (guest,), "is_pinned": True, "has_shared": False}
    return TopologyRequest(**(known | changes))  # type: ignore[arg-type]


def place(topology: NodeTopology, request: TopologyRequest, use: TopologyUse = NOTHING_USED) -> Assignment:
    found = fit(topology, use, request)
    assert found is not None
    return found


TWO = NodeTopology(cells=(cell(0, 2, 3, 4, 5), cell(1, 8, 9, 10, 11, 12, 13)))


def test_dedicated_cpus_come_core_by_core_from_the_freer_cell() -> None:
    found = place(TWO, pinned(4))
    assert found.cells[0].host == 1 and found.cells[0].pins == {0: 8, 1: 9, 2: 10, 3: 11}
    use = taken(NOTHING_USED, found, TWO)
    assert use.cells[1] == CellUse(memory_mb=512, pinned=(8, 9, 10, 11), pages={4: 131072})
    assert place(TWO, pinned(4), use).cells[0].host == 0
    assert fit(TWO, use, pinned(5)) is None


def test_the_emulator_gets_a_cpu_of_the_first_cell() -> None:
    found = place(TWO, pinned(4, isolates_emulator=True))
    assert found.emulator == (12,) and found.pinned == 5
    assert fit(TWO, NOTHING_USED, pinned(6, isolates_emulator=True)) is None


@pytest.mark.parametrize(
    ("policy", "threads", "fits"),
    [("isolate", 1, True), ("isolate", 2, False), ("require", 1, False), ("require", 2, True), ("prefer", 1, True)],
)
def test_thread_policies(policy: str, threads: int, fits: bool) -> None:
    host = NodeTopology(cells=(cell(0, 0, 1, 2, 3, threads=threads),))
    assert (fit(host, NOTHING_USED, pinned(2, thread_policy=policy)) is not None) is fits


def test_pages() -> None:
    host = NodeTopology(cells=(cell(0),))

    def asked(size: int | str) -> TopologyRequest:
        guest = CellRequest(id=0, memory_mb=512, shared=(0, 1))
        return TopologyRequest(cells=(guest,), page_size=size)

    assert place(host, asked("large")).cells[0].page_kib == 2048
    assert place(host, asked("any")).cells[0].page_kib == 2048
    assert place(host, asked("small")).cells[0].page_kib == 4
    assert fit(host, NOTHING_USED, asked(1048576)) is None
    full = taken(NOTHING_USED, place(host, asked(2048)), host)
    assert full.cells[0].pages == {2048: 256}
    assert fit(host, full, asked("large")) is None and place(host, asked("any"), full).cells[0].page_kib == 4


def test_each_cell_of_the_guest_gets_its_own_of_the_host() -> None:
    cells = tuple(CellRequest(id=n, memory_mb=512, pinned=(2 * n, 2 * n + 1)) for n in range(2))
    found = place(TWO, pinned(0, cells=cells))
    assert [each.host for each in found.cells] == [0, 1]
    three = (*cells, CellRequest(id=2, memory_mb=512, pinned=(4, 5)))
    assert fit(TWO, NOTHING_USED, pinned(0, cells=three)) is None


def test_many_cells_that_do_not_fit_are_refused_at_once() -> None:
    """Trying all ways would take longer than the universe is old."""
    host = NodeTopology(cells=tuple(cell(n, memory_mb=2048 if n < 15 else 256) for n in range(32)))
    guest = tuple(CellRequest(id=n, memory_mb=1024, shared=(n,)) for n in range(16))
    assert fit(host, NOTHING_USED, TopologyRequest(cells=guest)) is None


def device(slot: int, node: int | None, **changes: object) -> PciDevice:
    known: dict[str, object] = {"vendor_id": "8086", "product_id": "1572", "numa_node": node}
    return PciDevice(address=f"0000:{slot:02x}:00.0", **(known | changes))  # type: ignore[arg-type]


def wanting(policy: str, count: int = 1, **spec: str) -> DeviceRequest:
    specs = ({"vendor_id": "8086"} | spec,)
    return DeviceRequest(alias="a", count=count, specs=specs, policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "node", "fits"),
    [
        ("required", 0, True),
        ("required", 1, False),
        ("required", None, False),
        ("legacy", 1, False),
        ("legacy", None, True),
        ("preferred", 1, True),
        ("socket", 1, False),
        ("socket", 2, True),
    ],
)
def test_where_devices_may_be(policy: str, node: int | None, fits: bool) -> None:
    cells = (cell(0, 0, 1), cell(1), cell(2, socket=0))  # only the first has dedicated CPUs
    host = NodeTopology(cells=cells, devices=(device(1, node),))
    assert (fit(host, NOTHING_USED, pinned(2, devices=(wanting(policy),))) is not None) is fits


def test_near_devices_are_preferred_and_cells_with_devices_come_first() -> None:
    host = NodeTopology(cells=TWO.cells, devices=(device(1, 1), device(2, 0), device(3, 0)))
    found = place(host, pinned(2, devices=(wanting("preferred", 2),)))
    assert found.cells[0].host == 0 and [each.address[5:7] for each in found.devices] == ["02", "03"]
    assert place(host, pinned(2)).cells[0].host == 1  # fewer devices than the other
    use = taken(NOTHING_USED, found, host)
    assert use.devices == ("0000:02:00.0", "0000:03:00.0")
    assert fit(host, use, TopologyRequest(devices=(wanting("legacy", 2),))) is None


def test_a_function_and_its_virtual_functions_exclude_each_other() -> None:
    physical = device(1, None, dev_type="type-PF")
    virtual = [device(n, None, dev_type="type-VF", parent=physical.address) for n in (2, 3)]
    host = NodeTopology(devices=(physical, *virtual))
    some, whole = wanting("legacy"), wanting("legacy", dev_type="type-PF")
    assert place(host, TopologyRequest(devices=(some,))).devices[0].address == virtual[0].address
    one = taken(NOTHING_USED, place(host, TopologyRequest(devices=(some,))), host)
    assert fit(host, one, TopologyRequest(devices=(whole,))) is None
    assert fit(host, one, TopologyRequest(devices=(some,))) is not None
    all_ = taken(NOTHING_USED, place(host, TopologyRequest(devices=(whole,))), host)
    assert fit(host, all_, TopologyRequest(devices=(some,))) is None
    assert fit(host, NOTHING_USED, TopologyRequest(devices=(some, whole))) is None


def test_a_virtual_function_that_is_not_listed_keeps_its_physical_function() -> None:
    """Such as after a boot, before the virtual functions are made."""
    physical = device(1, None, dev_type="type-PF")
    virtual = device(2, None, dev_type="type-VF", parent=physical.address)
    host, later = NodeTopology(devices=(physical, virtual)), NodeTopology(devices=(physical,))
    held = place(host, TopologyRequest(devices=(wanting("legacy"),)))
    use = taken(NOTHING_USED, held, host)
    whole = TopologyRequest(devices=(wanting("legacy", dev_type="type-PF"),))
    assert fit(later, use, whole) is None
    assert fit(later, decode_use(encode(total_use(later, {"i": held}))), whole) is None
    assert given_back(use, held, later) == NOTHING_USED


def test_a_later_request_gets_what_only_it_can_use() -> None:
    host = NodeTopology(devices=(device(1, None, product_id="154c"), device(2, None)))
    requests = (wanting("legacy"), wanting("legacy", product_id="154c"))
    assert [each.address[5:7] for each in place(host, TopologyRequest(devices=requests)).devices] == ["02", "01"]


def test_what_a_host_has_lost() -> None:
    use = taken(NOTHING_USED, place(TWO, pinned(4)), TWO)
    assert lacking(TWO, use) == []
    assert lacking(NodeTopology(cells=TWO.cells[:1]), use) == ["NUMA node 1 is gone, of which instances hold 512 MB."]
    fewer = NodeTopology(cells=(cell(1, 8, 9),))
    assert lacking(fewer, use) == ["NUMA node 1 no longer has the dedicated CPUs 10, 11."]
    devices = TopologyUse(devices=("0000:01:00.0",))
    assert lacking(TWO, devices) == ["The PCI device 0000:01:00.0 is gone."]
    pages = TopologyUse(cells={0: CellUse(pages={2048: 300})})
    assert lacking(TWO, pages) == ["NUMA node 0 has 256 pages of 2048 KiB; instances hold 300."]


@given(st.integers(0, 1 << 32))
def test_whatever_fits_is_there_and_belongs_to_nobody_else(seed: int) -> None:
    case = fit_case(random.Random(seed))
    topology, use, request = case["topology"], case["use"], case["asked"]
    found = fit(topology, use, request)
    if found is None:
        return
    cells = {each.id: each for each in topology.cells}
    assert len({each.host for each in found.cells}) == len(request.cells)
    cpus = [cpu for each in found.cells for cpu in each.pins.values()] + list(found.emulator)
    assert len(set(cpus)) == len(cpus) == sum(len(each.pinned) for each in request.cells) + request.isolates_emulator
    for wanted, each in zip(request.cells, found.cells, strict=True):
        free = set(cells[each.host].dedicated) - set(use.cells[each.host].pinned)
        assert set(each.pins) == set(wanted.pinned) and set(each.pins.values()) <= free
    held = {each.address for each in found.devices}
    assert len(held) == sum(each.count for each in request.devices)
    assert held <= {each.address for each in topology.devices} - set(use.devices)
    after = taken(use, found, topology)
    for id, now in after.cells.items():
        for pages in cells[id].pages:
            if request.page_size is not None:
                assert now.pages.get(pages.size_kib, 0) <= pages.total - pages.reserved
    before = given_back(after, found, topology)
    assert before.devices == use.devices
    for id, was in use.cells.items():
        assert before.cells.get(id, CellUse()) == was


@given(st.integers(0, 1 << 32))
def test_stored_texts_are_read_as_they_were(seed: int) -> None:
    case = fit_case(random.Random(seed))
    assert decode_topology(encode(case["topology"])) == case["topology"]
    assert decode_use(encode(case["use"])) == case["use"]
    found = fit(case["topology"], NOTHING_USED, case["asked"])
    if found is not None:
        assert total_use(case["topology"], {"one": found}) == taken(NOTHING_USED, found, case["topology"])
