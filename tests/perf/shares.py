"""How the CPU time of an action divides between the parts of one process: `python -m tests.perf.shares`.

It runs `createImage` and `shelve` as `tests.perf.actions` does, in a `micronova up` that counts: the CPU clock of each
thread (the databases and the image service's files have threads of their own), and the time of the event loop within
the application of the image service. Nova's figures include no image service. The counting itself costs about 3 %.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tests.perf.actions import ActionBench, Phase
from tests.perf.clouds import PATIENCE, OneProcess, start
from tests.perf.nova import FIGURES
from tests.perf.phases import QUICK

RUNS = 8
SERVICE = "event loop, image service"
OF_IMAGE_SERVICE = (SERVICE, "image-write", "image-read", "image-data")


# --- in the cloud's process -----------------------------------------------------------------------------------------


class Timed:
    """Awaits a coroutine and counts the CPU time of its steps."""

    spent = 0.0

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        value = None
        while True:
            begin = time.thread_time()
            try:
                waits_for = self._coroutine.send(value)
            except StopIteration:
                return
            finally:
                Timed.spent += time.thread_time() - begin
            value = yield waits_for


def serve(figures: Path) -> None:
    """Run `micronova` with the remaining arguments; write the CPU seconds of its parts to a file at each SIGUSR1."""
    import uvloop

    from micronova.cli.clients import MountedApp
    from micronova.cli.main import main

    call, run = MountedApp.__call__, uvloop.run

    async def counted(app: MountedApp, scope: Any, receive: Any, send: Any) -> None:
        if app._mount == "/image":
            await Timed(call(app, scope, receive, send))
        else:
            await call(app, scope, receive, send)

    async def with_signal(work: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write_figures)
        await work

    def write_figures() -> None:
        found: dict[str, float] = defaultdict(float)
        for thread in threading.enumerate():
            assert thread.ident is not None
            spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found["event loop, rest" if thread is threading.main_thread() else thread.name.partition("_")[0]] += spent
        found["event loop, rest"] -= Timed.spent
        found[SERVICE] = Timed.spent
        part = figures.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(figures)

    MountedApp.__call__ = counted  # type: ignore[method-assign, assignment]
    uvloop.run = lambda work, **options: run(with_signal(work), **options)  # type: ignore[assignment]
    sys.argv[0] = "micronova"
    main()


# --- in the benchmark -----------------------------------------------------------------------------------------------


class Shares(ActionBench):
    """Runs one action on all servers several times."""

    figures: Path

    async def parts(self) -> Counter[str]:
        """Return the CPU seconds that each part of the cloud has used so far."""
        self.figures.unlink(missing_ok=True)
        for pid in self.target.roots:
            os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + PATIENCE
        while not self.figures.exists():
            if time.monotonic() > end:
                raise TimeoutError("the cloud does not write its figures")
            await asyncio.sleep(0.01)
        return Counter(json.loads(self.figures.read_text()))

    async def measure(self) -> None:
        """Print the milliseconds of each part, per action."""
        name, count = self._name("shared"), self.sizes.acted
        await self._control.json("POST", "/servers", self.target.server(name, count))
        await self._settle(name, count)
        servers = await self._ids(name)
        phases = {phase.name: phase for phase in self._phases()}
        for kind, back in (("snapshot", None), ("shelve", phases["unshelve"])):
            spent: Counter[str] = Counter()
            for number in range(RUNS + 1):
                before = await self.parts()
                await self._carry_out(phases[kind], name, servers)
                if number:  # the first one warms up
                    spent += await self.parts() - before
                await self._check(phases[kind], name, servers)
                if back is not None:
                    await self._act(back, name, servers)
            show(phases[kind], {part: 1000 * used / RUNS / count for part, used in spent.items()})
        await self.delete()
        self._control.close()


def show(phase: Phase, parts: dict[str, float]) -> None:
    """Print a table, and what is left without the image service."""
    total, nova = sum(parts.values()), FIGURES[f"actions.{phase.name}.cpu_ms_each"]
    without = total - sum(used for part, used in parts.items() if part in OF_IMAGE_SERVICE)
    print(f"{next(iter(phase.body))}: ms CPU each, mean of {RUNS} runs")
    for part, used in sorted(parts.items(), key=lambda each: -each[1]):
        if used >= 0.005:
            print(f"  {used:6.2f}  {part}")
    print(f"  {total:6.2f}  in all: {nova / total:.0f} x less than Nova")
    print(f"  {without:6.2f}  without the image service: {nova / without:.0f} x", flush=True)


async def measure(figures: Path) -> None:
    """Start a cloud and measure it."""
    cloud = OneProcess(tokens=False)
    cloud.program = [sys.executable, "-m", "tests.perf.shares", str(figures)]
    try:
        _, target = await start(cloud)
        shares = Shares(target, QUICK)
        shares.figures = figures
        await shares.measure()
        for problem in shares.problems:
            print(problem, file=sys.stderr)
    finally:
        cloud.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Path(sys.argv.pop(1)))
    else:
        with tempfile.TemporaryDirectory() as place:
            Path(place).chmod(0o777)  # the cloud may run as another user
            asyncio.run(measure(Path(place) / "figures"))
