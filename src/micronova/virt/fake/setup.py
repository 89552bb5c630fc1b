"""Making simulated hosts from settings."""

from urllib.parse import quote

import msgspec

from micronova.conf.hosts import FakeSettings
from micronova.objects.errors import Invalid
from micronova.objects.mediated_devices import parse_mdev_types
from micronova.objects.wrong_values import wrong_value
from micronova.virt.fake.driver import FakeDriver
from micronova.virt.fake.faults import FaultRules
from micronova.virt.fake.guests import GuestStore
from micronova.virt.loader import DriverSetup


def create(setup: DriverSetup) -> dict[str, FakeDriver]:
    """Return the simulated hosts of this process: one with the host's own name, or a numbered series."""
    try:
        settings = msgspec.convert(dict(setup.options), FakeSettings)
    except msgspec.ValidationError as error:
        wrong = wrong_value(error, FakeSettings).named("the section fake")
        raise Invalid(f"The settings of the fake driver are wrong: {wrong}.") from error
    faults = FaultRules(setup.random)
    faults.replace(list(settings.rules))
    mdev_types = parse_mdev_types(setup.mdev_types, setup.mdev_sections)
    drivers = {}
    for name in _names(settings, setup.host):
        path = None if setup.state_dir is None else setup.state_dir / "guests" / f"{quote(name, safe='')}.jsonl"
        drivers[name] = FakeDriver(
            name,
            settings=settings,
            store=GuestStore(path),
            faults=faults,
            cloud_id=setup.cloud_id,
            clock=setup.clock,
            images=setup.images,
            mdev_types=mdev_types,
        )
    return drivers


def _names(settings: FakeSettings, host: str) -> list[str]:
    if settings.hosts == 1 and host:
        return [host]
    if settings.hosts > 1 and "{}" not in settings.host_pattern:
        raise Invalid(f"host_pattern {settings.host_pattern!r} gives all hosts one name: put {{}} for the number.")
    return [settings.host_pattern.replace("{}", str(number)) for number in range(1, settings.hosts + 1)]
