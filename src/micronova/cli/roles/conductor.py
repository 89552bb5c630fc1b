"""The conductor with its engine of operations."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from micronova.cli.wiring import Process, Role
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor import (
    heal_network_info,
    incomplete_migrations,
    reclaim,
    rescue_timeout,
    resize_confirm,
    running_deleted,
    shelved_offload,
    usage_audit,
    volume_usage,
)
from micronova.conductor.host_keys import HostKeyIssuer
from micronova.conductor.host_users import HostUsers
from micronova.conductor.image_caching import CacheImagesTasks
from micronova.conductor.jobs import Jobs, PeriodicJob
from micronova.conductor.manager import PING_TIMEOUT, ConductorManager
from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Engine
from micronova.conductor.region_metrics import RegionMetrics
from micronova.conf.settings import Settings
from micronova.objects.pci_devices import parse_aliases
from micronova.plugins.hooks import Hooks


async def make(process: Process) -> Role:
    """Make the conductor with its engine of operations."""
    assert process.database is not None and process.bus is not None
    settings = process.settings
    owner = f"conductor:{process.name}:{process.random.getrandbits(48):012x}"
    await process.take_over_leases(owner)
    engine = Engine(
        process.database,
        process.clock,
        owner=owner,
        lease_seconds=settings.conductor.lease,
        sweep_interval=settings.conductor.sweep_interval,
        concurrency=settings.conductor.concurrency,
        proof_valid=_proof_valid(settings),
        after_commit=process.after_commit,
        observer=process.telemetry.operations,
    )
    dependencies = ConductorDependencies(
        engine=engine,
        compute=ComputeAPI(process.bus),
        secrets=process.secret_box(),
        network_client=process.clients.network_client(),
        image_client=process.clients.image_client(),
        volume_client=process.clients.volume_client(),
        volume_creation_timeout=settings.cinder.creation_timeout,
        reimage_timeout_per_gb=settings.default.reimage_timeout_per_gb,
        notifier=process.notifier,
        service_down_time=settings.default.service_down_time,
        operation_timeout=settings.default.instance_build_timeout,
        hooks=Hooks.load(),
        access_network=settings.default.default_access_ip_network_name,
        notifies_volume_usage=settings.default.volume_usage_poll_interval > 0,
        audit_period=settings.default.instance_usage_audit_period,
        pci_aliases=parse_aliases(settings.pci.alias),
    )
    process.telemetry.metrics.gauge(
        "micronova_conductor_unhealthy_seconds",
        "Seconds since this conductor could last tell dead hosts from an outage of its own; 0 while it can.",
        engine.health.unhealthy_for,
    )
    users = HostUsers(
        process.database,
        required=settings.conductor.require_host_users,
        own={process.host: str(process.agent.console)} if process.agent is not None else None,
    )
    return ConductorManager(
        bus=process.bus,
        dependencies=dependencies,
        host=process.name,
        report_interval=settings.default.report_interval,
        ratios=settings.default.initial_allocation_ratios(),
        stored_metrics=settings.metrics.ratios(),
        max_attempts=settings.scheduler.max_attempts,
        shelved_offload_time=settings.default.shelved_offload_time,
        host_users=users,
        host_keys=HostKeyIssuer(users, process.clients.keyring(), process.clock),
        image_caching=CacheImagesTasks(dependencies, settings.image_cache.precache_concurrency),
        region_metrics=RegionMetrics(
            process.database,
            process.bus,
            process.clock,
            process.telemetry.metrics,
            owner=engine.owner,
            service_down_time=settings.default.service_down_time,
        ),
        jobs=Jobs(
            process.database,
            process.clock,
            owner=engine.owner,
            keep_finished=settings.conductor.keep_finished,
            keep_deleted=settings.conductor.keep_deleted,
            more=_more_jobs(process, dependencies),
        ),
    )


def _more_jobs(process: Process, dependencies: ConductorDependencies) -> list[PeriodicJob]:
    """Return the periodic jobs that the settings turn on."""
    default, jobs = process.settings.default, []

    def add(name: str, interval: float, run: Callable[..., Awaitable[None]], *args: Any, **options: Any) -> None:
        jobs.append(PeriodicJob(name, functools.partial(run, *args, **options), interval))

    if timeout := default.rescue_timeout:
        add(rescue_timeout.NAME, rescue_timeout.INTERVAL, rescue_timeout.unrescue_overdue, dependencies, timeout)
    if (after := default.reclaim_instance_interval) > 0:
        add(reclaim.NAME, min(reclaim.LONGEST_INTERVAL, after), reclaim.reclaim, dependencies, after)
    if (window := default.resize_confirm_window) > 0:
        interval = min(resize_confirm.LONGEST_INTERVAL, window)
        add(resize_confirm.NAME, interval, resize_confirm.confirm_overdue, dependencies, window)
    if default.instance_usage_audit:
        database, period = dependencies.engine.database, default.instance_usage_audit_period
        audit = usage_audit.UsageAudit(database, process.clock, process.notifier, period=period)
        add(usage_audit.NAME, usage_audit.INTERVAL, audit.run)
    action, interval = default.running_deleted_instance_action, default.running_deleted_instance_poll_interval
    if action != "noop" and interval > 0:
        timeout = default.running_deleted_instance_timeout
        add(running_deleted.NAME, interval, running_deleted.find_running_deleted, dependencies, timeout, action)
    if dependencies.network_client is not None and (interval := default.heal_instance_info_cache_interval) > 0:
        add(heal_network_info.NAME, interval, heal_network_info.heal_network_info, dependencies)
    if (interval := default.instance_delete_interval) >= 0:
        interval = interval or incomplete_migrations.DEFAULT_INTERVAL
        add(incomplete_migrations.NAME, interval, incomplete_migrations.find_incomplete_migrations, dependencies)
    if (interval := default.volume_usage_poll_interval) > 0:
        add(volume_usage.NAME, interval, volume_usage.tell_volume_usage, dependencies)
    if (after := default.shelved_offload_time) > 0:
        add(shelved_offload.NAME, default.shelved_poll_interval, shelved_offload.offload_overdue, dependencies, after)
    return jobs


def _proof_valid(settings: Settings) -> float:
    """Return how long a conductor's proof of health holds: two heartbeats, but less than hosts need to look dead."""
    down = settings.default.service_down_time
    wanted = max(2 * settings.default.report_interval + PING_TIMEOUT, min(settings.conductor.lease, down) / 2)
    return min(wanted, 0.75 * down)
