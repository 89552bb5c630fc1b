"""What volumes cost: I/O through an export against the same file, the memory of a daemon, a volume made of an image.

    python -m tests.perf.volumes [--rounds N]

All ways run side by side, so that a busy machine slows all: an export more than a file, because it needs more CPU. The
CPU time of client and daemon together, of which the lowest counts, depends less on that. The client is
`qemu-img bench`.
"""

import argparse
import asyncio
import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from tests.integration.exporter.world import World, world
from tests.perf.processes import cpu_seconds

MIB = 1 << 20
CASES = {  # bytes, depth, requests, write
    "1 MiB writes": (MIB, 8, 2000, True),
    "1 MiB reads": (MIB, 8, 2000, False),
    "4 KiB writes, depth 16": (4096, 16, 60_000, True),
    "4 KiB reads, depth 16": (4096, 16, 60_000, False),
}


def fill(path: Path, source: str, count: int, at: int = 0) -> None:
    """Write so many MiB to a file, from an offset in MiB on."""
    command = ["dd", f"if={source}", f"of={path}", "bs=1M", f"count={count}", f"seek={at}", "conv=notrunc"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


async def bench(source: list[str], size: int, depth: int, count: int, *, write: bool) -> float:
    """Return the requests in a second."""
    step = size if size == MIB else 65_536 + 4096  # not in the order of the disk
    command = ["qemu-img", "bench", "-c", str(count), "-d", str(depth), "-s", str(size), "-S", str(step)]
    command += ["-w"] if write else []
    ran = await asyncio.create_subprocess_exec(*command, *source, stdout=-1, stderr=-2)
    said = (await ran.communicate())[0].decode()
    found = re.search(r"Run completed in ([\d.]+) seconds", said)
    assert found, said
    return count / float(found[1])


def spent(made: World, volume_id: str) -> float:
    """Return the CPU seconds of the daemon of a volume and of all clients that have ended."""
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = made.daemons()[volume_id]
    return clients.ru_utime + clients.ru_stime + cpu_seconds({pid: "daemon"})["daemon"]


async def compare(made: World, rounds: int) -> None:
    """Print the rates of both ways."""
    volume_id, direct = str(uuid4()), str(uuid4())
    for each in (volume_id, direct):
        path = made.file(each, 2 << 30)
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=2048", "conv=notrunc"], check=True, stderr=-3
        )
    await made.serve(volume_id)
    ways = {
        "export": ["--image-opts", made.url(volume_id)],
        "file": ["-f", "raw", "-t", "none", "-n", str(made.directory / direct)],  # as guests' own disks are opened
        "page cache": ["-f", "raw", "-t", "writeback", str(made.directory / direct)],
    }
    for name, (size, depth, count, write) in CASES.items():
        rates: dict[str, list[float]] = {way: [] for way in ways}
        costs: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, source in ways.items():
                before = spent(made, volume_id)
                rates[way].append(await bench(source, size, depth, count, write=write))
                costs[way].append((spent(made, volume_id) - before) / count * 1e6)
        best = {way: max(found) for way, found in rates.items()}
        print(f"{name}:")
        for way, rate in best.items():
            print(f"  {way}: {rate:.0f}/s ({best['export'] / rate:.0%}), {min(costs[way]):.0f} us CPU each")
    rollup = Path(f"/proc/{made.daemons()[volume_id]}/smaps_rollup").read_text()
    private = sum(int(number) for number in re.findall(r"Private_\w+:\s+(\d+)", rollup))
    print(f"memory of its own of the daemon after that: {private / 1024:.1f} MiB")


async def idle(made: World) -> None:
    """Print the memory of a daemon that nobody has used, and how long it takes to start one."""
    volume_id = str(uuid4())
    made.file(volume_id, 1 << 30)
    begin = time.monotonic()
    await made.serve(volume_id)
    print(f"a volume is served after {time.monotonic() - begin:.3f} s")
    rollup = Path(f"/proc/{made.daemons()[volume_id]}/smaps_rollup").read_text()
    private = sum(int(number) for number in re.findall(r"Private_\w+:\s+(\d+)", rollup))
    print(f"memory of its own of an idle daemon: {private / 1024:.1f} MiB")


async def copy(made: World) -> None:
    """Print how long a live copy of a volume of 10 GiB with 256 MiB of data takes."""
    volume_id = str(uuid4())
    path = made.file(volume_id, 10 << 30)
    fill(path, "/dev/urandom", 256, 4096)
    begin = time.monotonic()
    made_copy = await made.copy(volume_id, "aa")
    used = made_copy.stat().st_blocks * 512 / MIB
    print(f"a copy of 10 GiB with 256 MiB of data: {time.monotonic() - begin:.2f} s, {used:.0f} MiB allocated")


async def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with world(Path(folder)) as made:
            await idle(made)
            await copy(made)
            await compare(made, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
