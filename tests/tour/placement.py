"""The tour of placement, with every command of osc-placement: providers, what they have, and who holds it."""

import uuid

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO, ON_TEST_IMAGE, fields, until_status

OWNER = ("--project-id", "tour", "--user-id", "tour")


def names(osc: OpenStackClient) -> None:
    """Traits and resource classes."""
    assert "VCPU" in osc.column("resource class list", name="name")
    osc("resource class create", "CUSTOM_TOUR")
    osc("resource class set", "CUSTOM_TOUR_MORE")
    assert osc.json("resource class show", "CUSTOM_TOUR")["name"] == "CUSTOM_TOUR"
    assert "Cannot delete standard" in osc.refused("resource class delete", "VCPU")
    assert "HW_CPU_X86_AVX2" in osc.column("trait list", name="name")
    osc("trait create", "CUSTOM_TOUR")
    assert osc.column("trait list", "--name", "startswith:CUSTOM_TOUR", name="name") == ["CUSTOM_TOUR"]
    assert osc.json("trait show", "CUSTOM_TOUR")["name"] == "CUSTOM_TOUR"


def providers(osc: OpenStackClient) -> None:
    """A provider below a compute node, with inventories, traits and aggregates."""
    nodes = fields(osc.json("resource provider list"), "name", "uuid")
    assert {f"fake-{number}" for number in range(1, 5)} <= nodes.keys()
    node = nodes["fake-1"]
    made = osc.json("resource provider create", "tour-nic", "--parent-provider", node)
    id = made["uuid"]
    assert made["root_provider_uuid"] == node
    osc("resource provider set", id, "--name", "tour-interface")
    assert osc.json("resource provider show", id)["name"] == "tour-interface"
    assert fields(osc.json("resource provider list", "--in-tree", node), "name", "uuid")["tour-interface"] == id
    osc("resource provider inventory set", id, "--resource", "CUSTOM_TOUR=8", "--resource", "CUSTOM_TOUR_MORE=4")
    osc("resource provider inventory class set", id, "CUSTOM_TOUR", "--total", "10", "--max_unit", "4")
    assert osc.json("resource provider inventory show", id, "CUSTOM_TOUR")["max_unit"] == 4
    assert sorted(osc.column("resource provider inventory list", id, name="resource_class")) == [
        "CUSTOM_TOUR", "CUSTOM_TOUR_MORE",
    ]  # fmt: skip
    osc("resource provider inventory delete", id, "--resource-class", "CUSTOM_TOUR_MORE")
    osc("resource provider trait set", id, "--trait", "CUSTOM_TOUR")
    assert osc.column("resource provider trait list", id, name="name") == ["CUSTOM_TOUR"]
    aggregate = str(uuid.uuid4())
    generation = str(osc.json("resource provider show", id)["generation"])
    osc("resource provider aggregate set", id, "--aggregate", aggregate, "--generation", generation)
    assert osc.column("resource provider aggregate list", id, name="uuid") == [aggregate]
    assert osc.column("resource provider list", "--member-of", aggregate, name="uuid") == [id]
    ratio = ("--resource", "CUSTOM_TOUR:allocation_ratio=2.0")
    osc("resource provider inventory set", aggregate, "--aggregate", "--amend", *ratio)
    assert osc.json("resource provider inventory show", id, "CUSTOM_TOUR")["allocation_ratio"] == 2.0
    for command in ("resource provider list", "trait list"):
        assert "403" in osc.refused(command, cloud=DEMO)


def allocations(osc: OpenStackClient) -> None:
    """Who holds what; servers too."""
    id = fields(osc.json("resource provider list"), "name", "uuid")["tour-interface"]
    group = ("--group", "1", "--resource", "CUSTOM_TOUR=2", "--required", "CUSTOM_TOUR")
    found = osc.json("allocation candidate list", "--resource", "VCPU=1", *group)
    assert {row["resource provider"] for row in found} > {id}
    consumer = str(uuid.uuid4())
    held = ("--allocation", f"rp={id},CUSTOM_TOUR=2")
    osc("resource provider allocation set", consumer, *held, *OWNER, "--consumer-type", "TOUR")
    [shown] = osc.json("resource provider allocation show", consumer)
    assert (shown["resource_provider"], shown["resources"]) == (id, {"CUSTOM_TOUR": 2})
    too_much = ("--allocation", f"rp={id},CUSTOM_TOUR=5")
    assert "constraints" in osc.refused(
        "resource provider allocation set", consumer, *too_much, *OWNER, "--consumer-type", "TOUR"
    )
    assert fields(osc.json("resource provider usage show", id), "resource_class", "usage") == {"CUSTOM_TOUR": 2}
    # From 1.38 on the answer is by type of consumer, which the client shows in the column of classes.
    usage = fields(osc.json("resource usage show", "tour"), "resource_class", "usage")
    assert usage == {"TOUR": {"consumer_count": 1, "CUSTOM_TOUR": 2}}
    assert "in use" in osc.refused("resource provider inventory delete", id, "--resource-class", "CUSTOM_TOUR")
    osc("resource provider allocation unset", consumer, "--provider", id)
    osc("resource provider allocation set", consumer, *held, *OWNER, "--consumer-type", "TOUR")
    osc("resource provider allocation delete", consumer)
    osc("server create", *ON_TEST_IMAGE, "--nic", "none", "tour-consumer", cloud=DEMO)
    server = until_status(osc, "tour-consumer", "ACTIVE")
    [shown] = osc.json("resource provider allocation show", server["id"])
    assert shown["consumer_type"] == "INSTANCE"
    osc("server delete", "--wait", "tour-consumer", cloud=DEMO)
    osc("resource provider trait delete", id)
    osc("resource provider delete", id)
    osc("trait delete", "CUSTOM_TOUR")
    for name in ("CUSTOM_TOUR", "CUSTOM_TOUR_MORE"):
        osc("resource class delete", name)
