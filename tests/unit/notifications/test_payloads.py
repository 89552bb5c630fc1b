"""Payloads of both formats carry the facts under the names that Nova's consumers read."""

from typing import Any

from micronova.notifications import unversioned, versioned
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, RequestSpec
from tests.unit.notifications.samples import CONTEXT, FAULT, PORT, UUID, server

# The fields of InstancePayload 1.9, InstanceActionPayload 1.9 and InstanceCreatePayload 1.13 in Nova 34.
ACTION_FIELDS = set(
    "uuid user_id tenant_id reservation_id display_name display_description host_name host node os_type architecture "
    "availability_zone flavor image_uuid key_name kernel_id ramdisk_id created_at launched_at terminated_at deleted_at "
    "updated_at state power_state task_state progress ip_addresses block_devices metadata locked auto_disk_config "
    "request_id action_initiator_user action_initiator_project locked_reason shares fault".split()
)
CREATE_FIELDS = ACTION_FIELDS | {"keypairs", "tags", "trusted_image_certificates", "instance_name"}
FLAVOR_FIELDS = set(
    "flavorid memory_mb vcpus root_gb ephemeral_gb name swap rxtx_factor vcpu_weight disabled is_public extra_specs "
    "projects description".split()
)


def opened(payload: dict[str, Any], name: str, version: str) -> dict[str, Any]:
    """Check the name and version of an object, and return its data."""
    assert set(payload) == {"nova_object.name", "nova_object.namespace", "nova_object.version", "nova_object.data"}
    assert payload["nova_object.namespace"] == "nova"
    assert (payload["nova_object.name"], payload["nova_object.version"]) == (name, version)
    data: dict[str, Any] = payload["nova_object.data"]
    return data


def test_the_payload_of_a_create_has_all_fields_of_novas() -> None:
    payload = versioned.instance_payload("create", server(), CONTEXT, None)
    data = opened(payload, "InstanceCreatePayload", "1.13")
    assert set(data) == CREATE_FIELDS
    assert (data["uuid"], data["tenant_id"], data["user_id"]) == (UUID, "engines", "ada")
    assert (data["state"], data["task_state"], data["power_state"]) == ("active", None, "running")
    assert (data["host"], data["node"], data["architecture"]) == ("compute-1", "compute-1.example", "x86_64")
    assert data["created_at"] == "2012-10-29T13:42:11Z"
    assert data["launched_at"] == "2012-10-29T13:42:12Z"
    assert data["deleted_at"] is None and data["fault"] is None
    assert data["tags"] == ["blue"] and data["metadata"] == {"role": "web"}
    assert data["request_id"] == CONTEXT.request_id
    flavor = opened(data["flavor"], "FlavorPayload", "1.4")
    assert set(flavor) == FLAVOR_FIELDS
    assert (flavor["flavorid"], flavor["memory_mb"], flavor["root_gb"], flavor["vcpus"]) == ("1", 512, 1, 1)
    [address] = data["ip_addresses"]
    assert opened(address, "IpPayload", "1.0") == {
        "label": "private",
        "mac": "fa:16:3e:4c:2c:30",
        "meta": {},
        "port_uuid": PORT,
        "version": 4,
        "address": "192.168.1.3",
        "device_name": "tapce531f90-19",
    }
    [key] = data["keypairs"]
    assert opened(key, "KeypairPayload", "1.0")["name"] == "my-key"


def test_trusted_certificates_are_told_where_nova_tells_them() -> None:
    row = server(trusted_certs=["c1", "c2"])
    for action, trusted in (("create", ["c1", "c2"]), ("rebuild", ["c1", "c2"]), ("reboot", None)):
        data = versioned.instance_payload(action, row, CONTEXT, None)["nova_object.data"]
        assert data.get("trusted_image_certificates") == trusted


def test_other_actions_have_the_plainer_payload() -> None:
    data = opened(versioned.instance_payload("reboot", server(), CONTEXT, None), "InstanceActionPayload", "1.9")
    assert set(data) == ACTION_FIELDS


