"""The simulator: guests that survive, faults by rule, plausible consoles."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from micronova.objects import power_state
from micronova.objects.errors import (
    BuildAborted,
    Conflict,
    InstanceNotFound,
    InsufficientResources,
    Invalid,
    Unavailable,
)
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF, FixedIP
from micronova.objects.volume import AttachedVolume, NBDConnection
from micronova.virt.driver import CAPABILITIES, Driver, DriverFailed, GuestPlan, Lifecycle, implemented
from micronova.virt.fake import guests as guests_module
from micronova.virt.fake.faults import FaultRule, FaultRules
from micronova.virt.fake.guests import FakeGuest, GuestStore
from micronova.virt.loader import DriverSetup, create_drivers, load_compute_driver
from tests.clocks import ManualClock, settle
from tests.unit.compute.agent_harness import order


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Lifecycle]] = []

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        self.seen.append((uuid, event))

    def connection_failed(self, message: str) -> None:
        raise AssertionError(message)


def make(state_dir: Path | None = None, *, cloud: str = "cloud-1", host: str = "host-1", **options: Any) -> Any:
    clock = ManualClock()
    setup = DriverSetup(host=host, cloud_id=cloud, clock=clock, random=Random(1), state_dir=state_dir, options=options)
    return next(iter(create_drivers("fake", setup).values()))


async def plugged() -> None: ...


def plan(uuid: str = "i-1", epoch: int = 1, **fields: Any) -> GuestPlan:
    vif = VIF(
        port_id="p",
        network_id="n",
        network_label="private",
        mac_address="fa:16:3e:00:00:01",
        fixed_ips=(FixedIP(address="10.0.0.5"),),
    )
    an_order = order(uuid=uuid, epoch=epoch, **fields)
    return GuestPlan(instance=an_order.instance, epoch=epoch, plugged=plugged, network_info=(vif,))


async def test_it_is_a_driver_with_all_that_it_implements() -> None:
    driver = make()
    assert isinstance(driver, Driver)
    assert driver.capabilities() == implemented(driver)
    assert {"console_log", "host_uptime", "fault_injection"} <= driver.capabilities() <= frozenset(CAPABILITIES)


async def test_the_life_of_a_guest() -> None:
    driver, events = make(), Events()
    await driver.init_host(events)
    await driver.spawn(plan())
    await driver.power_off("i-1", 60.0)
    await driver.power_off("i-1", 60.0)
    await driver.power_on(plan())
    await driver.power_on(plan())
    await driver.reboot(plan(), "HARD")
    assert [event for _, event in events.seen] == ["started", "stopped", "started", "started"]
    await driver.destroy("i-1")
    await driver.destroy("i-1")
    assert await driver.info("i-1") is None
    assert await driver.list_guests() == []


async def test_a_guest_cannot_be_made_twice() -> None:
    driver = make()
    await driver.spawn(plan())
    with pytest.raises(Conflict):
        await driver.spawn(plan(epoch=2))


async def test_what_is_not_there() -> None:
    driver = make()
    for action in (driver.power_on(plan()), driver.power_off("i-1", 0.0), driver.reboot(plan(), "SOFT")):
        with pytest.raises(InstanceNotFound):
            await action


async def test_pause_and_suspend() -> None:
    driver, events = make(), Events()
    await driver.init_host(events)
    await driver.spawn(plan())
    steps: list[tuple[Callable[[], Awaitable[None]], int, str]] = [
        (lambda: driver.pause("i-1"), power_state.PAUSED, "paused"),
        (lambda: driver.unpause("i-1"), power_state.RUNNING, "resumed"),
        (lambda: driver.suspend("i-1"), power_state.SUSPENDED, "suspended"),
        (lambda: driver.resume(plan()), power_state.RUNNING, "resumed"),
    ]
    for step, state, event in steps:
        events.seen.clear()
        await step()
        await step()  # what is so already is not an error
        assert (await driver.info("i-1")).power_state == state
        assert events.seen == [("i-1", event)]
    await driver.suspend("i-1")
    for wrong in (driver.pause("i-1"), driver.unpause("i-1")):
        with pytest.raises(Conflict):
            await wrong
    await driver.power_off("i-1", 0.0)
    for wrong in (driver.suspend("i-1"), driver.resume(plan()), driver.unpause("i-1")):
        with pytest.raises(Conflict):
            await wrong
    await driver.power_on(plan())
    assert (await driver.info("i-1")).power_state == power_state.RUNNING


async def test_interfaces_are_plugged_and_unplugged(tmp_path: Path) -> None:
    driver = make(tmp_path)
    await driver.spawn(plan())
    more = VIF(
        port_id="q",
        network_id="n",
        network_label="private",
        mac_address="fa:16:3e:00:00:02",
        fixed_ips=(FixedIP(address="10.0.0.6"),),
    )
    for _ in range(2):
        await driver.attach_interface(plan(), more)
    figures = await make(tmp_path).get_diagnostics("i-1")
    assert [nic.mac_address for nic in figures.nic_details] == ["fa:16:3e:00:00:01", "fa:16:3e:00:00:02"]
    assert "10.0.0.6" in await driver.get_console_output("i-1", None)
    for _ in range(2):
        await driver.detach_interface("i-1", more)
    assert [nic.mac_address for nic in (await driver.get_diagnostics("i-1")).nic_details] == ["fa:16:3e:00:00:01"]

    async def never() -> None:
        raise BuildAborted("The network does not confirm.")

    unconfirmed = plan()
    unconfirmed.plugged = never
    with pytest.raises(BuildAborted):
        await driver.attach_interface(unconfirmed, more)
    assert len((await driver.get_diagnostics("i-1")).nic_details) == 1


def volume(name: str, device: str, **fields: Any) -> AttachedVolume:
    connection = NBDConnection(export_name=name, socket_path=f"/run/{name}.sock", access_mode="ro")
    return AttachedVolume(
        volume_id=name,
        attachment_id=f"a-{name}",
        device_uuid=f"d-{name}",
        device_name=device,
        connection=connection,
        **fields,
    )


async def test_volumes_of_a_guest(tmp_path: Path) -> None:
    driver = make(tmp_path)
    first, second = volume("one", "/dev/vdb"), volume("two", "/dev/vdc", size_gb=1)
    given = plan()
    given.volumes = (first,)
    await driver.spawn(given)
    given.volumes = (first, second)
    for _ in range(2):
        await driver.attach_volume(given, second)
    for _ in range(2):
        await driver.extend_volume("i-1", second, 2 << 30)

    def held() -> dict[str, tuple[str, int | None]]:
        guest = GuestStore(next(tmp_path.rglob("host-1*"))).get("i-1")
        assert guest is not None
        return {each.volume_id: (each.device, each.size) for each in guest.volumes}

    assert held() == {"one": ("/dev/vdb", None), "two": ("/dev/vdc", 2 << 30)}
    for _ in range(2):
        await driver.swap_volume(given, first, volume("three", "/dev/vdb"))
    assert sorted(held()) == ["three", "two"]
    for _ in range(2):
        await driver.detach_volume("i-1", second)
    assert sorted(held()) == ["three"]
    await driver.reboot(given, "HARD")  # gives the guest exactly the volumes of the plan
    assert sorted(held()) == ["one", "two"]


async def test_a_guest_that_boots_from_a_volume_has_no_root_disk() -> None:
    driver = make()
    given = plan()
    given.volumes = (volume("one", "/dev/vda", boot_index=0),)
    await driver.spawn(given)
    [node] = await driver.get_available_resources()
    assert node.local_gb_used == 0
    assert [disk.device for disk in (await driver.get_diagnostics("i-1")).disk_details] == ["vda"]


@pytest.mark.parametrize("call", ["attach_volume", "detach_volume", "swap_volume", "extend_volume"])
async def test_each_call_about_volumes_can_fail(call: str) -> None:
    driver = make()
    driver.set_fault_rules([{"operation": call}])
    await driver.spawn(plan())
    one = volume("one", "/dev/vdb")
    arguments = {
        "attach_volume": (plan(), one),
        "detach_volume": ("i-1", one),
        "swap_volume": (plan(), one, one),
        "extend_volume": ("i-1", one, 1),
    }
    with pytest.raises(DriverFailed):
        await getattr(driver, call)(*arguments[call])


async def test_figures_grow_with_the_age_of_a_guest() -> None:
    driver = make()
    await driver.spawn(plan())
    young = await driver.get_diagnostics("i-1")
    await driver._clock.advance(60.0)
    old = await driver.get_diagnostics("i-1")
    assert (young.state, young.num_cpus, young.memory_details.maximum) == ("running", 1, 512)
    assert old.uptime == young.uptime + 60
    assert old.cpu_details[0].time > young.cpu_details[0].time
    assert old.disk_details[0].write_bytes > young.disk_details[0].write_bytes
    await driver.power_off("i-1", 0.0)
    assert (await driver.get_diagnostics("i-1")).state == "shutdown"
    with pytest.raises(InstanceNotFound):
        await driver.get_diagnostics("i-2")


async def test_resources_follow_guests() -> None:
    driver = make(vcpus=8, memory_mb=4096, local_gb=50)
    for uuid in ("i-1", "i-2"):
        await driver.spawn(plan(uuid))
    [node] = await driver.get_available_resources()
    assert (node.node, node.vcpus, node.vcpus_used, node.memory_mb_used) == ("host-1", 8, 2, 1024)
    assert (node.local_gb_used, node.disk_available_gb, node.running_vms) == (2, 48, 2)
    [other] = await make(host="host-2").get_available_resources()
    assert node.node_uuid != other.node_uuid


async def test_the_console_tells_of_the_guest() -> None:
    driver = make()
    await driver.spawn(plan())
    text = await driver.get_console_output("i-1", None)
    for part in ("i-1", "server-i-1 login:", "10.0.0.5", "Linux version"):
        assert part in text
    assert (await driver.get_console_output("i-1", 1)).startswith("server-i-1 login")
    assert await driver.get_console_output("i-1", 0) == ""
    await driver.reboot(plan(), "SOFT")
    assert (await driver.get_console_output("i-1", None)).count("Linux version") == 2
    with pytest.raises(InstanceNotFound):
        await driver.get_console_output("i-2", None)


async def test_guests_survive_in_the_directory(tmp_path: Path) -> None:
    driver = make(tmp_path)
    await driver.spawn(plan("i-1", epoch=3))
    await driver.spawn(plan("i-2", epoch=4))
    await driver.power_off("i-2", 0.0)
    await driver.spawn(plan("i-3"))
    await driver.destroy("i-3")
    found = await make(tmp_path).list_guests()
    assert [(guest.uuid, guest.epoch, guest.power_state, guest.memory_mb) for guest in found] == [
        ("i-1", 3, power_state.RUNNING, 512),
        ("i-2", 4, power_state.SHUTDOWN, 512),
    ]
    uuids = [(await each.get_available_resources())[0].node_uuid for each in (driver, make(tmp_path))]
    assert uuids[0] == uuids[1]


async def test_a_half_made_guest_is_found(tmp_path: Path) -> None:
    driver = make(tmp_path, rules=[{"operation": "spawn", "kind": "hang"}])
    task = asyncio.create_task(driver.spawn(plan(epoch=3)))
    await settle()
    guest = await make(tmp_path).info("i-1")
    assert (guest.epoch, guest.power_state) == (3, power_state.NOSTATE)
    task.cancel()


async def test_guests_of_another_cloud_are_never_touched(tmp_path: Path) -> None:
    theirs = make(tmp_path, cloud="other")
    await theirs.spawn(plan())
    driver = make(tmp_path)
    assert await driver.list_guests() == []
    assert await driver.info("i-1") is None
    await driver.destroy("i-1")
    assert (await make(tmp_path, cloud="other").info("i-1")) is not None
    assert (await driver.get_available_resources())[0].memory_mb_used == 512


async def test_a_torn_line_is_a_change_that_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "guests.jsonl"
    store = GuestStore(path)
    for number in range(3):
        store.put(FakeGuest(uuid=f"i-{number}", cloud="c", node="n", epoch=1))
    os.truncate(path, path.stat().st_size - 5)
    again = GuestStore(path)
    assert [guest.uuid for guest in again] == ["i-0", "i-1"]
    again.put(FakeGuest(uuid="i-9", cloud="c", node="n", epoch=1))
    assert [guest.uuid for guest in GuestStore(path)] == ["i-0", "i-1", "i-9"]


async def test_the_journal_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_module, "COMPACT_ABOVE", 10)
    path = tmp_path / "guests.jsonl"
    store = GuestStore(path)
    store.put(FakeGuest(uuid="stays", cloud="c", node="n", epoch=1))
    for number in range(200):
        store.put(FakeGuest(uuid=f"i-{number}", cloud="c", node="n", epoch=1))
        store.remove(f"i-{number}")
    assert len(path.read_text().splitlines()) < 20
    assert [guest.uuid for guest in GuestStore(path)] == ["stays"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("fail", DriverFailed),
        ("abort", BuildAborted),
        ("no_resources", InsufficientResources),
        ("unavailable", Unavailable),
    ],
)
async def test_faults_that_raise(kind: str, error: type[Exception]) -> None:
    driver = make(rules=[{"operation": "spawn", "kind": kind, "message": "broken"}])
    with pytest.raises(error, match="broken"):
        await driver.spawn(plan())


async def test_a_crash_comes_after_success() -> None:
    driver, events = make(rules=[{"operation": "spawn", "kind": "crash"}]), Events()
    await driver.init_host(events)
    await driver.spawn(plan())
    assert (await driver.info("i-1")).power_state == power_state.CRASHED
    assert events.seen[-1] == ("i-1", "crashed")
    assert "panic" in await driver.get_console_output("i-1", None)


def draw(book: FaultRules, operation: str = "spawn", host: str = "h", name: str = "n", **metadata: str) -> str:
    return book.draw(operation, host, name, metadata).kind


async def test_rules_match_by_operation_name_metadata_and_host() -> None:
    book = FaultRules(
        Random(1),
        (
            FaultRule(operation="destroy", kind="abort"),
            FaultRule(name="^web-", kind="fail"),
            FaultRule(metadata={"chaos": "yes|please"}, kind="hang"),
            FaultRule(host="rack-7", kind="no_resources"),
        ),
    )
    assert draw(book) == ""
    assert draw(book, "destroy") == "abort"
    assert draw(book, name="web-1") == "fail"
    assert draw(book, name="a-web-1") == ""
    assert draw(book, chaos="please") == "hang"
    assert draw(book, chaos="no") == ""
    assert draw(book, host="rack-7-host-3") == "no_resources"


async def test_rules_have_counts_and_probabilities() -> None:
    book = FaultRules(Random(1), (FaultRule(count=2),))
    assert [draw(book) for _ in range(4)] == ["fail", "fail", "", ""]
    book = FaultRules(Random(1), (FaultRule(probability=0.25),))
    assert 150 < sum(draw(book) == "fail" for _ in range(1000)) < 350
    assert book.listed()[0]["hits"] > 150


async def test_latencies_add_up_and_do_not_hide_faults() -> None:
    rules = (
        FaultRule(kind="delay", delay=2.0),
        FaultRule(kind="delay", delay=(1.0, 2.0)),
        FaultRule(delay=3.0),
    )
    drawn = FaultRules(Random(1), rules).draw("spawn", "h", "n", {})
    assert drawn.kind == "fail"
    assert 6.0 <= drawn.delay <= 7.0


@pytest.mark.parametrize(
    "rule",
    [
        {"operation": "fly"},
        {"kind": "explode"},
        {"name": "("},
        {"probability": 2},
        {"delay": -1},
        {"count": -1},
        {"unknown": 1},
    ],
)
async def test_bad_rules_are_refused_and_change_nothing(rule: dict[str, Any]) -> None:
    driver = make(rules=[{"kind": "fail"}])
    with pytest.raises(Invalid):
        driver.set_fault_rules([{"kind": "abort"}, rule])
    assert [each["kind"] for each in driver.fault_rules()] == ["fail"]
    driver.set_fault_rules(driver.fault_rules())  # what is listed can be given back
    driver.set_fault_rules([])
    assert driver.fault_rules() == []


async def test_hosts_are_named_by_pattern(tmp_path: Path) -> None:
    setup = DriverSetup(
        host="me",
        cloud_id="c",
        clock=ManualClock(),
        random=Random(1),
        state_dir=tmp_path,
        options={"hosts": 3, "host_pattern": "rack/{}"},
    )
    assert list(create_drivers("fake", setup)) == ["rack/1", "rack/2", "rack/3"]
    assert make().host == "host-1"


@pytest.mark.parametrize("options", [{"hosts": 0}, {"hosts": 2, "host_pattern": "same"}, {"vcpus": "many"}, {"x": 1}])
async def test_bad_settings_are_one_clear_line(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        make(**options)
    assert "\n" not in caught.value.message


async def test_a_missing_driver_is_one_clear_line() -> None:
    with pytest.raises(Invalid, match=r"no compute driver 'vmware'.*fake"):
        load_compute_driver("vmware")


async def test_a_wrong_driver_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from micronova.virt import loader

    setup = DriverSetup(host="h", cloud_id="c", clock=ManualClock(), random=Random(1))
    for target, reason in [
        ("nowhere.to:be_found", "cannot be loaded"),
        ("micronova.virt.loader:GROUP", "is wrong"),
        ("tests.unit.virt.fake.test_driver:not_a_driver", "lacks methods"),
        ("tests.unit.virt.fake.test_driver:no_hosts", "made no host"),
        ("tests.unit.virt.fake.test_driver:broken", "cannot be started: ZeroDivisionError"),
    ]:
        monkeypatch.setattr(loader, "BUILT_IN", {"wrong": target})
        with pytest.raises(Invalid, match=reason) as caught:
            create_drivers("wrong", setup)
        assert "\n" not in caught.value.message


def not_a_driver(setup: DriverSetup) -> dict[str, object]:
    return {"h": object()}


def no_hosts(setup: DriverSetup) -> dict[str, object]:
    return {}


def broken(setup: DriverSetup) -> dict[str, object]:
    raise ZeroDivisionError("oh\nno")


async def test_a_guest_boots_unless_a_rule_says_otherwise() -> None:
    driver = make(
        rules=[
            {"operation": "boot", "kind": "hang", "name": "server-hangs"},
            {"operation": "boot", "kind": "delay", "name": "server-slow", "delay": 60.0},
            {"operation": "*", "kind": "delay", "count": 3},
        ]
    )
    for uuid in ("hangs", "slow", "boots"):
        await driver.spawn(plan(uuid))

    async def booted() -> dict[str, bool]:
        signs = await driver.boot_signs(["hangs", "slow", "boots", "unknown"])
        return {uuid: sign.booted for uuid, sign in signs.items()}

    assert await booted() == {"hangs": False, "slow": False, "boots": True}
    assert [rule["hits"] for rule in driver.fault_rules()] == [1, 1, 3], "booting is not an order"
    assert (await driver.get_console_output("hangs", None)).endswith("Booting from Hard Disk...\r\n")
    assert "Linux version" in await driver.get_console_output("boots", None)
    figures = await driver.get_diagnostics("hangs")
    assert (figures.disk_details[0].read_bytes, figures.nic_details[0].tx_packets) == (512, 0)
    await driver._clock.advance(60.0)
    assert await booted() == {"hangs": False, "slow": True, "boots": True}
    await driver.power_off("boots", 0.0)
    driver.set_fault_rules([])
    await driver.reboot(plan("hangs"), "HARD")
    assert await booted() == {"hangs": True, "slow": True}
    assert (await driver.get_console_output("hangs", None)).count("Linux version") == 1


async def test_a_rescued_guest_boots_from_another_image_until_it_boots_from_its_own_disk() -> None:
    driver = make()
    await driver.spawn(plan())

    def rescue(epoch: int) -> GuestPlan:
        order = plan(epoch=epoch)
        order.rescue_image = ImageMeta(id="r", name="tools")
        return order

    async def boots() -> tuple[int, bool]:
        log = await driver.get_console_output("i-1", None)
        return log.count("Linux version"), "image tools" in log.rpartition("Linux version")[2]

    await driver.rescue(rescue(2), 60.0)
    await driver.rescue(rescue(2), 60.0)  # the report was lost
    assert await boots() == (2, True)
    await driver.unrescue(plan(epoch=3))
    await driver.unrescue(plan(epoch=3))
    assert await boots() == (3, False)
    await driver.rescue(rescue(4), 0.0)
    await driver.rescue(rescue(5), 0.0)
    assert await boots() == (5, True)
    await driver.reboot(plan(epoch=6), "HARD")
    assert await boots() == (6, False)


async def test_a_rebuild_replaces_whatever_is_there() -> None:
    driver, events = make(), Events()
    await driver.init_host(events)
    seen: list[tuple[int, int]] = []
    before: list[int] = []

    async def stopping() -> None:
        guest = await driver.info("i-1")
        before.append(0 if guest is None else guest.epoch)

    async def removed() -> None:
        guest = await driver.info("i-1")
        seen.append((guest.epoch, guest.power_state))

    for epoch, start, power in ((1, True, power_state.RUNNING), (2, True, power_state.RUNNING), (3, False, 4)):
        await driver.rebuild(plan(epoch=epoch), start=start, timeout=0.0, stopping=stopping, removed=removed)
        guest = await driver.info("i-1")
        assert (guest.epoch, guest.power_state) == (epoch, power)
    assert seen == [(epoch, power_state.NOSTATE) for epoch in (1, 2, 3)]
    assert before == [0, 1, 2], "whoever withdraws it then has the old guest"
    assert len(await driver.list_guests()) == 1
