"""Whether the cells of hosts suit a request, for all kinds of hosts at once, against fitting one host."""

import random

import numpy as np
import pytest

from micronova.objects.fitting import fit
from micronova.objects.topology import CellRequest, HostCell, NodeTopology, TopologyRequest, TopologyUse
from micronova.scheduler.cell_columns import CellColumns, decides
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
