"""Which of its CPUs a guest has for itself alone."""

from micronova.objects.orders import InstanceSpec


def dedicated_cpus(instance: InstanceSpec) -> list[int]:
    """Return the numbers of the guest's CPUs that are pinned, as flavor or image ask for it."""
    image = instance.image.properties if instance.image else {}
    wishes = instance.flavor.extra_specs
    policy = wishes.get("hw:cpu_policy") or image.get("hw_cpu_policy")
    every = range(instance.flavor.vcpus)
    if policy == "dedicated":
        return list(every)
    if policy == "mixed":
        return sorted(_chosen(str(wishes.get("hw:cpu_dedicated_mask") or ""), every))
    return []


def _chosen(mask: str, every: range) -> set[int]:
    """Return what a mask names: numbers and ranges, `^` takes away; one that only takes away begins with all."""
    words = [word.strip() for word in mask.split(",") if word.strip()]
    chosen = set(every) if words and all(word.startswith("^") for word in words) else set()
    for word in words:
        first, _, last = word.removeprefix("^").partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            continue  # such a guest is refused by its host
        meant = {cpu for cpu in every if int(first) <= cpu <= int(last or first)}
        chosen = chosen - meant if word.startswith("^") else chosen | meant
    return chosen
