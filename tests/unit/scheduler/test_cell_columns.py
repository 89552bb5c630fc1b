"""Whether the cells of hosts suit a request, for all kinds of hosts at once, against fitting one host."""

import random
import sys
from typing import Any

import numpy as np
import pytest

from micronova.objects.fitting import fit
from micronova.objects.topology import (
    MOST_CELLS,
    PAGE_SIZES,
    CellRequest,
    HostCell,
    MemoryPages,
    NodeTopology,
    TopologyRequest,
    TopologyUse,
    encode,
)
from micronova.scheduler.cell_columns import CellColumns, decides
from micronova.scheduler.topologies import Topologies
from tests.nova_numa.cases import fit_case


@pytest.mark.parametrize("seed", range(4))
def test_cells_suit_as_a_single_host_fits(seed: int) -> None:
    """Hosts whose cells do not suit never fit; where cells decide, the others do."""
    chance = random.Random(seed)
    cases = [fit_case(chance) for _ in range(150)]
    columns = CellColumns(4)
    for code, case in enumerate(cases):
        columns.set(code, case["topology"], case["use"])
    decided = 0
    for case in cases:
        request = case["asked"]
        if not request.cells:
            continue
        codes = np.array(chance.sample(range(len(cases)), chance.choice([1, 5, len(cases)])), np.intp)
        suit = columns.suit(request, codes).tolist()
        fits = [fit(cases[code]["topology"], cases[code]["use"], request) is not None for code in codes]
        decided += decides(request)
        for code, suits, expected in zip(codes, suit, fits, strict=True):
            assert suits == expected if decides(request) else suits or not expected, (cases[code], request)
    assert decided > 20


def test_a_code_that_gets_another_value_forgets_its_former_cells() -> None:
    cells = tuple(HostCell(id=number, memory_mb=1024, shared=(number,)) for number in range(3))
    nodes = tuple(CellRequest(id=number, memory_mb=512, shared=(number,)) for number in range(2))
    columns, code = CellColumns(1), np.array([0], np.intp)
    columns.set(0, NodeTopology(cells=cells), TopologyUse())
    assert columns.suit(TopologyRequest(cells=nodes), code).all()
    columns.set(0, NodeTopology(cells=cells[:1]), TopologyUse())
    assert columns.suit(TopologyRequest(cells=nodes[:1]), code).all()
    assert not columns.suit(TopologyRequest(cells=nodes), code).any()


def test_nodes_that_need_the_same_cell_do_not_fit() -> None:
    """Each of two nodes has a cell that suits, but it is the same one."""
    cells = (HostCell(id=0, memory_mb=4096, shared=(0, 1)), HostCell(id=1, memory_mb=512, shared=(2, 3)))
    columns, code = CellColumns(1), np.array([0], np.intp)
    columns.set(0, NodeTopology(cells=cells), TopologyUse())
    large = CellRequest(id=0, memory_mb=2048, shared=(0,))
    assert not columns.suit(TopologyRequest(cells=(large, CellRequest(id=1, memory_mb=1024, shared=(1,)))), code).any()
    assert columns.suit(TopologyRequest(cells=(large, CellRequest(id=1, memory_mb=256, shared=(1,)))), code).all()


def test_hosts_with_many_cells_suit_beside_others() -> None:
    columns = CellColumns(1)
    for code, count in enumerate([2, 12, 3, 64, 9]):
        cells = tuple(HostCell(id=number, memory_mb=1024, shared=(number,)) for number in range(count))
        columns.set(code, NodeTopology(cells=cells), TopologyUse())

    def suit(nodes: int, *codes: int) -> list[bool]:
        asked = tuple(CellRequest(id=number, memory_mb=512, shared=(number,)) for number in range(nodes))
        found: list[bool] = columns.suit(TopologyRequest(cells=asked), np.array(codes, np.intp)).tolist()
        return found

    assert suit(3, 0, 1, 2, 3, 4) == [False, True, True, True, True]
    assert suit(10, 4, 3, 2, 1, 0) == [False, True, False, True, False]
    columns.set(1, NodeTopology(cells=(HostCell(id=0, memory_mb=1024, shared=(0,)),)), TopologyUse())
    columns.set(
        0, NodeTopology(cells=tuple(HostCell(id=n, memory_mb=1024, shared=(n,)) for n in range(16))), TopologyUse()
    )
    columns.clear(3)
    assert suit(1, 0, 1, 3) == [True, True, False] and suit(10, 0, 1, 3) == [True, False, False]


def test_what_hosts_report_leaves_no_columns_behind() -> None:
    """A stolen host reports the largest topologies that are allowed, each time with other pages."""
    topologies = Topologies()

    def ordinary(number: int) -> str:
        cells = (HostCell(id=0, memory_mb=1000 + number, shared=(0,)), HostCell(id=1, memory_mb=1000, shared=(1,)))
        return encode(NodeTopology(cells=cells))

    for number in range(1000):
        topologies.take(ordinary(number), "")
    before, largest = topologies.nbytes, 0
    code: int | None = None
    for first in range(20):
        sizes = sorted(PAGE_SIZES)[first % 15 : first % 15 + 8]
        pages = tuple(MemoryPages(size_kib=size, total=1 + first) for size in sizes)
        cells = tuple(HostCell(id=number, memory_mb=1, pages=pages) for number in range(MOST_CELLS))
        former, code = code, topologies.take(encode(NodeTopology(cells=cells)), "")
        if former is not None:
            topologies.release(former)
        largest = max(largest, topologies.nbytes)
    assert code is not None and largest - before < 1 << 20
    topologies.release(code)
    assert topologies.nbytes <= before


def test_a_host_with_many_cells_costs_the_same_however_many_there_are() -> None:
    """Each was compared with all before it: 10,000 hosts took ten times as long as those with few cells."""

    def work(hosts: int) -> int:
        columns, lines = CellColumns(1), 0
        cells = tuple(HostCell(id=number, memory_mb=1024, shared=(number,)) for number in range(9))

        def count(frame: object, event: str, argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        for code in range(hosts):
            columns.set(code, NodeTopology(cells=cells), TopologyUse())
        sys.settrace(count)
        try:
            columns.set(hosts, NodeTopology(cells=cells), TopologyUse())
            columns.clear(0)
            columns.set(0, NodeTopology(cells=cells), TopologyUse())
        finally:
            sys.settrace(None)
        return lines

    assert work(1025) <= work(129)


def test_rows_of_hosts_with_many_cells_are_used_again() -> None:
    columns = CellColumns(1)
    cells = tuple(HostCell(id=number, memory_mb=1024, shared=(number,)) for number in range(12))
    for code in range(8):
        columns.set(code, NodeTopology(cells=cells[: 9 + code % 4]), TopologyUse())
    before = columns.nbytes
    for _ in range(3):
        for code in (2, 5, 7):
            columns.clear(code)
        for code in (7, 2, 5):
            columns.set(code, NodeTopology(cells=cells[: 9 + code % 4]), TopologyUse())
    assert columns.nbytes == before
    asked = tuple(CellRequest(id=number, memory_mb=512, shared=(number,)) for number in range(11))
    suits = columns.suit(TopologyRequest(cells=asked), np.arange(8)).tolist()
    assert suits == [False, False, True, True, False, False, True, True]
