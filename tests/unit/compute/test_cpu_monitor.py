"""The metrics of a host's processors."""

import pytest

from micronova.compute.cpu_monitor import CPUMonitor, metrics_of
from micronova.objects.orders import NodeResources
from micronova.virt.driver import CPUTimes
from micronova.virt.libvirt.resources import cpu_times
from tests.clocks import ManualClock

NODE = NodeResources(
    node="n", node_uuid="u", hypervisor_type="fake", hypervisor_version=1, vcpus=4, memory_mb=1, local_gb=1
)
BOOTED = CPUTimes(user=0, kernel=0, idle=0, iowait=0, frequency=0)


class Machine:
    """A machine whose processors work as told."""

    def __init__(self) -> None:
        self.times: CPUTimes | None = None

    async def get_host_cpu_stats(self) -> CPUTimes:
        if self.times is None:
            raise OSError("no answer")
        return self.times


def test_percentages_are_of_the_time_since_the_last_measurement() -> None:
    first = CPUTimes(user=10, kernel=10, idle=75, iowait=5, frequency=2000)
    assert metrics_of(first, BOOTED) == {
        "cpu.frequency": 2000,
        "cpu.user.time": 10, "cpu.kernel.time": 10, "cpu.idle.time": 75, "cpu.iowait.time": 5,
        "cpu.user.percent": 10, "cpu.kernel.percent": 10, "cpu.idle.percent": 75, "cpu.iowait.percent": 5,
        "cpu.percent": 25,
    }  # fmt: skip
    then = metrics_of(CPUTimes(user=60, kernel=10, idle=125, iowait=5, frequency=2000), first)
    assert (then["cpu.user.time"], then["cpu.user.percent"], then["cpu.idle.percent"]) == (60, 50, 50)
    assert metrics_of(first, first)["cpu.percent"] in range(101)


async def test_each_measurement_is_taken_once_and_a_failure_is_none(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    monitor = CPUMonitor(machine, ManualClock())
    await monitor.measure(NODE)
    assert monitor.take() is None and "node n could not be measured" in caplog.text
    machine.times = CPUTimes(user=1, kernel=0, idle=3, iowait=0, frequency=1)
    await monitor.measure(NODE)
    taken = monitor.take()
    assert taken is not None and (taken.node, taken.source, taken.values["cpu.percent"]) == ("n", "fake", 25)
    assert monitor.take() is None


def test_libvirt_measures_the_machine() -> None:
    connection = pytest.importorskip("libvirt").open("test:///default")
    times = cpu_times(connection)
    assert times.user > 0 and times.idle > 0 and times.frequency > 0
    connection.close()
