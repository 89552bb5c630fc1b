"""What flavors and images ask of resource providers: `resources:`, `trait:` and request groups, by Nova's syntax.

Without a suffix, `resources:CLASS=N` replaces the amount of CPUs, memory or disk that follows from flavor and image;
the compute node itself has these. A group with one of these classes replaces it, too. Another class is served by any
provider of the node's tree. `trait:NAME=required` is about the compute node and the providers that serve such classes,
together; none of them has a trait that is `forbidden`. Secure boot that is required is such a trait. With a suffix
(`resources_NET:CLASS=N`, `trait_NET:NAME=required`), they are a request group, which one provider of the tree serves.
Dedicated CPUs (PCPU) are claimed by name: how many follows from `hw:cpu_policy`, or from `resources:PCPU`, which must
name as many as the flavor has.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from micronova.objects.errors import Invalid
from micronova.objects.flavor import Flavor
from micronova.objects.guest_cpus import THREADS
from micronova.objects.image import ImageMeta
from micronova.objects.port_resources import PortResources
from micronova.objects.remember_last import RememberLast
from micronova.objects.topology_request import resources_of
from micronova.placement import port_groups
from micronova.placement.model import RequestGroup, ResourceRequest
from micronova.placement.standard import NODE_CLASSES, SECURE_BOOT

_KEY: Final = re.compile(r"(resources|trait)([a-zA-Z0-9_-]{0,64}):([A-Z0-9_]+)")
_NAMESPACE: Final = re.compile(r"(resources|trait)[a-zA-Z0-9_-]{0,64}:")
GROUP_POLICY: Final = "group_policy"
_OF_FLAVORS: Final = tuple(name for name in NODE_CLASSES if name != "PCPU")
"""Classes of which a server takes what its flavor has, unless an extra spec names them."""
_POLICIES: Final = (None, "none", "isolate")  # None: none is given


def node_resources(flavor: Flavor, image: ImageMeta | None) -> dict[str, int]:
    """Return what one server of the flavor and the image holds of its compute node, by resource class."""
    return dict(_node_resources(flavor, image))


def _find_node_resources(flavor: Flavor, image: ImageMeta | None) -> dict[str, int]:
    amounts = resources_of(flavor, image)
    if not flavor.extra_specs:
        return amounts
    own = _own(flavor)
    named = {name for kind, _, name, _ in _parts(flavor.extra_specs) if kind == "resources"}
    replaced = {name: own.get(name, 0) for name in _OF_FLAVORS if name in named}
    return {name: amount for name, amount in (amounts | replaced).items() if amount}


_node_resources = RememberLast(_find_node_resources)


def traits(flavor: Flavor, image: ImageMeta | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the traits that are required, and those that are forbidden, without a suffix."""
    of_flavor, of_image = _traits(flavor.extra_specs, "os:secure_boot"), traits_of_image(image)
    return of_flavor[0] | of_image[0], of_flavor[1] | of_image[1]


