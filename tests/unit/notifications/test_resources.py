"""Notifications about aggregates, flavors, key pairs, server groups, services and errors have Nova's payloads."""

from types import SimpleNamespace
from typing import Any

import pytest

from micronova.notifications import resources
from micronova.notifications.resources import Announcement
from micronova.objects.errors import OperationFailed
from micronova.objects.flavor import Flavor
from micronova.objects.orders import HostMetrics
from micronova.objects.scheduling import RequestSpec
from tests.schemas.notifications import check
from tests.unit.notifications.samples import CONTEXT, CREATED, FAULT, UUID, server
from tests.unit.notifications.test_notifier import notifier, opened

ROW: Any = SimpleNamespace
AGGREGATE = ROW(id=7, uuid=UUID, name="rack", metadata={"ssd": "true"}, created_at=CREATED, updated_at=None)
FLAVOR = ROW(
    flavorid="1", name="tiny", memory_mb=512, vcpus=1, root_gb=1, ephemeral_gb=0, swap=0, rxtx_factor=1.0,
    is_public=False, disabled=False, description=None, extra_specs={"hw:cpu_policy": "shared"}, created_at=CREATED,
)  # fmt: skip
KEYPAIR = ROW(
    user_id="ada", name="k", id=1, type="ssh", fingerprint="aa:bb", public_key="ssh-rsa A", created_at=CREATED
)
GROUP = ROW(
    uuid=UUID, project_id="engines", user_id="ada", name="g", policy="anti-affinity", rules={"max_server_per_host": 2},
    created_at=CREATED,
)  # fmt: skip
SERVICE = ROW(
    uuid=UUID, id=1, host="compute-1", binary="nova-compute", disabled=True, disabled_reason="broken",
    forced_down=False, last_seen_at=CREATED, heartbeat_number=5, version=1, created_at=CREATED, updated_at=None,
)  # fmt: skip
SPEC = RequestSpec(project_id="engines", user_id="ada", flavor=Flavor(id="1", name="m1.tiny", ram=512, vcpus=1, disk=1))

MEASURED = HostMetrics(
    node="node-1",
    host_ip="192.0.2.1",
    source="fake",
    taken_at=CREATED,
    values={"cpu.percent": 25, "cpu.frequency": 800, "x": 1},
)

ALL: list[Announcement] = [
    resources.aggregate("create", "start", uuid=UUID, name="rack"),
    resources.aggregate_of("add_host", "end", AGGREGATE, ["compute-1"], host_name="compute-1", name_="rack"),
    resources.flavor("create", FLAVOR, ["engines"]),
    resources.flavor("delete", FLAVOR, None),
    resources.keypair("create", "start", CONTEXT, user_id="ada", name="k", kind="ssh"),
    resources.keypair_of("import", "end", CONTEXT, KEYPAIR),
    resources.server_group("create", GROUP, []),
    resources.server_group("add_member", GROUP, ["a", "b"], ["b"]),
    resources.service("update", SERVICE, "nova"),
    resources.task_failed("build_instances", server(vm_state="error", host=None), SPEC, FAULT),
    resources.task_failed("build_instances", server(vm_state="error", host=None), None, FAULT),
    resources.host_failed("compute-1", "reboot", UUID, OperationFailed("libvirt is gone", details="x")),
    resources.aggregate_of("cache_images", "start", AGGREGATE, ["compute-1"]),
    resources.aggregate_cache(AGGREGATE, "compute-1", cached=["a"], failed=["b"], index=1, total=2),
    resources.metrics("compute-1", MEASURED),
]


@pytest.mark.parametrize("made", ALL, ids=lambda made: made.event)
def test_payloads_have_all_fields_of_novas(made: Announcement) -> None:
    check(made.payload)


def sent(made: Announcement) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the messages that an announcement becomes: the unversioned one and the versioned one."""
    sender, kept = notifier()
    sender.announce(CONTEXT, lambda: made)
    found = [opened(message.body) for message in kept.messages()]
    return (found[0] if len(found) == 2 else None), found[-1]


def test_an_aggregate_in_both_formats() -> None:
    old, new = sent(ALL[1])
    assert new["event_type"] == "aggregate.add_host.end"
    assert (new["publisher_id"], new["priority"]) == ("nova-api:controller", "INFO")
    data = check(new["payload"], "AggregatePayload")
    assert (data["id"], data["hosts"], data["metadata"]) == (7, ["compute-1"], {"ssd": "true"})
    assert old is not None
    assert (old["event_type"], old["publisher_id"]) == ("aggregate.addhost.end", "aggregate.7")
    assert old["payload"] == {"aggregate_id": 7, "host_name": "compute-1", "name": "rack"}
    first, _ = sent(ALL[0])
    assert first is not None and first["publisher_id"] == "aggregate.rack" and first["payload"] == {"name": "rack"}


def test_flavors_and_services_have_no_unversioned_form() -> None:
    old, new = sent(ALL[2])
    assert old is None and (new["event_type"], new["payload"]["nova_object.data"]["projects"]) == (
        "flavor.create",
        ["engines"],
    )
    old, new = sent(ALL[8])
    data = new["payload"]["nova_object.data"]
    assert old is None and (new["event_type"], new["publisher_id"]) == ("service.update", "nova-compute:compute-1")
    assert (data["disabled"], data["disabled_reason"], data["topic"]) == (True, "broken", "compute")


def test_a_key_pair_and_a_group() -> None:
    old, new = sent(ALL[5])
    assert old is not None and new["event_type"] == old["event_type"] == "keypair.import.end"
    assert old["payload"] == {"tenant_id": "engines", "user_id": "ada", "key_name": "k"}
    assert old["publisher_id"] == "api.controller"
    old, new = sent(ALL[7])
    assert old is not None
    assert (old["event_type"], new["event_type"]) == ("servergroup.addmember", "server_group.add_member")
    assert old["payload"] == {"server_group_id": UUID, "instance_uuids": ["b"]}
    assert new["payload"]["nova_object.data"]["rules"] == {"max_server_per_host": "2"}


def test_errors() -> None:
    old, new = sent(ALL[9])
    assert old is not None and old["priority"] == new["priority"] == "ERROR"
    assert (old["event_type"], new["event_type"]) == (
        "compute_task.build_instances",
        "compute_task.build_instances.error",
    )
    assert old["publisher_id"] == "compute_task.controller" and new["publisher_id"] == "nova-conductor:controller"
    assert (old["payload"]["method"], old["payload"]["reason"]) == ("build_instances", FAULT["message"])
    old, new = sent(ALL[11])
    assert old is not None and new["event_type"] == "compute.exception"
    assert (old["event_type"], old["publisher_id"]) == ("reboot", "compute.compute-1")
    assert new["payload"]["nova_object.data"]["exception_message"] == "libvirt is gone"


def test_metrics_of_a_host() -> None:
    old, new = sent(resources.metrics("compute-1", MEASURED))
    assert old is not None
    assert (old["event_type"], old["publisher_id"]) == ("compute.metrics.update", "compute.node-1")
    assert [(each["name"], each["value"]) for each in old["payload"]["metrics"]] == [
        ("cpu.percent", 0.25),
        ("cpu.frequency", 800),
    ]
    assert (new["event_type"], new["publisher_id"]) == ("metrics.update", "nova-compute:compute-1")
    data = new["payload"]["nova_object.data"]
    assert [each["nova_object.data"]["value"] for each in data["metrics"]] == [25, 800]
    assert (data["host"], data["nodename"], data["host_ip"]) == ("compute-1", "node-1", "192.0.2.1")
