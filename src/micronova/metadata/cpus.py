"""The CPUs that a guest has for itself, as meta_data.json lists them."""

from micronova.objects.errors import Invalid
from micronova.objects.guest_cpus import cpu_request
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.orders import InstanceSpec


def dedicated_cpus(instance: InstanceSpec) -> list[int]:
    """Return the numbers of the guest's pinned CPUs; none if flavor and image contradict each other."""
    flavor = instance.flavor
    try:
        return list(cpu_request(GuestProperties(flavor, instance.image), flavor.vcpus, flavor.ram).pinned)
    except Invalid:
        return []