def traits_of_image(image: ImageMeta | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return those of `traits` that the image asks for, whatever the flavor does."""
    return _traits(image.properties if image is not None else {}, "os_secure_boot")


def _traits(specs: Mapping[str, Any], secure_boot: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the traits of a flavor's extra specs or an image's properties; they have other names of secure boot."""
    found: dict[str, set[str]] = {"required": set(), "forbidden": set()}
    if specs.get(secure_boot) == "required":
        found["required"].add(SECURE_BOOT)
    for kind, suffix, name, value in _parts(specs):
        if kind == "trait" and not suffix:
            found[_trait_requirement(name, value)].add(name)
    return frozenset(found["required"]), frozenset(found["forbidden"])


def all_required_traits(flavor: Flavor, image: ImageMeta | None, ports: Sequence[PortResources] = ()) -> frozenset[str]:
    """Return the traits that flavor, image or ports require of any provider; those of flavors also with a suffix."""
    of_ports = (trait for port in ports for group in port.groups for trait in group.required)
    of_flavor = (
        name
        for kind, _, name, value in _parts(flavor.extra_specs)
        if kind == "trait" and _trait_requirement(name, value) == "required"
    )
    return frozenset(of_ports) | frozenset(of_flavor) | traits(flavor, image)[0]


def node_traits(flavor: Flavor, image: ImageMeta | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the traits that the compute node itself must have, and those that it must not have."""
    required, forbidden = traits(flavor, image)
    return frozenset() if _of_the_tree(flavor) else required, forbidden


def node_traits_of_image(flavor: Flavor, image: ImageMeta | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return those of `node_traits` that the image asks for, whatever the flavor does."""
    required, forbidden = traits_of_image(image)
    return frozenset() if _of_the_tree(flavor) else required, forbidden


def resource_request(
    flavor: Flavor, image: ImageMeta | None, ports: Sequence[PortResources] = ()
) -> ResourceRequest | None:
    """Return what providers of the node's tree serve besides the node itself; None if nothing.

    The policy of the flavor counts for the groups of ports, too. Without one, a provider may serve several groups.
    """
    own = _resource_request(flavor, image)
    if not ports:
        return own
    isolate = flavor.extra_specs.get(GROUP_POLICY) == "isolate"
    of_ports = port_groups.request_of(ports, isolate)
    return of_ports if own is None else dataclasses.replace(of_ports, groups=own.groups + of_ports.groups)


def _resource_request(flavor: Flavor, image: ImageMeta | None) -> ResourceRequest | None:
    amounts: dict[str, dict[str, int]] = {}
    required: dict[str, set[str]] = {}
    forbidden: dict[str, set[str]] = {}
    for kind, suffix, name, value in _parts(flavor.extra_specs):
        if not suffix:
            continue
        if kind == "resources":
            amounts.setdefault(suffix, {})[name] = _amount(name, value)
        else:
            (required if _trait_requirement(name, value) == "required" else forbidden).setdefault(suffix, set()).add(
                name
            )
    elsewhere = _of_the_tree(flavor)
    if not amounts and not elsewhere:
        return None
    anywhere: tuple[RequestGroup, ...] = ()
    if elsewhere:
        wanted, unwanted = traits(flavor, image)
        any_of = tuple(frozenset({name}) for name in sorted(wanted))
        anywhere = (RequestGroup(resources=elsewhere, required=any_of, forbidden=unwanted, with_root=True),)
    return ResourceRequest(
        groups=anywhere
        + tuple(
            RequestGroup(
                suffix=suffix,
                resources={name: amount for name, amount in own.items() if amount},
                required=tuple(frozenset({name}) for name in sorted(required.get(suffix, ()))),
                forbidden=frozenset(forbidden.get(suffix, ())),
            )
            for suffix, own in sorted(amounts.items())
            if any(own.values())
        ),
        isolate=flavor.extra_specs.get(GROUP_POLICY) == "isolate",
    )


def check(flavor: Flavor, image: ImageMeta | None = None) -> None:
    """Raise Invalid for what cannot be meant: wrong values, contradictions, request groups without resources."""
    for key in (*flavor.extra_specs, *(image.properties if image is not None else ())):
        if _NAMESPACE.match(key) and not _KEY.fullmatch(key):
            raise Invalid(
                f"{key[:255]!r} must name a resource class or a trait: capital letters, digits and underscores."
            )
    _check_image(image)
    required, forbidden = traits(flavor, image)
    if both := required & forbidden:
        raise Invalid(f"The trait {min(both)} is both required and forbidden by flavor {flavor.name} or the image.")
    own = _own(flavor)
    policy = flavor.extra_specs.get("hw:cpu_policy") or (image and image.properties.get("hw_cpu_policy"))
    for kind, suffix, name, value in _parts(flavor.extra_specs):
        if kind == "resources" and name in ("VCPU", "PCPU") and policy and _amount(name, value):
            raise Invalid(
                f"The extra spec resources{suffix}:{name} of flavor {flavor.name} contradicts the CPU policy {policy} "
                "of the flavor or the image, from which the CPUs follow. Use one of them."
            )
        if kind == "resources" and name == "PCPU" and suffix:
            raise Invalid(
                f"The extra spec resources{suffix}:PCPU of flavor {flavor.name} is not supported: dedicated CPUs are "
                "always those of the compute node. Use resources:PCPU."
            )
    if own.get("VCPU") and own.get("PCPU"):
        raise Invalid(f"Flavor {flavor.name} has both resources:VCPU and resources:PCPU: use one of them.")
    _check_threads(flavor, image, is_pinned=bool(own.get("PCPU")) or policy in ("dedicated", "mixed"))
    named = {suffix for kind, suffix, _, _ in _parts(flavor.extra_specs) if suffix and kind == "trait"}
    request = resource_request(flavor, image)
    asked = {group.suffix for group in request.groups if group.suffix} if request is not None else set()
    if without_resources := named - asked:
        group = min(without_resources)
        raise Invalid(f"Flavor {flavor.name} has traits of the request group {group}, and no resources{group}:CLASS.")
    group_policy = flavor.extra_specs.get(GROUP_POLICY)
    if group_policy not in _POLICIES:
        raise Invalid(f"The extra spec {GROUP_POLICY} of flavor {flavor.name} must be none or isolate.")
    if len(asked) > 1 and group_policy is None:
        raise Invalid(f"Flavor {flavor.name} has several request groups: {GROUP_POLICY} must be none or isolate.")


def _check_threads(flavor: Flavor, image: ImageMeta | None, *, is_pinned: bool) -> None:
    """Raise Invalid for the trait of threads where it is no thread policy; servers that exist may have it so."""
    properties = {} if image is None else image.properties
    if THREADS not in flavor.extra_specs and THREADS not in properties:
        return
    if not is_pinned:
        raise Invalid(f"{THREADS} needs dedicated CPUs: hw:cpu_policy dedicated or mixed, or resources:PCPU.")
    if flavor.extra_specs.get("hw:cpu_thread_policy") or properties.get("hw_cpu_thread_policy"):
        raise Invalid(f"{THREADS} and a cpu_thread_policy say the same: use one of them.")


def _check_image(image: ImageMeta | None) -> None:
    """Raise Invalid for a wrong value of a property, also of one that would count only in a flavor."""
    if image is None:
        return
    for kind, _, name, value in _parts(image.properties):
        if kind == "resources":
            _amount(name, value)
        else:
            _trait_requirement(name, value)
    if image.properties.get(GROUP_POLICY) not in _POLICIES:
        raise Invalid(f"The property {GROUP_POLICY} of image {image.id} must be none or isolate.")


def is_of_placement(name: str) -> bool:
    """Return whether an extra spec or a property names a resource class or a trait, with or without a suffix."""
    return _KEY.fullmatch(name) is not None


def _parts(specs: Mapping[str, object]) -> list[tuple[str, str, str, str]]:
    """Return the extra specs that are about resources and traits: kind, suffix, name, value."""
    return [
        (found[1], found[2], found[3], str(value).strip())
        for key, value in specs.items()
        if (found := _KEY.fullmatch(key)) is not None
    ]


def _own(flavor: Flavor) -> dict[str, int]:
    """Return the amounts that a flavor itself names without a suffix, by resource class."""
    return {
        name: _amount(name, value)
        for kind, suffix, name, value in _parts(flavor.extra_specs)
        if kind == "resources" and not suffix
    }


def _of_the_tree(flavor: Flavor) -> dict[str, int]:
    """Return the amounts without a suffix that any provider of the node's tree may serve, by resource class."""
    return {name: amount for name, amount in _own(flavor).items() if amount and name not in NODE_CLASSES}


def _amount(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise Invalid(f"The amount of the resource class {name} must be a whole number from 0 on, not {value[:64]!r}.")
    return int(value)


def _trait_requirement(name: str, value: str) -> str:
    if value not in ("required", "forbidden"):
        raise Invalid(f"The trait {name} must be required or forbidden, not {value[:64]!r}.")
    return value
