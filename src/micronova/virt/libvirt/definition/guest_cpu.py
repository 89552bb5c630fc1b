"""The CPU of this host's guests, and what it can do.

libvirt lists features beside the name of a model, which has more. What the model has it tells only when it is asked.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import NotSupported
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.library import is_error, is_lost
from micronova.virt.libvirt.client.xmltree import child, element, parse, unparse
from micronova.virt.libvirt.definition.types import Cpu
from micronova.virt.libvirt.host import HostFacts

log = logging.getLogger(__name__)

PLAIN_MODELS: Final = {"x86_64": "Nehalem"}
"""The CPU model without KVM: the oldest that today's distributions run on."""
_OF_QEMU: Final = {"x86_64": "qemu64", "i686": "qemu32"}  # the model of a guest whose definition names none
_EXPAND: Final = 1  # VIR_CONNECT_BASELINE_CPU_EXPAND_FEATURES


def guest_cpu(facts: HostFacts, settings: LibvirtSettings) -> Cpu:
    """Return the CPU of guests; raise NotSupported if this host's CPU is none that the settings name."""
    if not facts.is_qemu:
        return Cpu()
    flags = tuple(
        (flag.lstrip("+-"), "disable" if flag.startswith("-") else "require") for flag in settings.cpu_model_extra_flags
    )
    mode, model = settings.cpu_mode, ""
    if mode == "auto":
        plain = PLAIN_MODELS.get(facts.arch, "")
        if facts.virt_type == "kvm":
            mode = "host-model" if "host-model" in facts.cpu_modes else "host-passthrough"
        elif plain in facts.usable_models:
            mode, model = "custom", plain
        else:
            mode = "none"
    elif mode == "custom":
        wanted = settings.cpu_models
        found = next((name for name in wanted if not facts.usable_models or name in facts.usable_models), None)
        if found is None:
            known = ", ".join(wanted) or "there are none"
            raise NotSupported(f"This host's CPU can be none of the cpu_models: {known}.")
        model = found
    return Cpu(mode=mode, model=model, flags=() if mode == "none" else flags)


def with_all_features(connection: Connect, facts: HostFacts, settings: LibvirtSettings) -> HostFacts:
    """Return the facts with the features of the host's CPU and of its guests', also those of their models. Blocks."""

    def of_host() -> str:
        return connection.baselineCPU([_document(facts.arch, facts.cpu_model)], _EXPAND)

    own = frozenset(facts.cpu_features) | _expanded(connection, facts.cpu_model, of_host, otherwise=frozenset())
    facts = dataclasses.replace(facts, cpu_features=tuple(sorted(own)))
    return dataclasses.replace(facts, guest_features=_guest_features(connection, facts, settings))


def _guest_features(connection: Connect, facts: HostFacts, settings: LibvirtSettings) -> frozenset[str]:
    most = frozenset(facts.cpu_features)
    if not facts.is_qemu:
        return most
    try:
        cpu = guest_cpu(facts, settings)
    except NotSupported:  # so no guest starts here
        return frozenset()
    model, policies = cpu.model or _OF_QEMU.get(facts.arch, ""), cpu.flags
    if follows_host := cpu.mode not in ("none", "custom"):
        # What libvirt calls the host's model is the most that this hypervisor gives guests.
        model, policies = facts.host_model, (*facts.host_model_features, *cpu.flags)

    def of_guests() -> str:
        return connection.baselineHypervisorCPU(
            None, facts.arch, None, facts.virt_type, [_document(facts.arch, model)], _EXPAND
        )

    unknown = most if follows_host and facts.virt_type == "kvm" else frozenset[str]()
    found = set(_expanded(connection, model, of_guests, otherwise=unknown))
    for name, policy in policies:
        (found.discard if policy == "disable" else found.add)(name)
    return frozenset(found)


def _document(arch: str, model: str) -> str:
    cpu = element("cpu")
    child(cpu, "arch", arch)
    child(cpu, "model", model)
    return unparse(cpu)


def _expanded(connection: Connect, model: str, ask: Callable[[], str], *, otherwise: frozenset[str]) -> frozenset[str]:
    """Return the features of a model as libvirt lists them, or others if libvirt cannot tell, for whatever reason."""
    if not model:
        return otherwise
    try:
        answer = parse(ask())
    except Exception as error:
        if not is_error(error) or is_lost(error, connection):
            raise
        log.info("libvirt does not tell the features of the CPU model %s: no traits follow from it (%s)", model, error)
        return otherwise
    named = ((feature.get("name", ""), feature.get("policy")) for feature in answer.iterfind("feature"))
    return frozenset(name for name, policy in named if policy != "disable")
