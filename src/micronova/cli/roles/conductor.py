"""The conductor with its engine of operations."""

from micronova.cli.wiring import Process, Role
from micronova.compute.rpcapi import ComputeAPI
from micronova.conductor.host_keys import HostKeyIssuer
from micronova.conductor.host_users import HostUsers
from micronova.conductor.jobs import Jobs
from micronova.conductor.manager import PING_TIMEOUT, ConductorManager
from micronova.conductor.operations.dependencies import Dependencies
from micronova.conductor.operations.engine import Engine
from micronova.conf.settings import Settings
from micronova.plugins.hooks import Hooks


async def make(process: Process) -> Role:
    """Make the conductor with its engine of operations."""
    assert process.database is not None and process.bus is not None
    settings = process.settings
    owner = f"conductor:{process.host}:{process.random.getrandbits(48):012x}"
    await process.take_over_leases(owner)
    engine = Engine(
        process.database,
        process.clock,
        owner=owner,
        lease=settings.conductor.lease,
        sweep_interval=settings.conductor.sweep_interval,
        concurrency=settings.conductor.concurrency,
        proof_valid=_proof_valid(settings),
        after_commit=process.after_commit,
        observer=process.telemetry.operations,
    )
    dependencies = Dependencies(
        engine=engine,
        compute=ComputeAPI(process.bus),
        secrets=process.secret_box(),
        network_client=process.clients.network_client(),
        image_client=process.clients.image_client(),
        notifier=process.notifier,
        service_down_time=settings.default.service_down_time,
        action_timeout=settings.default.instance_build_timeout,
        hooks=Hooks.load(),
        access_network=settings.default.default_access_ip_network_name,
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
        host=process.host,
        report_interval=settings.default.report_interval,
        ratios=_allocation_ratios(settings),
        max_attempts=settings.scheduler.max_attempts,
        host_users=users,
        host_keys=HostKeyIssuer(users, process.clients.keyring(), process.clock),
        jobs=Jobs(
            process.database,
            process.clock,
            owner=engine.owner,
            keep_finished=settings.conductor.keep_finished,
            keep_deleted=settings.conductor.keep_deleted,
        ),
    )


def _proof_valid(settings: Settings) -> float:
    """Return how long a conductor's proof of health holds: two heartbeats, but less than hosts need to look dead."""
    down = settings.default.service_down_time
    wanted = max(2 * settings.default.report_interval + PING_TIMEOUT, min(settings.conductor.lease, down) / 2)
    return min(wanted, 0.75 * down)


def _allocation_ratios(settings: Settings) -> dict[str, float]:
    """Return the allocation ratios of hosts that report none."""
    default = settings.default
    return {
        "VCPU": default.cpu_allocation_ratio,
        "MEMORY_MB": default.ram_allocation_ratio,
        "DISK_GB": default.disk_allocation_ratio,
    }
