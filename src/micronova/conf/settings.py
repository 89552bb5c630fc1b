"""Every setting, typed, in one frozen object that is passed in; there is no global.

Sections and options have the names that Nova's operators know where the meaning is the same. Every option has a
default that works. The order of precedence: `MICRONOVA__SECTION__OPTION` in the environment, the TOML file, the
default. The sections are in the modules beside this one: what controls the cloud, what runs on hosts, and so on.
"""

import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Meta

from micronova.conf.api import APISettings, QuotaSettings
from micronova.conf.console import (
    ConsoleAuthSettings,
    ConsoleSettings,
    SerialConsoleSettings,
    SpiceSettings,
    VNCSettings,
)
from micronova.conf.control import (
    ConductorSettings,
    DatabaseSettings,
    FilterSchedulerSettings,
    ImageCacheSettings,
    MetricsSettings,
    NotificationsSettings,
    SchedulerSettings,
    TelemetrySettings,
    UpgradeLevelsSettings,
)
from micronova.conf.default import DefaultSettings
from micronova.conf.hosts import ComputeSettings, FakeSettings, NetworkAgentSettings
from micronova.conf.libvirt import LibvirtSectionSettings
from micronova.conf.pci import DevicesSettings, PCISettings
from micronova.conf.services import (
    BarbicanSettings,
    CinderSettings,
    GlanceSettings,
    IdentitySettings,
    ImageFormatSettings,
    ImageSettings,
    NeutronSettings,
    NovaSettings,
    PlacementSettings,
    SSLSettings,
    VolumeSettings,
)
from micronova.objects.errors import MicronovaError
from micronova.objects.wrong_values import WrongValue, similar, what_is_right, wrong_value

MDEV_SECTION: Final = "mdev_"
"""How the names of sections begin that are about one type of mediated devices."""


_MOVED: Final = {
    ("libvirt", "cpu_shared_set"): ("compute", "cpu_shared_set"),
    ("libvirt", "cpu_dedicated_set"): ("compute", "cpu_dedicated_set"),
    ("libvirt", "reserved_huge_pages"): ("default", "reserved_huge_pages"),
}
"""Settings that earlier versions had elsewhere; they are accepted there, too."""


HIDDEN: Final = "********"
"""What people see instead of a secret."""

_PASSWORD_IN_URL = re.compile(r"(\w://[^\s/:@]*:)\S*@")
_PASSWORD_IN_QUERY = re.compile(r"([?&](?:ssl)?password=)[^&\s]+", re.IGNORECASE)


class SettingsError(MicronovaError):
    """A setting is wrong; the message is one line for a person."""

    code = "settings"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, by section."""

    default: DefaultSettings = DefaultSettings()
    api: APISettings = APISettings()
    database: DatabaseSettings = DatabaseSettings()
    conductor: ConductorSettings = ConductorSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    filter_scheduler: FilterSchedulerSettings = FilterSchedulerSettings()
    metrics: MetricsSettings = MetricsSettings()
    quota: QuotaSettings = QuotaSettings()
    identity: IdentitySettings = IdentitySettings()
    glance: GlanceSettings = GlanceSettings()
    barbican: BarbicanSettings = BarbicanSettings()
    image: ImageSettings = ImageSettings()
    image_format: ImageFormatSettings = ImageFormatSettings()
    image_cache: ImageCacheSettings = ImageCacheSettings()
    neutron: NeutronSettings = NeutronSettings()
    network_agent: NetworkAgentSettings = NetworkAgentSettings()
    cinder: CinderSettings = CinderSettings()
    nova: NovaSettings = NovaSettings()
    placement: PlacementSettings = PlacementSettings()
    volume: VolumeSettings = VolumeSettings()
    ssl: SSLSettings = SSLSettings()
    compute: ComputeSettings = ComputeSettings()
    fake: FakeSettings = FakeSettings()
    libvirt: LibvirtSectionSettings = LibvirtSectionSettings()
    pci: PCISettings = PCISettings()
    devices: DevicesSettings = DevicesSettings()
    consoleauth: ConsoleAuthSettings = ConsoleAuthSettings()
    vnc: VNCSettings = VNCSettings()
    spice: SpiceSettings = SpiceSettings()
    serial_console: SerialConsoleSettings = SerialConsoleSettings()
    console: ConsoleSettings = ConsoleSettings()
    notifications: NotificationsSettings = NotificationsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    upgrade_levels: UpgradeLevelsSettings = UpgradeLevelsSettings()


def load(
    path: Path | None = None, environ: Mapping[str, str] | None = None, **overrides: Mapping[str, Any]
) -> Settings:
    """Read the file, then the environment, then `overrides` (by section); raise SettingsError in one line."""
    tree: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingsError(f"Cannot read {path}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not valid TOML: {error}.") from None
        # Sections of types of mediated devices come last: they add to the section devices.
        for name, value in sorted(document.items(), key=lambda item: item[0].startswith(MDEV_SECTION)):
            section = name if isinstance(value, dict) else "default"
            content = value if isinstance(value, dict) else {name: value}
            if isinstance(value, dict) and name.startswith(MDEV_SECTION):
                # A section for each type, as Nova has it. The case of the type's name counts.
                section, content = "devices", {"mdev": {name.removeprefix(MDEV_SECTION): value}}
                content["mdev"] |= tree.get(section, {}).get("mdev", {})
            tree.setdefault(section.lower(), {}).update(content)
    for name, text in (os.environ if environ is None else environ).items():
        if not name.startswith("MICRONOVA__"):
            continue
        section, _, option = name.removeprefix("MICRONOVA__").lower().partition("__")
        tree.setdefault(section, {})[option] = _from_text(section, option, text)
    for section, values in overrides.items():
        tree.setdefault(section, {}).update({k: v for k, v in values.items() if v is not None})
    _move(tree)
    try:
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        problem = _explain(wrong_value(error, Settings), tree)
        raise SettingsError(f"{problem} `micronova config` lists every setting with its meaning.") from None


def _explain(wrong: WrongValue, tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what is wrong with the settings and what would be right."""
    place, unknown = wrong.place, wrong.unknown
    if unknown:
        if not place:
            return f"There is no section {unknown}{similar(unknown, Settings.__struct_fields__)}."
        known = [name.partition(".")[2] for name, *_ in options() if name.startswith(f"{place}.")]
        return f"There is no setting {place}.{unknown}{similar(unknown, known)}."
    found = next((each for each in options() if re.fullmatch(rf"{re.escape(each[0])}([\[.].*)?", place)), None)
    if found is None:
        return f"The section {place.partition('.')[0]} is not a table of settings: write [{place.partition('.')[0]}]."
    name, default, description, kind = found
    section, _, option = name.partition(".")
    value = shown(name, tree.get(section, {}).get(option))
    return f"{name} is {_toml_like(value)}, and right is {_right(name, kind, default)}. {description}"


