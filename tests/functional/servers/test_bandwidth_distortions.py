"""What servers hold for their ports is right also when messages are lost or doubled, and when the conductor crashes."""

import asyncio
import dataclasses
from random import Random
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.objects.clock import SystemClock
from micronova.rpc.bus import Bus
from tests.distort import DistortedBus, Distortion
from tests.functional.cloud import IMAGE, Caller, Cloud, CloudOptions, one_process, only_in_one_process
from tests.functional.servers.bandwidth import EGRESS, asking_port, held, interfaces, port_of
from tests.functional.servers.crashes import Crashes
from tests.functional.servers.embedded_services import image, network

pytestmark = [only_in_one_process("distorts the bus, and crashes the conductor"), pytest.mark.thorough]
QUICK = CloudOptions(
    hosts=3,
    roles=("network", "image"),
    settings={
        "default": {"report_interval": 0.1, "service_down_time": 5.0},
        "conductor": {"lease": 1.0, "sweep_interval": 0.1},
    },
)
BUSES = {
    "every cast is lost": Distortion(drop_casts=True),
    "every message comes twice": Distortion(twice=True),
    "messages come twice, late and in any order": Distortion(twice=True, longest_delay=0.15),
}


@pytest.fixture(autouse=True)
def resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a lost order again sooner than a real cloud does."""
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 100_000)


async def _delete(user: Caller, id: str) -> None:
    await user.delete(f"/servers/{id}")
    await user.gone(id)


async def _serves(user: Caller, id: str, providers: dict[str, str], kbps: int) -> None:
    """Check that the interface of the server's host serves its ports."""
    [own] = [(provider, amounts) for provider, amounts in (await held(user, id)).items() if EGRESS in amounts]
    assert own == (providers[await user.host_of(id)], {EGRESS: kbps})


async def _scenario(cloud: Cloud) -> None:
    user = cloud.caller()
    net = await network(user)
    async with interfaces(user, dict.fromkeys(cloud.hosts, 1000)) as providers:
        first, second, third, most = [await asking_port(user, net, egress=kbps) for kbps in (400, 300, 700, 1001)]

        async def lives() -> None:
            id = (await user.boot(name="fails-on-one-host", networks=[{"port": first["id"]}]))["id"]
            assert await user.host_of(id) != cloud.hosts[0]
            await _serves(user, id, providers, 400)
            path = f"/servers/{id}/os-interface"
            await user.post(path, {"interfaceAttachment": {"port_id": second["id"]}}, 200)
            await _serves(user, id, providers, 700)
            await user.act(id, "resize", {"flavorRef": "2"})
            await user.wait_for(id, "VERIFY_RESIZE")
            await _serves(user, id, providers, 700)
            await user.act(id, "revertResize")
            await user.wait_for(id, "ACTIVE")
            await _serves(user, id, providers, 700)
            await user.delete(f"{path}/{first['id']}", 202)
            await user.wait_for(id, "ACTIVE")
            await _serves(user, id, providers, 300)
            await _delete(user, id)

        async def fails() -> None:
            for port in (third, most):  # the host refuses the one, and no host has enough for the other
                id = await user.create(name="cannot-be", networks=[{"port": port["id"]}])
                await user.wait_for(id, "ERROR")
                await _delete(user, id)
                assert (await port_of(user, port["id"]))["binding:profile"] == {}

        await asyncio.gather(lives(), fails())
    await cloud.delete_all()
    await cloud.assert_clean()


async def _everything(cloud: Cloud) -> None:
    rules: list[dict[str, Any]] = [
        {"operation": "spawn", "kind": "fail", "name": "fails-on-one-host", "host": f"^{cloud.hosts[0]}$"},
        {"operation": "spawn", "kind": "abort", "name": "cannot-be"},
    ]
    async with cloud.faults(*rules):
        await _scenario(cloud)


@pytest.mark.parametrize("name", BUSES)
async def test_bandwidth_is_held_and_given_back_when(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    def wrap(bus: Bus) -> Bus:
        return DistortedBus(bus, BUSES[name], clock=SystemClock(), random=Random(7))

    wanted = dataclasses.replace(QUICK, wrap_bus=wrap)
    async with one_process(tmp_path_factory.mktemp("cloud"), wanted) as cloud:
        await image(cloud.caller().admin, id=IMAGE, visibility="public")
        await _everything(cloud)


async def test_bandwidth_is_held_and_given_back_when_transactions_are_tried_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wanted = dataclasses.replace(QUICK, retried=True)
    async with one_process(tmp_path_factory.mktemp("cloud"), wanted) as cloud:
        await image(cloud.caller().admin, id=IMAGE, visibility="public")
        await _everything(cloud)


async def test_bandwidth_is_held_and_given_back_when_the_conductor_crashes_after_a_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    crashes = Crashes()
    wanted = dataclasses.replace(QUICK, after_commit=crashes)
    async with one_process(tmp_path_factory.mktemp("cloud"), wanted) as cloud:
        await image(cloud.caller().admin, id=IMAGE, visibility="public")
        crashes.due = {
            *(("build", step) for step in ("schedule", "dispatched", "failed", "cleanup")),
            *(("delete", step) for step in ("dispatched", "cleanup")),
            *((kind, "dispatched") for kind in ("attach_interface", "detach_interface")),
            *(("resize", step) for step in ("prep", "migrate", "bind", "finish")),
            *(("revert_resize", step) for step in ("dispatched", "bind", "finish")),
        }
        await _everything(cloud)
        assert not crashes.due - {("build", "schedule")}, f"nothing came to {crashes.due}"
