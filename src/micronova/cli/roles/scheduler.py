"""The scheduler."""

from functools import partial

from micronova.cli.wiring import Process, Role
from micronova.notifications import registration
from micronova.objects.pci_devices import parse_aliases
from micronova.objects.service_names import SCHEDULER
from micronova.scheduler.manager import SchedulerManager
from micronova.scheduler.prefilters import Prefilters


async def make(process: Process) -> Role:
    """Make the scheduler."""
    assert process.database is not None and process.bus is not None
    settings = process.settings
    return SchedulerManager(
        settings.filter_scheduler,
        settings.metrics,
        process.database,
        process.bus,
        process.clock,
        process.random,
        process.notifier.scheduler,
        process.telemetry.metrics.decision,
        partial(registration.announce, process.database, process.notifier, SCHEDULER, process.name),
        host=process.name,
        report_interval=settings.default.report_interval,
        service_down_time=settings.default.service_down_time,
        refresh_interval=settings.scheduler.refresh_interval,
        max_attempts=settings.scheduler.max_attempts,
        default_zone=settings.default.default_availability_zone,
        prefilters=Prefilters.of(settings.scheduler),
        pci_aliases=parse_aliases(settings.pci.alias),
    )
