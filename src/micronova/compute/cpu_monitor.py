"""The CPU monitor: how busy the processors of a host are. It runs if `default.compute_monitors` names it.

A host measures when it reads its resources (`compute.resource_interval`), and its next heartbeat takes the metrics to a
conductor, which sends the notification `metrics.update`. Nothing is stored: metrics that are lost with a heartbeat are
out of date soon anyway. Names and meanings are Nova's.
"""

import logging

from micronova.objects.clock import Clock, micros
from micronova.objects.orders import HostMetrics, NodeResources
from micronova.virt.driver import CPUTimes, HostCPUStats

log = logging.getLogger(__name__)

NAME = "cpu.virt_driver"


class CPUMonitor:
    """Measures the processors of one host."""

    def __init__(self, driver: HostCPUStats, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock
        self._before = CPUTimes(user=0, kernel=0, idle=0, iowait=0, frequency=0)
        self._new: HostMetrics | None = None

    async def measure(self, node: NodeResources) -> None:
        """Measure what a node has done since the last time, at first since its machine was started."""
        try:
            times = await self._driver.get_host_cpu_stats()
        except Exception as error:  # drivers may raise anything; the host is as useful without metrics
            log.warning("the processors of node %s could not be measured; this is repeated: %s", node.node, error)
            return
        self._new = HostMetrics(
            node=node.node,
            host_ip=node.host_ip,
            source=node.hypervisor_type,
            taken_at=micros(self._clock.now()),
            values=metrics_of(times, self._before),
        )
        self._before = times

    def take(self) -> HostMetrics | None:
        """Return the metrics that were measured since the last call."""
        new, self._new = self._new, None
        return new


def metrics_of(now: CPUTimes, before: CPUTimes) -> dict[str, int]:
    """Return times since the machine was started, in nanoseconds, and percentages since the last measurement."""
    parts = {part: getattr(now, part) - getattr(before, part) for part in ("user", "kernel", "idle", "iowait")}
    passed = max(sum(parts.values()), 1)
    return {
        "cpu.frequency": now.frequency,
        **{f"cpu.{part}.time": getattr(now, part) for part in parts},
        **{f"cpu.{part}.percent": max(0, spent) * 100 // passed for part, spent in parts.items()},
        "cpu.percent": max(0, passed - parts["idle"]) * 100 // passed,
    }
