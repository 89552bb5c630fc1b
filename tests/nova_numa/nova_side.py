"""What runs in an environment with Nova: fits random instances onto random hosts with Nova's own functions.

    PYTHON nova_side.py < CASES

A line of the input is a list of cases, a line of the output the list of verdicts. A case is {"kind": "fit", …} or
{"kind": "request", …}; see `cases.py`. This file imports nothing of ours, because Nova needs other versions of what we
use.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import nova.conf  # type: ignore[import-not-found]
from nova import exception, objects
from nova.pci import stats, whitelist  # type: ignore[import-not-found]
from nova.virt import hardware  # type: ignore[import-not-found]
from oslo_utils.fixture import uuidsentinel

SPECIAL = {"small": hardware.MEMPAGES_SMALL, "large": hardware.MEMPAGES_LARGE, "any": hardware.MEMPAGES_ANY}
NAMES = {number: name for name, number in SPECIAL.items()}
ANY_DEVICE = json.dumps({"vendor_id": "*", "product_id": "*", "address": "*:*:*.*"})


class Forgetful(set):  # type: ignore[type-arg]
    """A set that does not find pairs: Nova's caches of which cells fit are such sets."""

    def __contains__(self, item: object) -> bool:
        return not isinstance(item, tuple) and super().__contains__(item)


def host_of(case: dict[str, Any]) -> Any:
    """Return the host as Nova's object."""
    return objects.NUMATopology(
        cells=[
            objects.NUMACell(
                id=cell["id"],
                cpuset=set(cell["shared"]),
                pcpuset=set(cell["dedicated"]),
                memory=cell["memory_mb"],
                cpu_usage=cell["cpu_usage"],
                memory_usage=cell["memory_usage"],
                pinned_cpus=set(cell["pinned"]),
                siblings=[set(each) for each in cell["siblings"]],
                socket=cell["socket"],
                mempages=[
                    objects.NUMAPagesTopology(size_kb=size, total=total, used=used, reserved=reserved)
                    for size, total, used, reserved in cell["pages"]
                ],
            )
            for cell in case["cells"]
        ]
    )


def instance_of(case: dict[str, Any]) -> Any:
    """Return the instance as Nova's object."""
    request = case["request"]
    return objects.InstanceNUMATopology(
        cells=[
            objects.InstanceNUMACell(
                id=cell["id"],
                cpuset=set(cell["shared"]),
                pcpuset=set(cell["pinned"]),
                memory=cell["memory_mb"],
                pagesize=SPECIAL.get(request["page_size"], request["page_size"]),
                cpu_policy=request["policy"],
                cpu_thread_policy=request["thread_policy"],
                cpu_pinning=None,
                cpuset_reserved=None,
            )
            for cell in request["cells"]
        ],
        emulator_threads_policy="isolate" if request["isolates_emulator"] else None,
    )


def devices_of(case: dict[str, Any], host: Any) -> Any:
    """Return the free devices as Nova's pools."""
    found = stats.PciDeviceStats(host, dev_filter=whitelist.Whitelist([ANY_DEVICE]))
    for device in case["devices"]:
        found.add_device(
            objects.PciDevice(
                address=device["address"],
                vendor_id=device["vendor_id"],
                product_id=device["product_id"],
                dev_type=device["dev_type"],
                numa_node=device["numa_node"],
                parent_addr=device["parent"],
                compute_node_id=1,
                extra_info={},
                status="available",
            )
        )
    return found


def requests_of(case: dict[str, Any]) -> list[Any]:
    """Return the requests for devices."""
    return [
        objects.InstancePCIRequest(
            count=each["count"],
            spec=each["specs"],
            alias_name=each["alias"],
            numa_policy=each["policy"],
            request_id=getattr(uuidsentinel, f"request{number}"),
        )
        for number, each in enumerate(case["request"]["devices"])
    ]


def fit(case: dict[str, Any]) -> Any:
    """Return where Nova places the instance: False, or a list of [host cell, page size, pins, reserved]."""
    host, requests = host_of(case), requests_of(case)
    devices = devices_of(case, host)
    if not case["request"]["cells"]:
        return [] if devices.support_requests(requests, {}) else False
    limits = objects.NUMATopologyLimits(cpu_allocation_ratio=case["cpu_ratio"], ram_allocation_ratio=case["ram_ratio"])
    found = hardware.numa_fit_instance_to_host(
        host, instance_of(case), {}, limits=limits, pci_requests=requests, pci_stats=devices
    )
    if found is None:
        return False
    return [
        [
            cell.id,
            cell.pagesize or None,
            sorted((cell.cpu_pinning or {}).items()),
            sorted(cell.cpuset_reserved or ()),
        ]
        for cell in found.cells
    ]


def without_caches(do: Callable[[], Any]) -> Any:
    """Do something, but let Nova try every pair of cells anew on cells that it has not changed before."""
    original = hardware._numa_fit_instance_cell

    def on_a_copy(host_cell: Any, instance_cell: Any, *others: Any) -> Any:
        return original(host_cell, copy.deepcopy(instance_cell), *others)

    hardware.set = Forgetful
    hardware._numa_fit_instance_cell = on_a_copy
    try:
        return do()
    finally:
        del hardware.set
        hardware._numa_fit_instance_cell = original


def request(case: dict[str, Any]) -> Any:
    """Return the NUMA nodes that Nova makes of flavor and image: None, False if it refuses, or a list of nodes."""
    flavor = objects.Flavor(
        vcpus=case["vcpus"], memory_mb=case["ram"], extra_specs=case["extra_specs"], flavorid="x", name="x"
    )
    try:
        image = objects.ImageMeta.from_dict({"id": uuidsentinel.image, "properties": case["properties"]})
        found = hardware.numa_get_constraints(flavor, image)
    except (exception.NovaException, ValueError):
        return False
    if found is None:
        return None
    return [
        [
            sorted(cell.cpuset),
            sorted(cell.pcpuset),
            cell.memory,
            NAMES.get(cell.pagesize, cell.pagesize),
            cell.cpu_policy or "shared",
            cell.cpu_thread_policy or "prefer",
            found.emulator_threads_isolated,
        ]
        for cell in found.cells
    ]


def judge(case: dict[str, Any]) -> Any:
    """Return Nova's verdict on a case."""
    if case["kind"] == "request":
        return request(case)
    return [fit(case), without_caches(lambda: fit(case))]


if __name__ == "__main__":
    nova.conf.CONF([], project="nova", default_config_files=[])
    objects.register_all()
    for line in sys.stdin:
        print(json.dumps([judge(case) for case in json.loads(line)]), flush=True)
