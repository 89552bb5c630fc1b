"""The CPUs that a guest has for itself, as meta_data.json lists them."""

from micronova.objects.cpu_sets import dedicated_vcpus
from micronova.objects.orders import InstanceSpec


def dedicated_cpus(instance: InstanceSpec) -> list[int]:
    """Return the numbers of the guest's pinned CPUs; none if the mask is wrong, which real hosts refuse to build."""
    image = instance.image.properties if instance.image else {}
    extra_specs = instance.flavor.extra_specs
    policy = extra_specs.get("hw:cpu_policy") or image.get("hw_cpu_policy") or ""
    mask = extra_specs.get("hw:cpu_dedicated_mask") or image.get("hw_cpu_dedicated_mask") or ""
    vcpus = instance.flavor.vcpus
    try:
        chosen = dedicated_vcpus(str(policy), str(mask), vcpus)
    except ValueError:
        return []
    return [cpu for cpu in chosen if cpu < vcpus]
