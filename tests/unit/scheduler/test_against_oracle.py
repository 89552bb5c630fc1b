"""Vectors against plain Python, on arbitrary clouds and requests."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from micronova.conf.control import FilterSchedulerSettings
from micronova.objects.errors import NoValidHost
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, HostState, RequestSpec
from tests.unit.scheduler import oracle
from tests.unit.scheduler.factory import NOW, a_flavor, a_host, a_scheduler, a_spec, a_table, free_of

# On a machine that does much else, examples take long to make; that says nothing about the scheduler.
patiently = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTS = [f"h{number}" for number in range(8)]
MULTIPLIERS = st.fixed_dictionaries(
    {
        name: st.sampled_from([1.0, 2.5, -1.0, 0.5])
        for name in ("RAMWeigher", "CPUWeigher", "DiskWeigher", "BuildFailureWeigher")
    }
)


@st.composite
def hosts(draw: st.DrawFn) -> list[HostState]:
    """A handful of hosts, some with two nodes, some down, some full."""
    made = []
    for number in range(draw(st.integers(1, 10))):
        capacity = {
            "VCPU": draw(st.integers(0, 8)),
            "MEMORY_MB": draw(st.integers(0, 8)) * 512,
            "DISK_GB": draw(st.integers(0, 5)) * 10,
        }
        made.append(
            a_host(
                draw(st.sampled_from(HOSTS)),
                node=f"n{number}",
                node_uuid=f"uuid-{number}",
                zone=draw(st.sampled_from(["nova", "az1"])),
                enabled=draw(st.booleans()) or draw(st.booleans()),
                forced_down=draw(st.integers(0, 9)) == 0,
                last_seen=NOW - draw(st.sampled_from([0, 59, 60, 61, 5000])),
                capacity=capacity,
                used={name: draw(st.integers(0, amount)) for name, amount in capacity.items()},
                supported=draw(
                    st.lists(
                        st.tuples(
                            st.sampled_from(["x86_64", "aarch64"]),
                            st.sampled_from(["kvm", "qemu"]),
                            st.sampled_from(["hvm", "xen"]),
                        ),
                        max_size=2,
                    ).map(tuple)
                ),
                failed_builds=draw(st.integers(0, 2)),
            )
        )
    return made


@st.composite
def specs(draw: st.DrawFn) -> RequestSpec:
    """A request that any of the filters may have to say something about."""
    properties = {}
    for key, values in (
        ("hw_architecture", ["x86_64", "aarch64"]),
        ("img_hv_type", ["kvm", "qemu"]),
        ("hw_vm_mode", ["hvm", "xen"]),
    ):
        value = draw(st.sampled_from([None, None, *values]))
        if value is not None:
            properties[key] = value
    group = None
    if draw(st.booleans()):
        group = GroupSpec(
            id="g",
            policy=draw(st.sampled_from(["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"])),
            max_server_per_host=draw(st.integers(1, 2)),
            hosts=draw(st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 2), max_size=4)),
        )
    places = st.lists(st.sampled_from(HOSTS), max_size=5).map(tuple)
    hinted = draw(st.dictionaries(st.sampled_from(["same_host", "different_host"]), places, max_size=1))
    return a_spec(
        flavor=a_flavor(vcpus=draw(st.integers(1, 3)), ram=draw(st.integers(1, 3)) * 512, disk=draw(st.integers(0, 2))),
        image=draw(st.sampled_from([None, ImageMeta(id="i", properties=properties)])),
        availability_zone=draw(st.sampled_from([None, None, "nova", "az1", "nowhere"])),
        ignore_hosts=tuple(draw(st.lists(st.sampled_from(HOSTS), max_size=2))),
        group=group,
        hints={hint: ["a server"] for hint in hinted},
        hinted_hosts={hint: hosts for hint, hosts in hinted.items() if hosts},
    )


def test_the_oracle_knows_each_default_filter() -> None:
    """A weight that it does not know shows in the sums below."""
    known = set(oracle.passes(a_host("h"), a_spec(), NOW))
    assert known == {*FilterSchedulerSettings().enabled_filters, "Capacity(VCPU)"} - oracle.NOT_HERE


@patiently
@given(hosts(), specs(), MULTIPLIERS)
def test_one_decision(states: list[HostState], spec: RequestSpec, multipliers: dict[str, float]) -> None:
    table = a_table(*states)
    before = free_of(table)
    left = [host for host in states if all(oracle.passes(host, spec, NOW).values())]
    scheduler = a_scheduler(multipliers)
    if not left:
        with pytest.raises(NoValidHost) as caught:
            scheduler.select(table, spec, ["i"], now=NOW)
        assert caught.value.details["reasons"][-1]["remaining"] == 0
        assert free_of(table) == before
        return
    decision = scheduler.select(table, spec, ["i"], now=NOW)
    (placement,) = decision.placements
    by_uuid = {
        host.node_uuid: weight for host, weight in zip(left, oracle.weights(left, spec, multipliers), strict=True)
    }
    assert by_uuid[placement.selected.node_uuid] == pytest.approx(max(by_uuid.values()))
    assert decision.explanation.winners[0].weight == pytest.approx(by_uuid[placement.selected.node_uuid])
    assert sum(decision.explanation.winners[0].weighers.values()) == pytest.approx(
        decision.explanation.winners[0].weight
    )

    alternates = placement.alternates
    names = [placement.selected.host, *(each.host for each in alternates)]
    assert len(set(names)) == len(names)
    assert all(each.node_uuid in by_uuid for each in alternates)
    possible = {h.host for h in left} - {placement.selected.host}
    assert len(alternates) == min(2, len(possible))


@patiently
@given(hosts(), specs())
def test_explanation_counts_what_each_filter_removed(states: list[HostState], spec: RequestSpec) -> None:
    try:
        steps = [
            msgspec.structs.asdict(step)
            for step in a_scheduler().select(a_table(*states), spec, ["i"], now=NOW).explanation.filters
        ]
    except NoValidHost as error:
        steps = error.details["reasons"]
    left = states
    for step in steps:
        known = step["name"] not in oracle.NOT_HERE
        passing = [host for host in left if not known or oracle.passes(host, spec, NOW)[step["name"]]]
        assert (step["removed"], step["remaining"]) == (len(left) - len(passing), len(passing)), step
        left = passing


def one_by_one(
    states: list[HostState], spec: RequestSpec, count: int, multipliers: dict[str, float]
) -> list[str] | None:
    """Place instances by separate decisions; None if one finds no host."""
    table, chosen = a_table(*states), []
    for number in range(count):
        try:
            decision = a_scheduler(multipliers).select(table, spec, [f"i{number}"], now=NOW)
        except NoValidHost:
            return None
        selected = decision.placements[0].selected
        chosen.append(selected.node_uuid)
        if spec.group is not None:
            members = {**spec.group.hosts, selected.host: spec.group.hosts.get(selected.host, 0) + 1}
            spec = msgspec.structs.replace(spec, group=msgspec.structs.replace(spec.group, hosts=members))
    return chosen


@patiently
@given(hosts(), specs(), st.integers(2, 12), MULTIPLIERS)
def test_many_in_one_request_are_placed_as_one_by_one(
    states: list[HostState], spec: RequestSpec, count: int, multipliers: dict[str, float]
) -> None:
    expected = one_by_one(states, spec, count, multipliers)
    table = a_table(*states)
    before = free_of(table)
    uuids = [f"i{number}" for number in range(count)]
    try:
        placements = a_scheduler(multipliers).select(table, spec, uuids, now=NOW).placements
    except NoValidHost:
        assert expected is None
        assert free_of(table) == before
        return
    assert [each.instance_uuid for each in placements] == uuids
    assert [each.selected.node_uuid for each in placements] == expected
    for placement in placements:
        assert placement.selected.host not in {each.host for each in placement.alternates}
        row = table.index(placement.selected.node_uuid)
        assert row is not None
        table.release(row, spec.flavor.resources())
    assert free_of(table) == before
