"""A server as the conductor knows it, and who asked for it."""

from typing import Any, cast

from micronova.objects.context import Context
from micronova.objects.instance import Fault, InstanceRow

CREATED = 1_351_518_131_000_000  # 2012-10-29 13:42:11 UTC
UUID = "178b0921-8f85-4257-88b6-2e743b5a975c"
PORT = "ce531f90-199f-48c0-816c-13e38010b442"

CONTEXT = Context(
    request_id="req-5b6c791d-5709-4f36-8fbe-c3e02869e35d", user_id="ada", project_id="engines", roles=("member",)
)
FAULT: Fault = {"code": 500, "message": "No valid host was found.", "details": "RamFilter: 3", "created": CREATED}


def server(**changes: Any) -> InstanceRow:
    """Return the row of a running server."""
    row: Any = {
        "uuid": UUID,
        "project_id": "engines",
        "user_id": "ada",
        "reservation_id": "r-npxv0e40",
        "launch_index": 0,
        "display_name": "some-server",
        "display_description": None,
        "hostname": "some-server",
        "vm_state": "active",
        "task_state": None,
        "power_state": 1,
        "progress": 0,
        "epoch": 2,
        "host": "compute-1",
        "node": "compute-1.example",
        "node_uuid": "n",
        "availability_zone": "nova",
        "image_ref": "155d900f-4e14-4e4c-a73d-069cbf4541e6",
        "image": {
            "id": "155d900f-4e14-4e4c-a73d-069cbf4541e6",
            "name": "cirros",
            "min_disk": 1,
            "min_ram": 0,
            "disk_format": "qcow2",
            "container_format": "bare",
            "properties": {"hw_architecture": "x86_64", "os_type": "linux"},
        },
        "flavor": {
            "id": "1",
            "name": "m1.tiny",
            "ram": 512,
            "vcpus": 1,
            "disk": 1,
            "ephemeral": 2,
            "swap": 0,
            "rxtx_factor": 1.0,
            "is_public": True,
            "disabled": False,
            "description": None,
            "extra_specs": {"hw:watchdog_action": "disabled"},
        },
        "key_name": "my-key",
        "key_data": "ssh-ed25519 AAAA me",
        "access_ip_v4": None,
        "access_ip_v6": None,
        "disk_config": "MANUAL",
        "locked_by": None,
        "locked_reason": None,
        "metadata": {"role": "web"},
        "tags": ["blue"],
        "network_info": [
            {
                "port_id": PORT,
                "network_id": "n1",
                "network_label": "private",
                "mac_address": "fa:16:3e:4c:2c:30",
                "fixed_ips": [{"address": "192.168.1.3", "version": 4, "subnet_id": "s", "floating": []}],
            }
        ],
        "trusted_certs": None,
        "system_metadata": None,
        "created_at": CREATED,
        "updated_at": CREATED + 2_000_000,
        "launched_at": CREATED + 1_500_000,
        "terminated_at": None,
        **changes,
    }
    return cast("InstanceRow", row)
