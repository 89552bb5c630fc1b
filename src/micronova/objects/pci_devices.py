"""PCI devices by their settings: which devices of a host instances may have, and the aliases by which flavors ask.

The settings have Nova's names and forms: `pci.device_spec` of a host selects devices, `pci.alias` names kinds of them,
and a flavor's extra spec `pci_passthrough:alias` asks for "NAME:COUNT", several of them with commas between.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, get_args

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.guest_properties import FALSE_WORDS, TRUE_WORDS, GuestProperties
from micronova.objects.topology import LIVE_MIGRATABLE, AffinityPolicy, DeviceRequest, DeviceType, PciDevice

MOST_OF_AN_ALIAS: Final = 64
"""Devices of one alias that a flavor may ask for."""

_POLICIES: Final = get_args(AffinityPolicy)
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")
_ADDRESS: Final = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_PARTS: Final = ("domain", "bus", "slot", "function")


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """A name for devices; several definitions of one name are alternatives."""

    name: str
    policy: AffinityPolicy = "legacy"
    specs: tuple[dict[str, str], ...] = ()


def parse_aliases(settings: Iterable[Mapping[str, Any]]) -> dict[str, Alias]:
    """Return the aliases by name; raise Invalid if a definition is wrong."""
    found: dict[str, Alias] = {}
    for given in settings:
        known = {"name", "vendor_id", "product_id", "device_type", "numa_policy", "capability_type", LIVE_MIGRATABLE}
        if unknown := given.keys() - known:
            raise _wrong_alias(given, f"it may have {', '.join(sorted(known))}, not {', '.join(sorted(unknown))}")
        name = str(given.get("name", "")).strip()
        if not 1 <= len(name) <= 256 or ":" in name or "," in name:
            raise _wrong_alias(given, "it needs a name of at most 256 characters, without colons and commas")
        ids = {key: str(given.get(key, "")) for key in ("vendor_id", "product_id")}
        if not all(_HEX.fullmatch(value) for value in ids.values()):
            raise _wrong_alias(given, "it needs vendor_id and product_id of four hexadecimal digits")
        if given.get("capability_type", "pci") != "pci":
            raise _wrong_alias(given, "capability_type can only be pci")
        device_type, policy = given.get("device_type"), given.get("numa_policy", "legacy")
        if device_type is not None and device_type not in get_args(DeviceType):
            raise _wrong_alias(given, f"device_type is one of {', '.join(get_args(DeviceType))}")
        if policy not in _POLICIES:
            raise _wrong_alias(given, f"numa_policy is one of {', '.join(_POLICIES)}")
        try:
            migratable = _flag(given.get(LIVE_MIGRATABLE))
        except ValueError as error:
            raise _wrong_alias(given, str(error)) from None
        spec = ids | ({} if device_type is None else {"dev_type": device_type})
        spec |= {} if migratable is None else {LIVE_MIGRATABLE: "true" if migratable else "false"}
        before = found.get(name)
        if before is not None and (before.policy != policy or before.specs[0].get("dev_type") != spec.get("dev_type")):
            raise _wrong_alias(given, "all definitions of one name need the same numa_policy and device_type")
        specs = (*(before.specs if before is not None else ()), spec)
        found[name] = Alias(name=name, policy=policy, specs=specs)
    return found


def device_requests(properties: GuestProperties, aliases: Mapping[str, Alias]) -> tuple[DeviceRequest, ...]:
    """Return the devices that a flavor asks for; raise Invalid if there is no such alias."""
    text = properties.flavor("pci_passthrough:alias")
    if not text:
        return ()
    chosen = properties.agreed("pci_numa_affinity_policy")
    if chosen is not None and chosen not in _POLICIES:
        raise Invalid(f"hw:pci_numa_affinity_policy is {chosen!r}: it should be one of {', '.join(_POLICIES)}.")
    found = []
    for part in text.split(","):
        name, _, count = (each.strip() for each in part.partition(":"))
        if not count.isdecimal() or not 1 <= int(count) <= MOST_OF_AN_ALIAS:
            raise Invalid(
                f"pci_passthrough:alias is {text!r}: it should be NAME:COUNT, with a count of 1 to {MOST_OF_AN_ALIAS}, "
                "and several of them with commas between."
            )
        alias = aliases.get(name)
        if alias is None:
            raise Invalid(f"PCI alias {name} is not defined")
        policy: AffinityPolicy = chosen or alias.policy  # type: ignore[assignment]  # checked above
        found.append(DeviceRequest(alias=name, count=int(count), specs=alias.specs, policy=policy))
    return tuple(found)


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that instances may have: all that have these ids and an address like this."""

    vendor_id: str = "*"
    product_id: str = "*"
    address: tuple[str, str, str, str] = ("*", "*", "*", "*")  # shell patterns, or regular expressions after "re:"
    live_migratable: bool | None = None  # what it says of the devices

    def matches(self, device: PciDevice) -> bool:
        """Return whether it names a device, or the physical function of a device."""
        if self.vendor_id not in ("*", device.vendor_id.lower()) or (
            self.product_id not in ("*", device.product_id.lower())
        ):
            return False
        addresses = [device.address] + ([] if device.parent is None else [device.parent])
        return any(self._matches_address(address) for address in addresses)

    def _matches_address(self, address: str) -> bool:
        parts = _ADDRESS.fullmatch(address)
        return parts is not None and all(
            re.fullmatch(pattern[3:], part) is not None if pattern.startswith("re:") else fnmatchcase(part, pattern)
            for part, pattern in zip((each.lower() for each in parts.groups()), self.address, strict=True)
        )


