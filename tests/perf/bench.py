"""The benchmark: `python -m tests.perf.bench`, or `make bench`.

Starts clouds of its own, speaks only the OpenStack API to them, and shows the figures beside those of Nova.
With --serve it starts one, says how to point another benchmark at it, and keeps it until Ctrl-C. With --url it
measures any cloud that runs already, real Nova included.
"""

import argparse
import asyncio
import compileall
import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import micronova
from tests.perf import report
from tests.perf.actions import ActionBench
from tests.perf.client import BenchError
from tests.perf.clouds import Apart, Cloud, OneProcess, SmallRegion, measure, measure_actions, phases, start
from tests.perf.phases import QUICK, Sizes, Target, progress
from tests.perf.scheduler.ours import decide, make_table

CLOUDS: dict[str, tuple[Callable[[], Cloud], ...]] = {
    "one": (lambda: OneProcess(tokens=False), lambda: OneProcess(tokens=True)),
    "apart": (Apart,),
    "small": (SmallRegion,),
}
CLOUDS["both"] = CLOUDS["one"] + CLOUDS["apart"]


async def main() -> int:
    """Measure what the arguments say; exit 0 only if every server came to be what it should."""
    arguments = _arguments()
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)  # our clouds are stopped, too
    sizes = QUICK if arguments.quick else Sizes()
    if not arguments.url:
        compileall.compile_dir(str(Path(micronova.__file__).parent), quiet=1)  # as an installation does
    if arguments.serve:
        await _serve(CLOUDS[arguments.topology][0]())
        return 0
    results = []
    if arguments.url:
        results.append(await _given(arguments, sizes))
    else:
        run = measure_actions if arguments.actions else measure
        results += [await _own(make, sizes, run) for make in CLOUDS[arguments.topology]]
    decisions = {} if arguments.url or arguments.actions else _decisions()
    report.show(results, decisions)
    if arguments.json:
        document = {"machine": _machine(), "sizes": sizes, "scheduler_ms": decisions, "clouds": results}
        arguments.json.write_text(json.dumps(document, indent=1, default=lambda value: value.__struct_fields__) + "\n")
    return 1 if any(result["problems"] for result in results) else 0


async def _own(
    make: Callable[[], Cloud], sizes: Sizes, run: Callable[[Cloud, Sizes], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    cloud = make()
    try:
        progress(f"--- {cloud.title}")
        return {"loadavg": os.getloadavg(), **await run(cloud, sizes)}
    except (BenchError, OSError) as error:
        raise SystemExit(f"{cloud.title}: {error}\n{cloud.logs()}") from error
    finally:
        cloud.close()


async def _given(arguments: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    target = Target(
        url=arguments.url,
        token=arguments.token,
        image=arguments.image,
        flavor=arguments.flavor,
        larger_flavor=arguments.larger_flavor,
        networks=arguments.networks,
        floor=arguments.url.rstrip("/").removesuffix("/v2.1"),
        roots=dict(arguments.pid),
    )
    figures = await (ActionBench(target, sizes).run() if arguments.actions else phases(target, sizes))
    return {"title": arguments.url, "loadavg": os.getloadavg(), **figures}


async def _serve(cloud: Cloud) -> None:
    try:
        _, target = await start(cloud)
        command = ["python3", "bench.py", "--url", target.url, "--token", target.token, "--image", target.image]
        command += ["--flavor", target.flavor, "--networks", target.networks, "--floor-path", "/compute/"]
        for pid, name in target.roots.items():
            command += ["--pid", f"{pid}:{name}"]
        progress(f"{cloud.title} is up until Ctrl-C. To measure it:")
        print(shlex.join(command), flush=True)
        await asyncio.Event().wait()
    finally:
        cloud.close()


def _decisions() -> dict[str, float]:
    """Measure the scheduler by itself: milliseconds CPU per decision, by number of hosts."""
    found = {}
    for hosts in (100, 1_000, 10_000):
        found[str(hosts)] = decide(make_table(hosts), "plain")["p50"]
    return found


def _machine() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count(),
        "loadavg": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _pid(text: str) -> tuple[int, str]:
    pid, _, name = text.partition(":")
    return int(pid), name or pid


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", choices=sorted(CLOUDS), default="both", help="which clouds (default: both)")
    parser.add_argument("--quick", action="store_true", help="one run of each phase, and shorter ones")
    parser.add_argument("--actions", action="store_true", help="only the actions on servers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--serve", action="store_true", help="start a cloud and say how to measure it, until Ctrl-C")
    given = parser.add_argument_group("a cloud that runs already")
    given.add_argument("--url", help="its compute endpoint, http://HOST:PORT/…/v2.1")
    given.add_argument("--token", default="admin:admin", help="sent as X-Auth-Token")
    given.add_argument("--image", help="id of the image to boot")
    given.add_argument("--flavor", default="1", help="id of the flavor")
    given.add_argument("--larger-flavor", default="2", help="id of the flavor that servers are resized to")
    given.add_argument("--networks", default="none", help="none, auto, or a network's id")
    given.add_argument(
        "--pid", action="append", default=[], type=_pid, metavar="PID[:NAME]", help="one of its processes"
    )
    arguments = parser.parse_args()
    if arguments.url and not arguments.image:
        parser.error("--url needs --image")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except asyncio.CancelledError:
        sys.exit(130)
