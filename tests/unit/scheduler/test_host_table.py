"""The host table against a dict of hosts, whatever is done to both."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.objects.scheduling import HostState
from micronova.objects.topology import HostCell, NodeTopology, encode
from micronova.placement.model import MOST_UNITS
from micronova.scheduler.host_table import HostTable
from tests.unit.scheduler.factory import a_host, a_table

NODES = [f"n{number}" for number in range(6)]


@st.composite
def a_state(draw: st.DrawFn) -> HostState:
    classes = draw(st.lists(st.sampled_from(["VCPU", "MEMORY_MB", "CUSTOM_GOLD"]), unique=True, min_size=1))
    capacity = {name: draw(st.integers(0, 100)) for name in classes}
    node = draw(st.sampled_from(NODES))
    return a_host(
        draw(st.sampled_from(["h1", "h2", "h3"])),
        node=node,
        node_uuid=node,
        zone=draw(st.sampled_from(["z1", "z2"])),
        capacity=capacity,
        total=capacity,
        used={name: draw(st.integers(0, amount)) for name, amount in capacity.items()},
        max_unit=draw(st.sampled_from([{}, dict.fromkeys(classes, 8)])),
        allocation_ratio=draw(st.sampled_from([{}, dict.fromkeys(classes, 1.5)])),
        enabled=draw(st.booleans()),
        capabilities=draw(st.sampled_from([{}, {"gpu": "yes"}])),
        aggregates=draw(st.sampled_from([(), (("agg", {"k": "v"}),), (("agg", {"k": "w"}), ("other", {}))])),
        host_ip=draw(st.sampled_from(["", "10.0.0.1", "fd00::12"])),
        metrics=draw(st.dictionaries(st.sampled_from(["cpu.percent", "load"]), st.just(3.0))),
    )


def full(state: HostState, table: HostTable) -> HostState:
    """The state with a zero for classes that only other hosts have, as a table of columns gives it."""
    zeros = dict.fromkeys(table.state(0).capacity, 0)
    return msgspec.structs.replace(
        state,
        total=zeros | state.total,
        reserved=zeros | state.reserved,
        capacity=zeros | state.capacity,
        used=zeros | state.used,
        max_unit=zeros | dict.fromkeys(state.capacity, MOST_UNITS) | state.max_unit,
        allocation_ratio=dict.fromkeys(zeros, 0.0) | dict.fromkeys(state.capacity, 1.0) | state.allocation_ratio,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("update"), a_state()),
            st.tuples(st.just("remove"), st.sampled_from(NODES)),
            st.tuples(st.just("service"), st.sampled_from(["h1", "h2"])),
            st.tuples(st.just("amount"), st.sampled_from(NODES)),
        ),
        max_size=30,
    )
)
def test_whatever_happens_the_table_knows_what_the_dict_knows(steps: list[tuple[str, Any]]) -> None:
    table, model = HostTable(), dict[str, HostState]()
    for kind, value in steps:
        if kind == "update":
            table.update([value])
            model[value.node_uuid] = value
        elif kind == "remove":
            table.remove([value])
            model.pop(value, None)
        elif kind == "service":
            table.set_services([(value, False, True, 5.0)])
            for uuid, state in model.items():
                if state.host == value:
                    model[uuid] = msgspec.structs.replace(state, enabled=False, forced_down=True, last_seen=5.0)
        else:
            unknown = table.set_amounts([(value, "VCPU", 9, 1, 18, 4, 9, 2.0)])
            assert unknown == ({value} - model.keys())
            if value in model:
                state = model[value]
                model[value] = msgspec.structs.replace(
                    state,
                    total=state.total | {"VCPU": 9},
                    reserved=state.reserved | {"VCPU": 1},
                    capacity=state.capacity | {"VCPU": 18},
                    used=state.used | {"VCPU": 4},
                    max_unit=state.max_unit | {"VCPU": 9},
                    allocation_ratio=state.allocation_ratio | {"VCPU": 2.0},
                )
    assert set(table.uuids) == set(model)
    view = table.view()
    for uuid, state in model.items():
        row = table.index(uuid)
        assert row is not None
        assert table.state(row) == full(state, table)
        assert view.in_zone(state.zone)[row]
        able = view.may_give("VCPU", 9)
        assert (
            "VCPU" not in state.capacity or state.max_unit.get("VCPU", 9) >= 9 or (able is not None and not able[row])
        )
        assert able is None or able[row] == ("VCPU" in state.capacity and state.max_unit.get("VCPU", 9) >= 9)
        assert view.by_host({state.host: 3})[row] == 3
        assert view.by_facts(("gpu",), lambda facts: "gpu" in facts.capabilities)[row] == ("gpu" in state.capabilities)
        assert row in table.rows_of_host(state.host)
        assert table.find_rows(state.host, state.node).tolist() == [row]
    assert sorted(row for host in ("h1", "h2", "h3") for row in table.rows_of_host(host)) == list(range(len(model)))


def test_a_host_that_is_named_as_its_node_is_the_one_that_is_meant() -> None:
    """A host can report a node with the name of another host, and large inventories."""
    evil = msgspec.structs.replace(a_host("evil"), node="h1")
    table = a_table(evil, a_host("h0"), a_host("h1"))
    assert [table.selections[row].host for row in table.find_rows(None, "h1")] == ["h1"]
    assert [table.selections[row].host for row in table.find_rows("evil", "h1")] == ["evil"]
    assert table.find_rows("h0", "h1").tolist() == []


def test_it_grows() -> None:
    table = a_table(*(a_host(f"h{number}") for number in range(1000)))
    assert len(table) == 1000
    assert table.view().free("VCPU").tolist() == [32.0] * 1000
    table.remove([f"uuid-h{number}" for number in range(0, 1000, 2)])
    assert sorted(each.host for each in table.selections) == sorted(f"h{number}" for number in range(1, 1000, 2))


def test_consume_and_release() -> None:
    table = a_table(a_host("h"))
    assert table.fits(0, {"VCPU": 32})
    assert not table.fits(0, {"VCPU": 33})
    assert not table.fits(0, {"CUSTOM_GOLD": 1})
    table.consume(0, {"VCPU": 3, "MEMORY_MB": 100})
    assert table.view().free("VCPU")[0] == 29
    assert table.state(0).num_instances == 1
    table.release(0, {"VCPU": 3, "MEMORY_MB": 100})
    assert table.state(0) == full(a_host("h"), table)


def test_a_view_of_few_rows_sees_what_a_view_of_all_sees() -> None:
    table = a_table(*(a_host(f"h{number}", zone=f"z{number % 3}") for number in range(50)))
    members = {"h3": 2, "h7": 1, "elsewhere": 5}
    every = table.view()
    for rows in ([3], [7, 8], list(range(0, 50, 3))):
        few = table.view(np.array(rows))
        assert few.by_host(members).tolist() == [every.by_host(members)[row] for row in rows]
        assert few.in_zone("z1").tolist() == [row % 3 == 1 for row in rows]
        assert [each.host for each in few.selections()] == [f"h{row}" for row in rows]
        kept = few.only(few.in_zone("z0"))
        assert [kept.row(position) for position in range(len(kept))] == [row for row in rows if row % 3 == 0]


def test_a_host_that_is_read_again_unchanged_leaves_the_answers_about_it() -> None:
    """Its traits, aggregates and topology were forgotten if no other host had them, and all questions asked again."""
    topology = encode(NodeTopology(cells=(HostCell(id=0, memory_mb=1024),)))
    states = [
        a_host(
            f"h{number}",
            traits=(f"CUSTOM_{number}",),
            aggregates=((f"agg{number}", {}),),
            topology=topology if number == 0 else "",
        )
        for number in range(3)
    ]
    table = a_table(*states)
    asked: list[object] = []

    def note(kind: object) -> bool:
        asked.append(kind)
        return True

    def ask() -> None:
        view = table.view()
        view.by_facts("facts", note)
        view.by_aggregates("aggregates", note)
        view.by_topology(b"topology", lambda *kind: note(kind), None)

    ask()
    assert len(asked) == 3 + 3 + 2
    table.update(states)
    ask()
    assert len(asked) == 8
    table.update([msgspec.structs.replace(states[0], traits=("CUSTOM_NEW",))])
    ask()
    assert len(asked) == 8 + 3, "a new kind of host is asked about"


NUMBERS = st.one_of(
    st.integers(0, 8), st.sampled_from([-1, 2**31 - 1, 2**31, 2**41, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**70])
)


@st.composite
def a_bad_state(draw: st.DrawFn) -> HostState:
    """Draw a host as an earlier version may have stored it, with any numbers and pages."""
    pages = st.fixed_dictionaries({"size_kib": NUMBERS, "total": NUMBERS}, optional={"reserved": NUMBERS})
    cell = st.fixed_dictionaries(
        {"id": NUMBERS, "memory_mb": NUMBERS, "shared": st.lists(NUMBERS, max_size=2)},
        optional={"pages": st.lists(pages, max_size=3), "dedicated": st.lists(NUMBERS, max_size=2)},
    )
    topology = draw(st.fixed_dictionaries({"cells": st.lists(cell, max_size=12)}))
    held = draw(st.sampled_from(["", '{"cells": {"0": {"memory_mb": 9223372036854775808}}}', "no JSON"]))
    return msgspec.structs.replace(
        draw(a_state()),
        topology=msgspec.json.encode(topology).decode(),
        held=held,
        num_instances=draw(NUMBERS),
        hypervisor_version=draw(NUMBERS),
        traits=(draw(st.sampled_from(["CUSTOM_A", "CUSTOM_B"])),),
    )


@given(st.lists(st.one_of(a_state(), a_bad_state()), max_size=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_cannot_be_taken_is_left_out_alone(states: list[HostState]) -> None:
    """Codes that a failed row had released without having taken them were given to other hosts' facts."""
    table, good = HostTable(), HostTable()
    kept: dict[str, HostState] = {}
    for state in states:
        table.update([state])
        table.set_topologies([(state.node_uuid, state.topology, state.held)])
        if state.node_uuid in table:
            kept[state.node_uuid] = state
        else:
            kept.pop(state.node_uuid, None)
            assert state.node_uuid in table.left_out
    good.update(kept.values())
    assert set(table.uuids) == set(good.uuids) == kept.keys() and not table.left_out & kept.keys()
    for uuid, state in kept.items():
        row = table.index(uuid)
        assert row is not None and table.state(row) == full(state, table)
    for interner in (table.zones, table.facts, table.aggregates, table.topologies._interner):
        assert sum(interner._users) == len(kept)
    table.remove(list(kept))
    assert not any(sum(each._users) for each in (table.zones, table.facts, table.topologies._interner))


def test_two_bad_rows_give_no_host_the_facts_of_another() -> None:
    table = a_table(a_host("h0"), a_host("h1"))
    for number in (10, 11):
        cells = f'{{"cells": [{{"id": 0, "memory_mb": {2**63 + number}}}]}}'
        for _ in range(2):
            table.update([a_host(f"h{number}", zone="evil", hypervisor_type="evil", topology=cells)])
    table.update([a_host("h20", zone="other", traits=("CUSTOM_TRUSTED",))])
    view = table.view()
    trusted = view.by_facts("trusted", lambda facts: "CUSTOM_TRUSTED" in facts.traits)
    assert [each.host for each in view.selections()] == ["h0", "h1", "h20"]
    assert trusted.tolist() == [False, False, True] and view.in_zone("nova").tolist() == [True, True, False]
