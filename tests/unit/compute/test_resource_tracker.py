"""The resource tracker, claims, and epochs."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.compute.epochs import REMEMBERED, Epochs
from micronova.compute.resource_tracker import ResourceTracker
from micronova.objects.errors import InsufficientResources, Unavailable
from micronova.objects.orders import Guest, NodeResources
from tests.compute_settings import compute_settings
from tests.unit.compute.agent_harness import TINY, order

NODE = NodeResources(
    node="node-1",
    node_uuid="n",
    hypervisor_type="fake",
    hypervisor_version=1,
    vcpus=2,
    memory_mb=2048,
    local_gb=100,
)


def make_tracker(**settings: object) -> ResourceTracker:
    made = ResourceTracker(NODE, compute_settings(**settings))
    made.update(NODE, [], ())
    return made


def test_a_claim_counts_until_it_is_released() -> None:
    tracker = make_tracker()
    with tracker.instance_claim(order()):
        assert tracker.used() == {"VCPU": 1, "PCPU": 0, "MEMORY_MB": 512, "DISK_GB": 1}
    assert tracker.used() == {"VCPU": 1, "PCPU": 0, "MEMORY_MB": 512, "DISK_GB": 1}
    tracker.release("i-1")
    tracker.release("i-1")
    assert tracker.used() == {"VCPU": 0, "PCPU": 0, "MEMORY_MB": 0, "DISK_GB": 0}


def test_a_claim_is_given_back_when_the_body_fails() -> None:
    tracker = make_tracker()
    with pytest.raises(RuntimeError), tracker.instance_claim(order()):
        raise RuntimeError
    assert tracker.used() == {"VCPU": 0, "PCPU": 0, "MEMORY_MB": 0, "DISK_GB": 0}


def test_a_repeated_claim_counts_once() -> None:
    tracker = make_tracker()
    for _ in range(10):
        tracker.hold(order())
    assert tracker.used()["VCPU"] == 1


def test_capacity_is_total_less_reserved_times_ratio() -> None:
    tracker = make_tracker(reserved_host_memory_mb=512, fixed_allocation_ratios={"MEMORY_MB": 2.0})
    for number in range(6):  # (2048 - 512) * 2 / 512
        tracker.hold(order(uuid=f"i-{number}"))
    with pytest.raises(InsufficientResources) as refused:
        tracker.hold(order(uuid="i-6"))
    # The owner of a server reads the message: neither the node nor what others use of it.
    assert refused.value.message == "The host has not enough resources left for the server."
    assert refused.value.details["details"] == f"{tracker.node}: 512 MB of memory asked for, 0 left"


def test_the_update_agrees_with_claims() -> None:
    tracker = make_tracker()
    tracker.hold(order(uuid="i-1"))
    tracker.hold(order(uuid="i-2"))
    before = tracker.used()
    guest = Guest(uuid="i-1", node="node-1", epoch=1, power_state=1, vcpus=1, memory_mb=512, local_gb=1)
    seen = msgspec.structs.replace(NODE, vcpus_used=1, memory_mb_used=512, local_gb_used=1)
    tracker.update(seen, [guest], {"i-2"})  # i-2 is being built
    assert tracker.used() == before


def test_an_instance_holds_what_the_scheduler_claims() -> None:
    tracker = make_tracker()
    specs = {"resources:MEMORY_MB": "256", "resources:VCPU": "0", "resources:CUSTOM_LICENCE": "1"}
    large = msgspec.structs.replace(TINY, vcpus=64, ram=8192, extra_specs=specs)
    claims = {"VCPU": 0, "PCPU": 0, "MEMORY_MB": 256, "DISK_GB": 1}
    for _ in range(2):
        tracker.hold(order(instance_flavor=large))
        assert tracker.used() == claims
    # The hypervisor reports what its guest uses, and what was claimed for it.
    guest = Guest(
        uuid="i-1", node="node-1", epoch=1, power_state=1, vcpus=64, memory_mb=8192, local_gb=1,
        claimed={"MEMORY_MB": 256, "DISK_GB": 1, "CUSTOM_LICENCE": 1},
    )  # fmt: skip
    seen = msgspec.structs.replace(NODE, vcpus_used=64, memory_mb_used=8192, local_gb_used=1)
    tracker.update(seen, [guest], ())
    assert tracker.used() == claims
    tracker.hold(order(uuid="i-2"))
    restarted = make_tracker()
    restarted.update(seen, [guest], ())
    assert restarted.used() == claims
    tracker.release("i-1")
    assert tracker.used() == {"VCPU": 1, "PCPU": 0, "MEMORY_MB": 512, "DISK_GB": 1}


def test_guests_of_other_clouds_use_resources() -> None:
    tracker = make_tracker(fixed_allocation_ratios={"MEMORY_MB": 1.0})
    tracker.update(msgspec.structs.replace(NODE, memory_mb_used=1800), [], ())
    with pytest.raises(InsufficientResources):
        tracker.hold(order())


def test_allocation_ratios_are_asked_for_before_a_claim_is_refused() -> None:
    """Somebody may have changed those of the inventories by the Placement API."""
    tracker = make_tracker()
    tracker.set_allocation_ratios({"VCPU": 4.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0})
    for number in range(4):
        tracker.hold(order(uuid=f"i-{number}"))
    tracker.changed = False
    for _ in range(2):
        with pytest.raises(Unavailable):
            tracker.hold(order(uuid="i-4"))
        assert tracker.changed
    tracker.set_allocation_ratios({"VCPU": 4.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0})  # of an earlier heartbeat
    with pytest.raises(Unavailable):
        tracker.hold(order(uuid="i-4"))
    tracker.take_report()
    tracker.set_allocation_ratios({"VCPU": 4.0, "MEMORY_MB": 1.5, "DISK_GB": 1.0})
    tracker.hold(order(uuid="i-4"))
    tracker.hold(order(uuid="i-5"))
    for error in (Unavailable, InsufficientResources, Unavailable):  # the last after another change
        with pytest.raises(error):
            tracker.hold(order(uuid="i-6"))
        tracker.take_report()
        tracker.set_allocation_ratios({"VCPU": 4.0, "MEMORY_MB": 1.5, "DISK_GB": 1.0})
    assert (tracker.report().allocation_ratios, tracker.report().initial_allocation_ratios["MEMORY_MB"]) == ({}, 1.0)
    fixed = make_tracker(fixed_allocation_ratios={"MEMORY_MB": 1.0})
    fixed.set_allocation_ratios({"VCPU": 4.0, "MEMORY_MB": 9.0, "DISK_GB": 1.0})
    for number in range(4):
        fixed.hold(order(uuid=f"i-{number}"))
    with pytest.raises(InsufficientResources):
        fixed.hold(order(uuid="i-4"))


def test_what_an_instance_holds_is_never_refused() -> None:
    tracker = make_tracker(fixed_allocation_ratios={"VCPU": 4.0, "MEMORY_MB": 1.0, "DISK_GB": 1.0})
    guest = Guest(uuid="i-1", node="node-1", epoch=1, power_state=1, vcpus=1, memory_mb=512, local_gb=1)
    full = msgspec.structs.replace(NODE, vcpus_used=9, memory_mb_used=9999, local_gb_used=999)
    tracker.update(full, [guest], ())
    tracker.hold(order())
    tracker.hold(order(instance_flavor=msgspec.structs.replace(TINY, vcpus=1, ram=256)))
    with pytest.raises(InsufficientResources):
        tracker.hold(order(instance_flavor=msgspec.structs.replace(TINY, vcpus=1, ram=1024)))
    tracker.keep(order(uuid="i-2"))  # it has a claim in the database, and stays


def test_an_update_that_finds_nothing_new_changes_nothing() -> None:
    tracker = make_tracker()
    tracker.changed = False
    tracker.update(NODE, [], ())
    assert not tracker.changed
    tracker.update(msgspec.structs.replace(NODE, memory_mb=4096), [], ())
    assert tracker.changed


def test_shortages_are_named() -> None:
    tracker = make_tracker(fixed_allocation_ratios={"MEMORY_MB": 1.0})
    tracker.update(msgspec.structs.replace(NODE, memory_mb_used=1800), [], ())
    with pytest.raises(InsufficientResources) as refused:
        tracker.hold(order())
    assert refused.value.details == {"details": "node-1: 512 MB of memory asked for, 248 left"}


@given(
    st.lists(st.tuples(st.sampled_from(["claim", "release", "update"]), st.integers(0, 8)), max_size=40),
)
def test_usage_always_equals_what_the_instances_hold(steps: list[tuple[str, int]]) -> None:
    tracker = make_tracker()
    held: set[str] = set()
    for step, number in steps:
        uuid = f"i-{number}"
        if step == "release":
            tracker.release(uuid)
            held.discard(uuid)
        elif step == "claim":
            try:
                tracker.hold(order(uuid=uuid))
            except (InsufficientResources, Unavailable):
                assert len(held - {uuid}) == 4  # the memory is full
            else:
                held.add(uuid)
        else:
            guests = [
                Guest(uuid=each, node="node-1", epoch=1, power_state=1, vcpus=1, memory_mb=512, local_gb=1)
                for each in held
            ]
            tracker.update(NODE, guests, ())
        assert tracker.used()["MEMORY_MB"] == TINY.ram * len(held)


def test_epochs() -> None:
    epochs = Epochs()
    assert epochs.admit("i", 3, removes=False)
    assert epochs.admit("i", 3, removes=False)
    assert not epochs.admit("i", 2, removes=True)
    epochs.forget("i")
    assert epochs.highest("i") == 3
    assert not epochs.admit("i", 2, removes=True)
    epochs.leave("i", 5)
    assert not epochs.admit("i", 5, removes=False)
    assert epochs.admit("i", 5, removes=True)
    assert epochs.admit("i", 6, removes=False)


def test_epochs_of_the_departed_are_bounded() -> None:
    epochs = Epochs()
    for number in range(REMEMBERED + 10):
        epochs.admit(f"i-{number}", 1, removes=False)
        epochs.forget(f"i-{number}")
    assert epochs.highest("i-0") == 0
    assert epochs.highest(f"i-{REMEMBERED + 9}") == 1