def offered_devices(devices: Iterable[PciDevice], specs: Sequence[DeviceSpec]) -> list[PciDevice]:
    """Return the devices that the settings offer to guests; the first spec that names a device describes it."""
    found = ((device, next((spec for spec in specs if spec.matches(device)), None)) for device in devices)
    return [
        msgspec.structs.replace(device, live_migratable=spec.live_migratable)
        for device, spec in found
        if spec is not None
    ]


def parse_device_specs(settings: Sequence[Mapping[str, Any]]) -> tuple[DeviceSpec, ...]:
    """Return the specs of devices; raise Invalid if one is wrong."""
    return tuple(_device_spec(given) for given in settings)


def _device_spec(given: Mapping[str, Any]) -> DeviceSpec:
    known = ("vendor_id", "product_id", "address", LIVE_MIGRATABLE)
    if unknown := given.keys() - set(known):
        raise _wrong_spec(given, f"it may have {', '.join(known)}, not {', '.join(sorted(unknown))}")
    ids = {key: str(given.get(key, "*")).lower() for key in ("vendor_id", "product_id")}
    if not all(value == "*" or _HEX.fullmatch(value) for value in ids.values()):
        raise _wrong_spec(given, "vendor_id and product_id have four hexadecimal digits, or are *")
    address = given.get("address", "*")
    if isinstance(address, Mapping):
        if unknown := address.keys() - set(_PARTS):
            raise _wrong_spec(given, f"an address has {', '.join(_PARTS)}, not {', '.join(sorted(unknown))}")
        patterns = tuple(f"re:{address[part]}" if part in address else "*" for part in _PARTS)
        try:
            for pattern in patterns:
                re.compile(pattern.removeprefix("re:") if pattern != "*" else "")
        except re.error as error:
            raise _wrong_spec(given, f"its address has a wrong regular expression: {error}") from None
    else:
        split = _split_address(str(address).strip().lower())
        if split is None:
            raise _wrong_spec(given, "an address is like 0000:0a:00.1, in which * stands for any part")
        patterns = split
    try:
        migratable = _flag(given.get(LIVE_MIGRATABLE))
    except ValueError as error:
        raise _wrong_spec(given, str(error)) from None
    return DeviceSpec(
        vendor_id=ids["vendor_id"],
        product_id=ids["product_id"],
        address=patterns,  # type: ignore[arg-type]  # they are four
        live_migratable=migratable,
    )


def _split_address(text: str) -> tuple[str, ...] | None:
    if text == "*":
        return ("*", "*", "*", "*")
    rest, dot, function = text.partition(".")
    parts = rest.split(":")
    if len(parts) == 2:
        parts = ["*", *parts]
    whole = (*parts, function if dot else "*")
    return whole if len(whole) == 4 and all(re.fullmatch(r"[0-9a-f*]+", part) for part in whole) else None


def _flag(value: object) -> bool | None:
    """Return what live_migratable says, None if it is not there; raise ValueError if it says neither yes nor no."""
    if value is None or isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError("live_migratable is yes or no")
    return text in TRUE_WORDS


def _wrong_alias(given: Mapping[str, Any], reason: str) -> Invalid:
    return Invalid(f"The setting pci.alias {dict(given)} is wrong: {reason}.")


def _wrong_spec(given: Mapping[str, Any], reason: str) -> Invalid:
    return Invalid(f"The setting pci.device_spec {dict(given)} is wrong: {reason}.")
