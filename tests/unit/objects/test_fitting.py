"""Fitting instances onto hosts. `make nova-numa` compares the same with Nova; here is what holds in any case."""

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.objects.bounded_search import StepMeter
from micronova.objects.device_fitting import choose_devices
from micronova.objects.fitting import fit, given_back, lacking, taken, total_use
from micronova.objects.topology import (
    NOTHING_USED,
    Assignment,
    CellAssignment,
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


@pytest.mark.parametrize("cells", [8, 16, 64])
@pytest.mark.parametrize("nodes", [2, 8])
@pytest.mark.parametrize("where", [None, 63, 0])
def test_a_device_at_the_wrong_place_is_found_out_at_once(cells: int, nodes: int, where: int | None) -> None:
    """Trying all orders of cells would take hours. A host may also say that it has many."""
    host = NodeTopology(cells=tuple(cell(n, memory_mb=2048 + n) for n in range(cells)), devices=(device(1, where),))
    # Only the second node of the guest fits onto the first cell; that has the only device.
    guest = tuple(CellRequest(id=n, memory_mb=1024 + n, shared=(n,)) for n in range(nodes))
    small = CellUse(memory_mb=2048 - 1025)
    use = TopologyUse(cells={0: small})
    begin = time.process_time()
    found = fit(host, use, TopologyRequest(cells=guest, devices=(wanting("required"),)))
    assert time.process_time() - begin < 0.5
    assert (found is not None) is (where is not None and where < cells)
    assert found is None or where in {each.host for each in found.cells}


def test_devices_of_several_requests_are_looked_for_within_a_bound() -> None:
    """Only the last node of the guest fits onto the cells of both devices."""
    host = NodeTopology(
        cells=tuple(cell(n, memory_mb=2048 if n > 1 else 512, pages=()) for n in range(64)),
        devices=(device(1, 0), device(2, 1, product_id="154c")),
    )
    guest = tuple(CellRequest(id=n, memory_mb=1024 - n if n < 7 else 256, shared=(n,)) for n in range(8))
    both = wanting("required", product_id="1572"), wanting("required", product_id="154c")
    begin = time.process_time()
    assert fit(host, NOTHING_USED, TopologyRequest(cells=guest, devices=both)) is None
    assert time.process_time() - begin < 2
    assert fit(host, NOTHING_USED, TopologyRequest(cells=guest, devices=both[:1])) is not None


def test_functions_that_belong_to_each_other_are_looked_at_within_a_bound() -> None:
    """A host may say anything: here each device is the physical function of another one."""
    devices = [device(n, None, dev_type="type-VF", parent=device((n + 1) % 40, None).address) for n in range(40)]
    begin = time.process_time()
    wanted = wanting("legacy", 15), wanting("legacy", 15)
    assert fit(NodeTopology(devices=tuple(devices)), NOTHING_USED, TopologyRequest(devices=wanted)) is None
    assert time.process_time() - begin < 2


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


def _random_case(chance: random.Random) -> tuple[NodeTopology, TopologyUse, TopologyRequest]:
    ids = range(chance.choice((2, 3, 4)))
    cells = [
        HostCell(
            id=id,
            memory_mb=chance.choice((512, 1024, 2048)),
            shared=tuple(range(4 * id, 4 * id + 4)),
            socket=id // 2 if chance.random() < 0.9 else None,
        )
        for id in ids
    ]
    devices = [
        device(n, chance.choice((None, *ids)), product_id=chance.choice(("a", "b")))
        for n in range(chance.randint(0, 5))
    ]
    wanted = [
        wanting(chance.choice(("required", "socket", "legacy")), chance.choice((1, 2)), product_id=product)
        for product in ("a", "b")[: chance.randint(1, 2)]
    ]
    guest = [
        CellRequest(id=n, memory_mb=chance.choice((256, 1024, 2048)), shared=(n,)) for n in range(chance.choice((2, 3)))
    ]
    use = TopologyUse(devices=tuple(each.address for each in devices if chance.random() < 0.2))
    return (
        NodeTopology(cells=tuple(cells), devices=tuple(devices)),
        use,
        TopologyRequest(cells=tuple(guest), devices=tuple(wanted)),
    )


@given(st.integers(0, 1 << 32))
def test_an_instance_fits_if_one_of_all_orders_of_cells_can_take_it(seed: int) -> None:
    topology, use, request = _random_case(random.Random(seed))

    def takes(host: HostCell, guest: CellRequest) -> bool:
        return fit(NodeTopology(cells=(host,)), use, TopologyRequest(cells=(guest,))) is not None

    ways = [
        way
        for way in itertools.permutations(topology.cells, len(request.cells))
        if all(map(takes, way, request.cells))
        and choose_devices(topology, use, request.devices, frozenset(each.id for each in way)) is not None
    ]
    found = fit(topology, use, request)
    assert (found is not None) is bool(ways)
    if found is not None:
        assert [each.host for each in found.cells] in [[each.id for each in way] for way in ways]


@given(st.integers(0, 1 << 32))
def test_stored_texts_are_read_as_they_were(seed: int) -> None:
    case = fit_case(random.Random(seed))
    assert decode_topology(encode(case["topology"])) == case["topology"]
    assert decode_use(encode(case["use"])) == case["use"]
    found = fit(case["topology"], NOTHING_USED, case["asked"])
    if found is not None:
        assert total_use(case["topology"], {"one": found}) == taken(NOTHING_USED, found, case["topology"])


def test_a_record_of_less_than_nothing_takes_nothing_from_others() -> None:
    """A claim may have been recorded before such requests were refused; the audit then counts it as nothing."""
    other = place(TWO, pinned(2))
    use = taken(NOTHING_USED, other, TWO)
    less = CellAssignment(id=0, host=other.cells[0].host, memory_mb=-2048)
    more = CellAssignment(id=1, host=1 - less.host, memory_mb=2560)
    odd = Assignment(cells=(less, more))
    after = taken(use, odd, TWO)
    assert after.cells[less.host] == use.cells[less.host]
    assert given_back(after, odd, TWO) == use
    assert total_use(TWO, {"odd": odd, "other": other}) == after


def test_devices_that_nobody_asks_for_take_no_steps() -> None:
    """Each device of the host was a step, so that requests were compared with few hosts that have many."""
    functions = tuple(
        PciDevice(address=f"0000:{n // 8:02x}:00.{n % 8}", vendor_id="8086", product_id="154c", numa_node=0)
        for n in range(512)
    )
    card = PciDevice(address="0000:f0:00.0", vendor_id="10de", product_id="1eb8", numa_node=0)
    cells = (HostCell(id=0, memory_mb=4096, dedicated=(0, 1, 2, 3)),)
    wanted = DeviceRequest(alias="gpu", count=1, specs=({"vendor_id": "10de"},), policy="required")
    cell = CellRequest(id=0, memory_mb=512, pinned=(0, 1))
    request = TopologyRequest(cells=(cell,), is_pinned=True, has_shared=False, devices=(wanted,))
    for devices, fits in (((*functions, card), True), (functions, False)):
        meter = StepMeter()
        found = fit(NodeTopology(cells=cells, devices=devices), NOTHING_USED, request, meter)
        assert (found is not None) is fits
        assert meter.steps < 10
