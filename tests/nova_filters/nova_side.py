"""What runs in an environment with Nova: asks Nova's own filters and weighers about hosts and requests.

    PYTHON nova_side.py < CASES        prints the answers to each line, a case in JSON, as a line of JSON

A case has settings, a request and hosts, as `tests.nova_filters.cases` makes them. The answer has, by filter, a list
with true, false or the text of an exception for each host, and by weigher a list of weights or the text of an
exception. This file imports nothing of ours, because Nova needs other versions of what we use.
"""

import contextlib
import datetime
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nova.conf  # type: ignore[import-not-found]
from nova import objects
from nova.pci import request as pci_request  # type: ignore[import-not-found]
from nova.scheduler import filters, host_manager  # type: ignore[import-not-found]
from nova.scheduler import weights as host_weights
from nova.scheduler.weights import image_props  # type: ignore[import-not-found]
from nova.virt import hardware  # type: ignore[import-not-found]
from oslo_utils import timeutils

sys.path.insert(0, str(Path(__file__).parents[1] / "nova_numa"))
import nova_side as numa  # type: ignore[import-not-found]

CONF = nova.conf.CONF


class Instances(list):  # type: ignore[type-arg]
    """The instances of a host, whose images Nova would read from its database."""

    def __init__(self, context: Any, objects: Any) -> None:
        super().__init__(objects)

    def fill_metadata(self) -> None:
        """Do nothing: they have their images."""


@contextlib.contextmanager
def one_cell(context: Any, cell: Any) -> Any:
    """Stand for the cell of a host."""
    yield context


def prepare() -> None:
    """Make Nova work without its database."""
    objects.register_all()
    CONF([], project="nova", default_config_files=[])
    CONF.set_override("service_down_time", 60)
    cells = SimpleNamespace(get_by_uuid=lambda context, uuid: uuid)
    image_props.objects = SimpleNamespace(CellMapping=cells, InstanceList=Instances)
    image_props.nova_context = SimpleNamespace(get_admin_context=lambda: None, target_cell=one_cell)


def an_image(given: dict[str, Any] | None) -> Any:
    """Return an image as Nova reads it from the image service."""
    return (
        None if given is None else objects.ImageMeta.from_dict({"id": given["id"], "properties": given["properties"]})
    )


def a_host(given: dict[str, Any]) -> Any:
    """Return the state of a host."""
    host = host_manager.HostState(given["host"], given["node"], "cell")
    host.uuid = given["node_uuid"]
    total, used = given["total"], given["used"]
    host.total_usable_ram_mb, host.total_usable_disk_gb = total["MEMORY_MB"], total["DISK_GB"]
    host.vcpus_total, host.vcpus_used = total["VCPU"], used["VCPU"]
    host.free_ram_mb = total["MEMORY_MB"] - used["MEMORY_MB"]
    host.free_disk_mb = (total["DISK_GB"] - used["DISK_GB"]) * 1024
    host.disk_mb_used = used["DISK_GB"] * 1024
    host.cpu_allocation_ratio = given["cpu_allocation_ratio"]
    host.ram_allocation_ratio = host.disk_allocation_ratio = 1.0
    for name in ("num_instances", "num_io_ops", "failed_builds", "host_ip", "hypervisor_type", "hypervisor_version"):
        setattr(host, name, given[name])
    host.hypervisor_hostname = given["node"]
    host.cpu_info = json.dumps(given["cpu_info"])
    host.stats = given["capabilities"]
    host.supported_instances = [list(each) for each in given["supported"]]
    host.metrics = objects.MonitorMetricList(
        objects=[objects.MonitorMetric(name=name, value=value) for name, value in given["metrics"].items()]
    )
    host.aggregates = [objects.Aggregate(name=name, metadata=metadata) for name, metadata in given["aggregates"]]
    host.instances = {uuid: SimpleNamespace(image_meta=an_image(image)) for uuid, image in given["instances"].items()}
    seen = datetime.datetime.fromtimestamp(given["last_seen"], datetime.UTC)
    host.service = {
        "disabled": not given["enabled"],
        "forced_down": given["forced_down"],
        "last_seen_up": seen,
        "host": given["host"],
        "binary": "nova-compute",
    }
    if given["hardware"] is not None:
        host.numa_topology = numa.host_of(given["hardware"])
        host.pci_stats = numa.devices_of(given["hardware"], host.numa_topology)
    return host


def a_request(given: dict[str, Any]) -> Any:
    """Return a request spec."""
    group = given["group"]
    flavor, image = objects.Flavor(**given["flavor"]), an_image(given["image"])
    seen = image or an_image({"id": "none", "properties": {}})
    policy = hardware.get_pci_numa_policy_constraint(flavor, seen)
    return objects.RequestSpec(
        project_id=given["project_id"],
        instance_uuid="00000000-0000-4000-8000-00000000abcd",
        flavor=flavor,
        image=image,
        scheduler_hints=given["hints"],
        requested_destination=None,
        numa_topology=hardware.numa_get_constraints(flavor, seen),
        pci_requests=pci_request.get_pci_requests_from_flavor(flavor, affinity_policy=policy),
        instance_group=None
        if group is None
        else objects.InstanceGroup(
            uuid="00000000-0000-4000-8000-00000000aaaa",
            policy=group["policy"],
            policies=[group["policy"]],
            rules={"max_server_per_host": group["max_server_per_host"]} if group["policy"] == "anti-affinity" else {},
            members=group["members"],
            hosts=group["hosts"],
        ),
    )


def verdict(each: Any, host: Any, request: Any) -> bool | str:
    """Return what a filter says of a host."""
    host.allocation_candidates = [{"mappings": {}}]  # filters remove those that they refuse
    try:
        return bool(each.host_passes(host, request))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def weighed(weigher: type, hosts: list[Any], request: Any) -> list[float] | str:
    """Return what one weigher adds to the weights of the hosts."""
    try:
        ranked = host_weights.HostWeightHandler().get_weighed_objects([weigher()], hosts, request)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    found = {id(each.obj): each.weight for each in ranked}
    return [found[id(host)] for host in hosts]


def main() -> None:
    """Answer each case."""
    prepare()
    known = filters.HostFilterHandler().get_all_classes()
    wanted = {each.__name__: each for each in known}
    weighers = {each.__name__: each for each in host_weights.HostWeightHandler().get_all_classes()}
    print(json.dumps({"filters": sorted(wanted), "weighers": sorted(weighers)}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        for section, options in case["settings"].items():
            for name, value in options.items():
                CONF.set_override(name, value, section)
        timeutils.set_time_override(datetime.datetime.fromtimestamp(case["now"], datetime.UTC).replace(tzinfo=None))
        hosts = [a_host(each) for each in case["hosts"]]
        request = a_request(case["request"])
        fitting = wanted["NUMATopologyFilter"]()
        answer = {
            "filters": {name: [verdict(wanted[name](), host, request) for host in hosts] for name in case["filters"]},
            "without_caches": [numa.without_caches(partial(verdict, fitting, host, request)) for host in hosts],
            "weighers": {name: weighed(weighers[name], hosts, request) for name in case["weighers"]},
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
