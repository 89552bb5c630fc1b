"""What ports ask of resource providers, in the forms in which network services show it."""

from typing import Any

import pytest

from micronova.objects.errors import Invalid
from micronova.objects.port_resources import PortGroup, PortResources, ServedGroup, ServedPort, resources_of
from micronova.placement import port_groups

EGRESS, RATE = "NET_BW_EGR_KILOBIT_PER_SEC", "NET_PACKET_RATE_KILOPACKET_PER_SEC"


def _read(shown: Any) -> PortResources | None:
    return resources_of({"id": "p", "resource_request": shown})


def test_both_forms_are_read() -> None:
    one = {"resources": {EGRESS: 1000}, "required": ["CUSTOM_PHYSNET_A"]}
    group = PortGroup(resources={EGRESS: 1000}, required=("CUSTOM_PHYSNET_A",))
    assert _read(one) == PortResources(port_id="p", groups=(group,))
    rate = {"id": "r", "resources": {RATE: 5, EGRESS: 0}, "required": []}
    several = {"request_groups": [{"id": "b", **one}, rate], "same_subtree": ["b", "r"]}
    assert _read(several) == PortResources(
        port_id="p",
        groups=(
            PortGroup(id="b", resources={EGRESS: 1000}, required=("CUSTOM_PHYSNET_A",)),
            PortGroup(id="r", resources={RATE: 5}),
        ),
        same_subtree=("b", "r"),
    )


@pytest.mark.parametrize(
    "shown", [None, {}, {"resources": {EGRESS: 0}}, {"request_groups": []}, {"request_groups": [{"id": "b"}]}]
)
def test_a_port_may_ask_for_nothing(shown: Any) -> None:
    assert _read(shown) is None
    assert resources_of({"id": "p"}) is None


@pytest.mark.parametrize(
    "shown",
    [
        {"resources": {EGRESS: -1}},
        {"resources": [EGRESS]},
        {"request_groups": [{"resources": {EGRESS: 1}}]},
        {"request_groups": [{"id": "b", "resources": {EGRESS: 1}}] * 2},
        {"request_groups": [{"id": str(number), "resources": {EGRESS: 1}} for number in range(17)]},
        "much",
    ],
)
def test_what_cannot_be_read_is_refused(shown: Any) -> None:
    with pytest.raises(Invalid, match="resource request of port p"):
        _read(shown)


def test_the_answer_has_the_form_of_the_request() -> None:
    old = ServedPort(port_id="p", groups=(ServedGroup(provider="x", resources={EGRESS: 1}),))
    new = ServedPort(
        port_id="p",
        groups=(
            ServedGroup(id="b", provider="x", resources={EGRESS: 1}),
            ServedGroup(id="r", provider="y", resources={RATE: 5}),
        ),
    )
    assert (old.allocation, new.allocation) == ("x", {"b": "x", "r": "y"})
    assert old.answers(_read({"resources": {EGRESS: 1}}))
    assert not old.answers(_read({"resources": {EGRESS: 2}}))
    assert not old.answers(None)
    assert ServedPort(port_id="p", groups=()).answers(None)


def test_groups_of_several_ports_are_told_apart() -> None:
    """Two ports may name their groups alike."""
    groups = (PortGroup(id="b", resources={EGRESS: 1}, required=("CUSTOM_A",)), PortGroup(id="r", resources={RATE: 5}))
    ports = [PortResources(port_id=id, groups=groups, same_subtree=("b", "r")) for id in ("p", "q")]
    request = port_groups.request_of(ports)
    assert [group.suffix for group in request.groups] == ["p:b", "p:r", "q:b", "q:r"]
    assert request.groups[0].required == (frozenset({"CUSTOM_A"}),)
    assert request.same_subtrees == (frozenset({"p:b", "p:r"}), frozenset({"q:b", "q:r"}))
    served = port_groups.served(ports, {"p:b": ["1"], "p:r": ["2"], "q:b": ["3"], "q:r": ["4"]})
    assert [each.allocation for each in served] == [{"b": "1", "r": "2"}, {"b": "3", "r": "4"}]