def _toml_like(value: Any) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, bytes) else "bytes"


def _right(name: str, kind: Any, default: Any) -> str:
    """Return in words which values a setting takes."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return f"a list, such as {_example(default, example(name))}"
    if origin is dict:
        return "a table"
    return what_is_right(_hint(name)).removesuffix(" or null")  # which TOML does not have


def _example(default: Any, named: Any) -> str:
    return _toml_like(msgspec.to_builtins(default) if named is None else named)


def example(name: str) -> Any:
    """Return an example of a setting's value; None if its default is one."""
    section = name.partition(".")[0]
    for each in _annotations(name):
        if isinstance(each, Meta) and each.examples:
            of_section = (each.extra or {}).get("examples", {})
            return of_section.get(section, each.examples[0])
    return None


def _annotations(name: str) -> tuple[Any, ...]:
    return typing.get_args(_hint(name))[1:]


def _hint(name: str) -> Any:
    section, _, option = name.partition(".")
    kind = next(each.type for each in msgspec.structs.fields(Settings) if each.name == section)
    return typing.get_type_hints(kind, include_extras=True)[option]


def is_secret(name: str) -> bool:
    """Return whether a setting is a password or a key."""
    return any(isinstance(each, Meta) and (each.extra or {}).get("secret") for each in _annotations(name))


def shown(name: str, value: Any) -> Any:
    """Return a value as people may see it: without a password or a key, and without that in a URL."""
    if is_secret(name):  # whatever its type: a number may be a password without quotes
        return value if value is None or value == "" else HIDDEN
    if isinstance(value, str):
        return _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}@", hide_password_in_query(value))
    if isinstance(value, tuple | list):
        return type(value)(shown(name, each) for each in value)
    return value


def hide_password_in_query(url: str) -> str:
    """Return a URL without the password that its query may have, as `?password=…` for libpq."""
    return _PASSWORD_IN_QUERY.sub(rf"\1{HIDDEN}", url)


def _move(tree: dict[str, dict[str, Any]]) -> None:
    """Put settings that have moved where they are now; raise SettingsError if one is in both places."""
    for (section, option), (new_section, new_option) in _MOVED.items():
        if option not in tree.get(section, {}):
            continue
        if new_option in tree.setdefault(new_section, {}):
            raise SettingsError(
                f"{section}.{option} and {new_section}.{new_option} are the same setting: "
                f"set {new_section}.{new_option} only."
            )
        tree[new_section][new_option] = tree[section].pop(option)


def _from_text(section: str, option: str, text: str) -> Any:
    """Read an environment value: a list option takes words separated by commas."""
    for name, _, _, kind in options():
        if name == f"{section}.{option}" and typing.get_origin(kind) is tuple:
            return [part.strip() for part in text.split(",") if part.strip()]
    return text


def options() -> list[tuple[str, Any, str, Any]]:
    """List every option: its name, default, meaning and type."""
    found = []
    for section in msgspec.structs.fields(Settings):
        hints = typing.get_type_hints(section.type, include_extras=True)
        for option in msgspec.structs.fields(section.type):
            annotated = typing.get_args(hints[option.name])
            description = next((m.description for m in annotated[1:] if isinstance(m, Meta)), "") or ""
            made = option.default_factory
            default = option.default if made is msgspec.NODEFAULT else made()
            found.append((f"{section.name}.{option.name}", default, description, annotated[0]))
    return found
