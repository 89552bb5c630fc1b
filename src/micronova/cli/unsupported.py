"""What requests may ask for, by the settings: for the API, and for dry runs of the scheduler."""

import functools

from micronova.conf.settings import Settings
from micronova.objects.pci_devices import parse_aliases
from micronova.servers.honoured import Honoured
from micronova.servers.unsupported import Unsupported


def unsupported(settings: Settings) -> Unsupported:
    """Return what refuses requests that nothing here would honour."""
    honoured = functools.cache(functools.partial(_honoured, settings))
    return Unsupported(honoured, parse_aliases(settings.pci.alias))


def _honoured(settings: Settings) -> Honoured:
    """Return the scheduler hints and extra specs that the enabled filters honour, and their checks of these."""
    # Imported for the first request that needs them: filters need numpy, which is large.
    from micronova.scheduler.filters.base import FilterOptions
    from micronova.scheduler.filters.registry import load_filters

    filters = load_filters(
        FilterOptions(
            service_down_time=settings.default.service_down_time,
            settings=settings.filter_scheduler,
            metrics=settings.metrics,
        )
    )
    return Honoured.of(filters, settings)