def test_a_rescue_names_its_image() -> None:
    details = {"rescue_image_ref": "i-2", "rescue_image_name": "tools"}
    payload = versioned.instance_payload("rescue", server(), CONTEXT, None, details)
    data = opened(payload, "InstanceActionRescuePayload", "1.4")
    assert set(data) == ACTION_FIELDS | {"rescue_image_ref"}
    assert data["rescue_image_ref"] == "i-2"
    assert unversioned.instance_payload("rescue.start", server(), None, details)["rescue_image_name"] == "tools"
    assert "rescue_image_name" not in unversioned.instance_payload("unrescue.start", server(), None)


def test_a_server_that_is_just_being_built_has_nulls() -> None:
    row = server(host=None, node=None, launched_at=None, network_info=[], power_state=0, image=None, key_name=None)
    data = opened(versioned.instance_payload("create", row, CONTEXT, None), "InstanceCreatePayload", "1.13")
    assert (data["host"], data["node"], data["launched_at"], data["ip_addresses"]) == (None, None, None, [])
    assert data["power_state"] == "pending"
    assert data["keypairs"] == []


def test_a_fault_is_an_exception_payload() -> None:
    data = opened(versioned.instance_payload("create", server(), CONTEXT, FAULT), "InstanceCreatePayload", "1.13")
    fault = opened(data["fault"], "ExceptionPayload", "1.1")
    assert set(fault) == {"module_name", "function_name", "exception", "exception_message", "traceback"}
    assert fault["exception_message"] == "No valid host was found."


def test_the_unversioned_payload_is_flat() -> None:
    payload = unversioned.instance_payload("create.end", server(), None)
    assert payload["instance_id"] == UUID
    assert (payload["memory_mb"], payload["disk_gb"], payload["root_gb"], payload["vcpus"]) == (512, 3, 1, 1)
    assert (payload["instance_type"], payload["instance_flavor_id"]) == ("m1.tiny", "1")
    assert (payload["state"], payload["state_description"], payload["message"]) == ("active", "", "Success")
    assert payload["created_at"] == "2012-10-29 13:42:11+00:00"
    assert payload["launched_at"] == "2012-10-29T13:42:12.500000"
    assert payload["deleted_at"] == payload["terminated_at"] == ""
    assert payload["image_meta"] == {
        "min_disk": "1",
        "min_ram": "0",
        "disk_format": "qcow2",
        "container_format": "bare",
        "hw_architecture": "x86_64",
        "os_type": "linux",
        "base_image_ref": "155d900f-4e14-4e4c-a73d-069cbf4541e6",
    }
    [address] = payload["fixed_ips"]
    assert (address["address"], address["label"], address["vif_mac"]) == ("192.168.1.3", "private", "fa:16:3e:4c:2c:30")


def test_the_unversioned_payload_says_what_the_event_is_about() -> None:
    assert unversioned.instance_payload("create.start", server(), None)["image_name"] == "cirros"
    failed = unversioned.instance_payload("create.error", server(), FAULT)
    assert (failed["message"], failed["code"]) == ("No valid host was found.", 500)


def test_the_payload_of_a_decision_has_the_request() -> None:
    spec = RequestSpec(
        project_id="engines",
        user_id="ada",
        flavor=Flavor(id="1", name="m1.tiny", ram=512, vcpus=1, disk=1),
        image=ImageMeta(id="i", properties={"hw_architecture": "x86_64"}),
        requested_host="compute-7",
        hints={"query": ["x"]},
        server_group=GroupSpec(id="g", policy="anti-affinity", hosts={"compute-1": 1}),
        ignore_hosts=("compute-2",),
    )
    data = opened(versioned.request_spec_payload(spec, (UUID, "other")), "RequestSpecPayload", "1.1")
    assert (data["instance_uuid"], data["num_instances"], data["project_id"]) == (UUID, 2, "engines")
    assert opened(data["requested_destination"], "DestinationPayload", "1.0")["host"] == "compute-7"
    assert opened(data["retry"], "SchedulerRetriesPayload", "1.0")["num_attempts"] == 2
    assert opened(data["instance_group"], "ServerGroupPayload", "1.1")["policy"] == "anti-affinity"
    assert opened(data["image"], "ImageMetaPayload", "1.0")["id"] == "i"
    legacy = unversioned.request_spec_payload(spec, (UUID,))["request_spec"]
    assert legacy["num_instances"] == 1
    assert legacy["instance_properties"]["uuid"] == UUID
    assert legacy["instance_type"]["memory_mb"] == 512
