"""Policies to compare: the settings of a scheduler, under a name."""

import random as random_module
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from micronova.conf.control import FilterSchedulerSettings, SchedulerSettings
from micronova.conf.settings import Settings, SettingsError, load
from micronova.fleetsim.trace import Request
from micronova.objects.errors import Invalid
from micronova.objects.pci_devices import parse_aliases
from micronova.objects.topology_request import topology_request
from micronova.placement import extra_specs
from micronova.scheduler.filter_scheduler import FilterScheduler
from micronova.scheduler.prefilters import Prefilters
from micronova.servers.honoured import Honoured
from micronova.servers.unsupported import Unsupported

_IMAGES: Final = frozenset({"image_props_weight_multiplier", "image_props_weight_setting"})
_OF_HOSTS: Final = (
    "cpu_allocation_ratio",
    "ram_allocation_ratio",
    "disk_allocation_ratio",
    "reserved_host_cpus",
    "reserved_host_memory_mb",
    "reserved_host_disk_mb",
)
OPTIONS: Final[dict[str, str]] = {
    **dict.fromkeys(_OF_HOSTS, "default"),
    **{name: "scheduler" for name in SchedulerSettings.__struct_fields__ if name != "refresh_interval"},
    **{name: "filter_scheduler" for name in FilterSchedulerSettings.__struct_fields__ if name not in _IMAGES},
}
"""The options that a policy on the command line may have, with their sections."""

_LISTS: Final = frozenset(
    option for option, section in OPTIONS.items() if isinstance(getattr(getattr(Settings(), section), option), tuple)
)

KNOWN: Final[dict[str, dict[str, str]]] = {
    "spread": {},
    "pack": {f"{name}_weight_multiplier": "-1" for name in ("ram", "cpu", "disk")},
}
"""Policies that need only their name. The default settings spread servers over hosts."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A name, the settings, and those that differ from the defaults."""

    name: str
    settings: Settings
    changed: dict[str, str]


def parse_policy(text: str) -> Policy:
    """Return the policy of `NAME`, `NAME=FILE.toml` or `NAME=OPTION=VALUE,…`; raise Invalid."""
    name, equals, rest = (part.strip() for part in text.partition("="))
    if not name:
        raise Invalid(f"The policy {text!r} has no name: write NAME=OPTION=VALUE,OPTION=VALUE or NAME=FILE.toml.")
    if not equals:
        if name not in KNOWN:
            raise Invalid(
                f"There is no policy {name}: write {' or '.join(KNOWN)}, or give it settings, such as "
                f"{name}=ram_weight_multiplier=-1,cpu_allocation_ratio=2."
            )
        return _checked(name, None, KNOWN[name])
    if rest.endswith(".toml"):
        return _checked(name, Path(rest), {})
    return _checked(name, None, _options(name, rest))


def _options(policy: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        option, equals, value = (each.strip() for each in part.partition("="))
        section, dot, bare = option.rpartition(".")
        if not equals or not option:
            raise Invalid(f"{part!r} of the policy {policy} is no setting: write OPTION=VALUE; in lists, + is between.")
        if bare not in OPTIONS or (dot and section != OPTIONS[bare]):
            raise Invalid(
                f"The policy {policy} cannot have the setting {option}: it may have {', '.join(sorted(OPTIONS))}."
            )
        found[bare] = value
    return found


def _checked(name: str, path: Path | None, changed: Mapping[str, str]) -> Policy:
    environ = {
        f"MICRONOVA__{OPTIONS[option]}__{option}".upper(): value.replace("+", ",") if option in _LISTS else value
        for option, value in changed.items()
    }
    try:
        settings = load(path, environ)
    except SettingsError as error:
        raise Invalid(f"The policy {name}: {error.message}") from None
    if settings.filter_scheduler.image_props_weight_multiplier:
        raise Invalid(f"The policy {name} has image_props_weight_multiplier, which is not simulated: leave it at 0.")
    if settings.metrics.weight_setting:
        raise Invalid(f"The policy {name} has metrics.weight_setting, but simulated hosts measure nothing: remove it.")
    shown = dict(changed) if path is None else _differences(settings)
    return Policy(name=name, settings=settings, changed=shown)


def _differences(settings: Settings) -> dict[str, str]:
    """Return the simulated options that differ from the defaults."""
    plain = Settings()
    found = {}
    for option, section in OPTIONS.items():
        value = getattr(getattr(settings, section), option)
        if value != getattr(getattr(plain, section), option):
            found[option] = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return found


class PolicyScheduler:
    """The scheduler of a policy, and what its filters honour."""

    def __init__(self, policy: Policy, seed: int) -> None:
        settings = policy.settings
        self.aliases = parse_aliases(settings.pci.alias)
        self.scheduler = FilterScheduler.of(
            settings.filter_scheduler,
            settings.metrics,
            random=random_module.Random(seed),
            service_down_time=settings.default.service_down_time,
            max_attempts=settings.scheduler.max_attempts,
            prefilters=Prefilters.of(settings.scheduler),
            aliases=self.aliases,
        )
        self._policy = policy.name
        honoured = Honoured.of(self.scheduler.filters, settings)
        self._hints = honoured.hints
        self._unsupported = Unsupported(lambda: honoured, self.aliases)

    def check(self, requests: Iterable[Request], zones: Iterable[str]) -> None:
        """Raise Invalid for a request that the API would refuse with these settings, or that cannot be simulated."""
        known, seen = frozenset(zones), set[bytes]()
        for request in requests:
            spec = request.spec
            key = msgspec.msgpack.encode((spec.flavor, spec.image, spec.availability_zone, sorted(spec.hints.items())))
            if key in seen:
                continue
            seen.add(key)
            try:
                self._check(request, known)
            except Invalid as error:
                where = f"Line {request.line}: " if request.line else ""
                raise Invalid(f"{where}{error.message} (Policy {self._policy}.)") from None

    def _check(self, request: Request, zones: frozenset[str]) -> None:
        spec = request.spec
        if spec.availability_zone is not None and spec.availability_zone not in zones:
            raise Invalid(
                f"The fleet has no zone {spec.availability_zone}: its hosts are in {', '.join(sorted(zones))}."
            )
        if unknown := sorted(spec.hints.keys() - self._hints):
            known = ", ".join(sorted(self._hints)) or "none"
            raise Invalid(f"No enabled filter honours the hint {unknown[0]}; hints that have a filter: {known}.")
        self._unsupported.check_hints(spec.hints)
        self._unsupported.check_flavor(spec.flavor)
        if spec.image is not None:
            self._unsupported.check_properties(spec.image, spec.flavor)
        if extra_specs.resource_request(spec.flavor, spec.image) is not None:
            raise Invalid(
                f"Flavor {spec.flavor.name} asks for request groups (resources_NAME:CLASS), or for other classes "
                "than VCPU, MEMORY_MB and DISK_GB, which are not simulated: leave them out."
            )
        topology_request(spec.flavor, spec.image, self.aliases)
