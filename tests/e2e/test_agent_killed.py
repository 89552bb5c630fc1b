"""The agents of a host are killed at random moments while its guests come and go: nothing is lost, nothing is left."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from micronova.virt.libvirt.client.library import load
from tests.e2e.cloud import RealCloud, processes
from tests.e2e.guests import IDLE_DISK, SERVERS, Guest, until
from tests.e2e.split import SplitCloud, split_cloud
from tests.people import Person
from tests.services.rabbitmq import RabbitMQ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="session")]

SEED = int(os.environ.get("E2E_SEED", "7"))
GUESTS = 20
KILLS = 10
BY_HAND = """
<domain type='qemu'><name>by-hand</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os></domain>
"""


@dataclass
class Owner:
    """Makes servers and deletes half of them; remembers what must be there in the end."""

    person: Person
    image: str
    flavor: str
    network: str
    random: random.Random
    wanted: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)

    async def work(self) -> None:
        for number in range(GUESTS):
            fields = {"name": f"guest-{number}", "imageRef": self.image, "flavorRef": self.flavor}
            made = await self.person.make(SERVERS, "server", **fields, networks=[{"uuid": self.network}])
            self.wanted.add(made["id"])
            await asyncio.sleep(self.random.uniform(0.0, 2.5))  # the owner's own pace
            if self.random.random() < 0.5:
                gone = self.random.choice(sorted(self.wanted))
                self.wanted.discard(gone)
                self.unwanted.add(gone)
                await self.person.do("DELETE", f"{SERVERS}/{gone}")

    async def settled(self) -> bool:
        """Return whether every server is as it was asked for."""
        found = {server["id"]: server for server in await self.servers()}
        assert set(found) <= self.wanted | self.unwanted
        for server in found.values():
            assert server["status"] != "ERROR" or server["fault"]["message"], server
        return set(found) == self.wanted and all(each["status"] in ("ACTIVE", "ERROR") for each in found.values())

    async def servers(self) -> list[dict[str, Any]]:
        return list((await self.person.do("GET", f"{SERVERS}/detail"))["servers"])

    async def none(self) -> bool:
        return not await self.servers()


@asynccontextmanager
async def _neighbour(cloud: RealCloud) -> AsyncIterator[Guest]:
    """Have a guest of another cloud on the machine, with the same addresses."""
    tenant = await cloud.tenant("10.79.0.0/24")
    try:
        guest = await tenant.boot("neighbour")
        await guest.ready()
        yield guest
    finally:
        await tenant.clear()


@contextmanager
def _by_hand(cloud: SplitCloud) -> Iterator[Any]:
    """Have a guest on the same libvirt that no cloud made."""
    connection = load().open(f"qemu+unix:///system?socket={cloud.host}/libvirt/run/libvirt-sock")
    try:
        domain = connection.createXML(BY_HAND.format(uuid=uuid4()))
        yield domain
        assert domain.isActive()
        domain.destroy()
    finally:
        connection.close()


async def _kill_and_restart(cloud: SplitCloud, chance: random.Random) -> None:
    for number in range(KILLS):
        await asyncio.sleep(chance.uniform(0.0, 3.0))  # the moment
        await asyncio.to_thread(cloud.kill_host, whole=number % 3 == 2)
        # Most times it gets to work again, now and then it is killed while it starts.
        if number % 4 == 1:
            cloud.start_host()
        else:
            await cloud.restart_host()


async def test_agents_killed_at_any_moment(cloud: RealCloud, amqp_url: str, rabbitmq: RabbitMQ) -> None:
    async with _neighbour(cloud) as neighbour, split_cloud(amqp_url, rabbitmq) as split:
        life = await neighbour.ssh("cat /proc/sys/kernel/random/boot_id")
        image = await split.admin.make_image("idle", "raw", IDLE_DISK)
        network = await split.admin.make("/network/v2.0/networks", "network", name="net")
        await split.admin.make(
            "/network/v2.0/subnets", "subnet", network_id=network["id"], ip_version=4, cidr="10.79.0.0/24"
        )
        owner = Owner(split.admin, image, split.flavor, network["id"], random.Random(SEED))
        with _by_hand(split):
            await asyncio.gather(owner.work(), _kill_and_restart(split, random.Random(SEED + 1)))
            await until(owner.settled, lambda: f"every server to be as asked: {split.log('host')[-3000:]}", 200.0)
            states = [server["status"] for server in await owner.servers()]
            assert "ACTIVE" in states and owner.unwanted, "the host got to work now and then"

            async def clean() -> bool:
                return await asyncio.to_thread(split.audit) == []

            await until(clean, lambda: f"a clean audit: {split.audit()}")
            for server in sorted(owner.wanted):
                await split.admin.do("DELETE", f"{SERVERS}/{server}")
            await until(owner.none, "every server to be gone")
            await until(clean, lambda: f"a clean audit: {split.audit()}")
            guests = [line for line in processes(str(split.host)) if "qemu-system" in line and "by-hand" not in line]
            assert guests == []
            assert list((split.host / "libvirt" / "instances").iterdir()) == []
        assert await neighbour.ssh("cat /proc/sys/kernel/random/boot_id") == life
