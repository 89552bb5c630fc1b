"""What volumes cost on simulated hosts: boots from volumes beside boots from images, attach and detach.

    python -m tests.perf.volume_actions [--topology one|apart] [--rounds N] [--servers N]

Everything goes through the OpenStack API. All phases take turns in each round, so that a busy machine slows all; the
CPU time is that of all processes of the cloud, and the figure to trust. The lowest of the rounds counts.

| phase | what is done |
|---|---|
| image | servers that boot from the image, until all are ACTIVE; `delete` is their deletion |
| new volume | servers that boot from a new volume of 1 GiB, made of the image; their deletion deletes it |
| volume | the same with volumes that exist, which stay |
| attach, detach | a volume for each server of the image, until it is in use, and available again |
| 10 GiB | one volume of 10 GiB of the image, until it is available |
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tests.perf.client import BenchError, Client, Endpoint
from tests.perf.clouds import OneProcess, start
from tests.perf.phases import Bench, Meter, Sizes, Target, progress

CLIENTS = 8
PAUSE = 20  # the pause between two looks at volumes, as a multiple of the time that a look takes


class VolumeBench(Bench):
    """The phases, against one cloud."""

    def __init__(self, target: Target, volumes: str, count: int) -> None:
        super().__init__(target, Sizes())
        self._volumes = Client(
            Endpoint(volumes, {"X-Auth-Token": target.token, "OpenStack-API-Version": "volume 3.71"})
        )
        self._servers = count

    async def round(self) -> dict[str, dict[str, float]]:
        """Run all phases once; return CPU and wall time of each operation, in milliseconds."""
        found = {}
        found["boot, image"], found["delete, image"] = await self._boot_and_delete(
            [{"imageRef": self.target.image}] * self._servers
        )
        of_image = {"source_type": "image", "uuid": self.target.image, "volume_size": 1, "delete_on_termination": True}
        found["boot, new volume"], found["delete, new volume"] = await self._boot_and_delete(
            [_root(of_image)] * self._servers
        )
        meter = Meter(self.target.roots)
        volumes = await self._make(self._servers, imageRef=self.target.image)
        found["create volume of image"] = self._cost(meter)
        found["boot, volume"], found["delete, volume"] = await self._boot_and_delete(
            [_root({"source_type": "volume", "uuid": volume}) for volume in volumes]
        )
        found |= await self._attach_and_detach(volumes)
        await self._remove(volumes)
        meter = Meter(self.target.roots)
        large = await self._make(1, size=10, imageRef=self.target.image)
        found["create volume of image, 10 GiB"] = self._cost(meter, 1)
        await self._remove(large)
        return found

    async def _boot_and_delete(self, roots: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
        name = self._name("root")
        meter = Meter(self.target.roots)
        await self._create_with(name, roots)
        booted = self._cost(meter)
        meter = Meter(self.target.roots)
        await self.delete()
        await self._until_volumes("in-use", 0)
        await self._until_volumes("deleting", 0)
        return booted, self._cost(meter)

    async def _create_with(self, name: str, roots: list[dict[str, Any]]) -> list[str]:
        made: list[str] = []

        async def create(client: Client, number: str) -> None:
            body = self.target.server(name)
            del body["server"]["imageRef"]
            body["server"] |= roots[int(number)]
            made.append((await client.json("POST", "/servers", body))["server"]["id"])

        await self._spread_out(map(str, range(len(roots))), create, CLIENTS)
        await self._settle(name, len(roots))
        return made

    async def _attach_and_detach(self, volumes: list[str]) -> dict[str, dict[str, float]]:
        servers = await self._create_with(self._name("attached"), [{"imageRef": self.target.image}] * len(volumes))
        pairs = dict(zip(servers, volumes, strict=True))

        async def attach(client: Client, server: str) -> None:
            body = {"volumeAttachment": {"volumeId": pairs[server]}}
            await client.json("POST", f"/servers/{server}/os-volume_attachments", body)

        async def detach(client: Client, server: str) -> None:
            await client.json("DELETE", f"/servers/{server}/os-volume_attachments/{pairs[server]}")

        found = {}
        for name, work, status in (("attach", attach, "in-use"), ("detach", detach, "available")):
            meter = Meter(self.target.roots)
            await self._spread_out(servers, work, CLIENTS)
            await self._until_volumes(status, len(volumes))
            found[name] = self._cost(meter)
        await self.delete()
        return found

    async def _make(self, count: int, **values: Any) -> list[str]:
        made = []
        for _ in range(count):
            body = {"volume": {"name": self.prefix, "size": 1, **values}}
            made.append((await self._volumes.json("POST", "/volumes", body))["volume"]["id"])
        await self._until_volumes("available", count)
        return made

    async def _remove(self, volumes: list[str]) -> None:
        for volume in volumes:
            await self._volumes.json("DELETE", f"/volumes/{volume}")
        await self._until_volumes("deleting", 0)

    async def _until_volumes(self, status: str, count: int) -> None:
        """Wait until so many volumes have a status."""
        end = time.perf_counter() + self.sizes.patience
        while True:
            begin = time.perf_counter()
            query = urlencode({"status": status, "limit": count + 1})
            found = (await self._volumes.json("GET", f"/volumes?{query}"))["volumes"]
            if len(found) == count:
                return
            if begin > end:
                raise BenchError(f"{len(found)} volumes are {status}, and not {count}")
            await asyncio.sleep(PAUSE * (time.perf_counter() - begin))

    def _cost(self, meter: Meter, operations: int | None = None) -> dict[str, float]:
        """Return what each operation has cost."""
        number = operations or self._servers
        wall = meter.seconds * 1000 / number
        return {"cpu": meter.cost(number)["cpu_ms_each"], "wall": wall}


def _root(device: Mapping[str, Any]) -> dict[str, Any]:
    return {"block_device_mapping_v2": [{"boot_index": 0, "destination_type": "volume", **device}]}


async def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=("one", "apart"), default="one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, default=50)
    arguments = parser.parse_args()
    cloud = OneProcess(tokens=False)
    try:
        _, target = await start(cloud)
        bench = VolumeBench(target, cloud.volumes, arguments.servers)
        rounds = []
        for number in range(arguments.rounds + 1):
            rounds.append(await bench.round())
            progress(f"round {number} of {arguments.rounds} has ended")
    except (BenchError, OSError) as error:
        raise SystemExit(f"{error}\n{cloud.logs()}") from error
    finally:
        cloud.close()
    _show(rounds[1:])  # the first one is warming up
    if bench.problems:
        raise SystemExit("\n".join(bench.problems))


def _show(rounds: list[dict[str, dict[str, float]]]) -> None:
    best = {name: {way: min(each[name][way] for each in rounds) for way in ("cpu", "wall")} for name in rounds[0]}
    for name, figures in best.items():
        beside = best.get(f"{name.partition(',')[0]}, image")
        times = "" if beside is None else f", {figures['cpu'] / max(beside['cpu'], 1e-9):.2f} times of an image's CPU"
        print(f"{name}: {figures['cpu']:.1f} ms CPU, {figures['wall']:.1f} ms{times}")


if __name__ == "__main__":
    asyncio.run(main())
