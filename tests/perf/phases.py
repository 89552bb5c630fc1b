"""What is measured, through the OpenStack API alone.

| phase | what is done |
|---|---|
| boot_one | one server at a time on an idle cloud: from sending the POST until it is seen ACTIVE, and the POST alone |
| post | one client sends POSTs one after the other, while the boots go on behind them |
| boot | 8 clients create 100 servers with a request each: from the first POST until no server is in BUILD |
| bulk | one request for 50 servers |
| delete | 8 clients delete all of these, until none is listed |
| lists | with 500 servers: a page of 100 and of 500, detailed and brief, one client |
| show | 8 clients read servers, each over one connection that is kept alive |
| floor | the same for the document of versions: what the HTTP server and this client can do at most |
| idle | what the cloud costs per second when nobody asks it anything |

The CPU time is that of all processes of the cloud, from the first request of a phase to its end. On a machine that
does other things as well it is the figure to trust: the seconds are not.
"""

import asyncio
import json
import math
import resource
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import msgspec

from tests.perf.client import BenchError, Client, Endpoint
from tests.perf.processes import cpu_seconds, memory

POLL = 0.1  # seconds between two looks at whether all is done
POLL_ONE = 0.02  # the same for a single server
REST = 0.3  # seconds that the cloud gets to come to rest between single boots
BATCH = 50  # servers per request when filling up


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything; the defaults are those with which Nova was measured."""

    repeat: int = 3
    clients: int = 8
    singles: int = 5
    posts: int = 100
    servers: int = 100
    bulk: int = 50
    acted: int = 30
    listed: int = 500
    pages: tuple[int, ...] = (100, 500)
    page_samples: int = 15
    seconds: float = 8.0
    patience: float = 300.0


QUICK = Sizes(repeat=1, singles=3, posts=50, page_samples=5, seconds=2.0)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A cloud to measure: its compute endpoint, what to boot, and its processes by id."""

    url: str
    token: str
    image: str
    flavor: str = "1"
    larger_flavor: str = "2"
    networks: str = "none"
    floor: str
    roots: Mapping[int, str] = {}

    def endpoint(self) -> Endpoint:
        """Return where requests go."""
        return Endpoint(self.url, {"X-Auth-Token": self.token, "OpenStack-API-Version": "compute 2.90"})

    def server(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the body of a POST /servers."""
        networks: Any = self.networks if self.networks in ("none", "auto") else [{"uuid": self.networks}]
        server = {"name": name, "imageRef": self.image, "flavorRef": self.flavor, "networks": networks}
        if count > 1:
            server |= {"min_count": count, "max_count": count}
        return {"server": server}


def progress(text: str) -> None:
    """Say on standard error what is going on."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def spread(samples: Iterable[float]) -> dict[str, float]:
    """Sum up durations, given in seconds, in milliseconds; percentiles are samples (nearest rank)."""
    ordered = sorted(sample * 1000 for sample in samples)

    def rank(percent: int) -> float:
        return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]

    return {"n": len(ordered), "min_ms": ordered[0], "p50_ms": rank(50), "p90_ms": rank(90), "p99_ms": rank(99)}


def combine(runs: list[Any]) -> Any:
    """Make of several runs of one phase: each figure as {min, median, max, runs}."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: combine([run.get(key, 0.0) for run in runs]) for key in first}
    return {"min": min(runs), "median": statistics.median(runs), "max": max(runs), "runs": runs}


class Meter:
    """The cost of one phase."""

    def __init__(self, roots: Mapping[int, str]) -> None:
        self._roots = roots
        self._before = cpu_seconds(roots)
        self._own = _own_cpu()
        self.begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the begin."""
        return time.perf_counter() - self.begin

    def cost(self, operations: int) -> dict[str, Any]:
        """Return what the cloud and this client used until now, for so many operations."""
        seconds = self.seconds
        after = cpu_seconds(self._roots)
        each = {name: (after[name] - self._before[name]) * 1000 / operations for name in after}
        figures: dict[str, Any] = {"client_cpu": (_own_cpu() - self._own) / seconds}
        if each:
            figures |= {"cpu_ms_each": sum(each.values()), "cpu_ms_by_name": each}
        return figures


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """The phases, against one cloud."""

    def __init__(self, target: Target, sizes: Sizes) -> None:
        self.target, self.sizes = target, sizes
        self.endpoint = target.endpoint()
        self.problems: list[str] = []
        self.prefix = f"bench{secrets.token_hex(4)}"  # servers of others may be there: ours are found by name
        self._control = Client(self.endpoint)
        self._count = 0

    async def run(self) -> dict[str, Any]:
        """Measure everything and return the figures."""
        roots, sizes = self.target.roots, self.sizes
        await self._control.json("GET", f"/flavors/{self.target.flavor}")  # it answers, and to us
        figures: dict[str, Any] = {"memory": {"idle": memory(roots)}} if roots else {}
        changing: dict[str, list[Any]] = {}
        for number in range(sizes.repeat):
            for phase in (self.boot_one, self.post, self.boot, self.bulk, self.delete):
                if phase == self.delete and number == 0 and roots:
                    figures["memory"]["after"] = memory(roots)
                changing.setdefault(phase.__name__, []).append(await self._one(phase))
        figures |= {name: combine(runs) for name, runs in changing.items()}
        await self.fill()
        if roots:
            figures["memory"]["full"] = memory(roots)
        for phase in (self.lists, self.show, self.floor):
            figures[phase.__name__] = combine([await self._one(phase) for _ in range(sizes.repeat)])
        if roots:
            figures["idle"] = combine([await self._one(self.idle)])
        await self.delete()
        self._control.close()
        return {**figures, "problems": self.problems}

    async def _one(self, phase: Callable[[], Awaitable[Any]]) -> Any:
        result = await phase()
        progress(f"{phase.__name__}: {_brief(result)}")
        return result

    # --- phases that change something --------------------------------------------------------------------------

    async def boot_one(self) -> dict[str, Any]:
        """Boot single servers on an idle cloud."""
        boots, posts = [], []
        meter = Meter(self.target.roots)
        for _ in range(self.sizes.singles):
            begin = time.perf_counter()
            body = self.target.server(self._name("one"))
            server = (await self._control.json("POST", "/servers", body))["server"]["id"]
            posts.append(time.perf_counter() - begin)
            await self.active(server, begin)
            boots.append(time.perf_counter() - begin)
            await asyncio.sleep(REST)
        return {"boot": spread(boots), "post": spread(posts), **meter.cost(self.sizes.singles)}

    async def active(self, server: str, begin: float) -> None:
        """Wait until a server is ACTIVE."""
        while True:
            status = (await self._control.json("GET", f"/servers/{server}"))["server"]["status"]
            if status == "ACTIVE":
                return
            if status == "ERROR" or time.perf_counter() - begin > self.sizes.patience:
                self.problems.append(f"a server stayed in {status}")
                return
            await asyncio.sleep(POLL_ONE)

    async def post(self) -> dict[str, Any]:
        """Create servers from one client, without a pause."""
        meter = Meter(self.target.roots)
        async with self._settled("post", self.sizes.posts):
            times = await self._create("post", self.sizes.posts, clients=1)
        return {"post": spread(times), **meter.cost(self.sizes.posts)}

    async def boot(self) -> dict[str, Any]:
        """Create servers from several clients until all are ACTIVE."""
        count = self.sizes.servers
        meter = Meter(self.target.roots)
        async with self._settled("boot", count):
            times = await self._create("boot", count, clients=self.sizes.clients)
            posted = meter.seconds
        seconds = meter.seconds
        return {
            "servers_per_s": count / seconds,
            "seconds": seconds,
            "posted_s": posted,
            "post": spread(times),
            **meter.cost(count),
        }

    async def bulk(self) -> dict[str, Any]:
        """Create many servers with one request."""
        name, count = self._name("bulk"), self.sizes.bulk
        meter = Meter(self.target.roots)
        await self._control.json("POST", "/servers", self.target.server(name, count))
        posted = meter.seconds
        await self._settle(name, count)
        seconds = meter.seconds
        return {
            "servers_per_s": count / seconds,
            "seconds": seconds,
            "post_ms": posted * 1000,
            **meter.cost(count),
        }

    async def delete(self) -> dict[str, Any]:
        """Delete all servers that were made here."""
        servers = await self._ids(self.prefix)
        times: list[float] = []

        async def remove(client: Client, server: str) -> None:
            begin = time.perf_counter()
            await client.json("DELETE", f"/servers/{server}")
            times.append(time.perf_counter() - begin)

        meter = Meter(self.target.roots)
        await self._spread_out(servers, remove, self.sizes.clients)
        while (await self._page(self.prefix, limit=1)) != []:
            if meter.seconds > self.sizes.patience:
                self.problems.append("deleted servers are still listed")
                break
            await asyncio.sleep(POLL)
        seconds = meter.seconds
        return {
            "servers": len(servers),
            "servers_per_s": len(servers) / seconds,
            "seconds": seconds,
            "request": spread(times),
            **meter.cost(len(servers)),
        }

    async def fill(self) -> None:
        """Have so many servers as the lists shall have."""
        have = len(await self._ids(self.prefix, status="ACTIVE"))
        while have < self.sizes.listed:
            name, count = self._name("fill"), min(BATCH, self.sizes.listed - have)
            await self._control.json("POST", "/servers", self.target.server(name, count))
            await self._settle(name, count)
            have += count

    # --- phases that only read ---------------------------------------------------------------------------------

    async def lists(self) -> dict[str, Any]:
        """Read pages of servers."""
        figures = {}
        for size in self.sizes.pages:
            for kind, path in (("detail", "/servers/detail"), ("brief", "/servers")):
                query = urlencode({"name": f"^{self.prefix}-", "limit": size})
                figures[f"{kind}_{size}"] = await self._pages(f"{path}?{query}", min(size, self.sizes.listed))
        return figures

    async def _pages(self, path: str, expected: int) -> dict[str, Any]:
        request, times = self.endpoint.encode("GET", path), []
        for _ in range(2):  # once to warm up is enough for a cloud in one process; two workers need two
            status, body = await self._control.send(request)
            if status != 200 or len(json.loads(body)["servers"]) != expected:
                raise BenchError(f"GET {path}: {status}, or not {expected} servers")
        meter = Meter(self.target.roots)
        for _ in range(self.sizes.page_samples):
            begin = time.perf_counter()
            status, body = await self._control.send(request)
            times.append(time.perf_counter() - begin)
            if status != 200:
                raise BenchError(f"GET {path}: {status}")
        return {**spread(times), "bytes": len(body), **meter.cost(len(times))}

    async def show(self) -> dict[str, Any]:
        """Read single servers, as fast as the clients can."""
        servers = (await self._ids(self.prefix))[:100]
        return await self._hammer([self.endpoint.encode("GET", f"/servers/{server}") for server in servers])

    async def floor(self) -> dict[str, Any]:
        """Read the document of versions, as fast as the clients can."""
        return await self._hammer([Endpoint(self.target.floor, {}).encode("GET", "/")])

    async def _hammer(self, requests: list[bytes]) -> dict[str, Any]:
        times: list[float] = []
        meter = Meter(self.target.roots)
        end = meter.begin + self.sizes.seconds

        async def one(number: int) -> None:
            client, turn = Client(self.endpoint), number * 7
            begin = time.perf_counter()
            while begin < end:
                status, body = await client.send(requests[turn % len(requests)])
                if status not in (200, 300):
                    raise BenchError(f"{status} {body[:200]!r}")
                now = time.perf_counter()
                times.append(now - begin)
                begin, turn = now, turn + 1
            client.close()

        await asyncio.gather(*(one(number) for number in range(self.sizes.clients)))
        return {"requests_per_s": len(times) / meter.seconds, **spread(times), **meter.cost(len(times))}

    async def idle(self) -> dict[str, Any]:
        """Ask nothing for a while."""
        meter = Meter(self.target.roots)
        seconds = max(6.0, self.sizes.seconds)  # at least one heartbeat of every host
        await asyncio.sleep(seconds)
        cost = meter.cost(1)
        return {"cpu_ms_per_s": cost["cpu_ms_each"] / seconds}

    # --- how -----------------------------------------------------------------------------------------------------

    def _name(self, phase: str) -> str:
        self._count += 1
        return f"{self.prefix}-{phase}-{self._count:05}"

    async def _create(self, phase: str, count: int, clients: int) -> list[float]:
        times: list[float] = []

        async def create(client: Client, name: str) -> None:
            begin = time.perf_counter()
            await client.json("POST", "/servers", self.target.server(name))
            times.append(time.perf_counter() - begin)

        await self._spread_out([self._name(phase) for _ in range(count)], create, clients)
        return times

    async def _spread_out(
        self, items: Iterable[str], work: Callable[[Client, str], Awaitable[None]], clients: int
    ) -> None:
        """Let so many clients, each with a connection of its own, work off the items."""
        remaining = iter(items)

        async def one() -> None:
            client = Client(self.endpoint)
            for item in remaining:
                await work(client, item)
            client.close()

        await asyncio.gather(*(one() for _ in range(clients)))

    @asynccontextmanager
    async def _settled(self, phase: str, count: int) -> AsyncIterator[None]:
        """Wait at the end until as many servers more than at the begin are ACTIVE."""
        name = f"{self.prefix}-{phase}-"
        before = len(await self._ids(name, status="ACTIVE"))
        yield
        await self._settle(name, before + count)

    async def _settle(self, name: str, expected: int) -> None:
        """Wait until no server whose name begins so is in BUILD, then count those that are ACTIVE."""
        end = time.perf_counter() + self.sizes.patience
        while True:
            if not await self._page(name, status="BUILD", limit=1):
                active = len(await self._ids(name, status="ACTIVE"))
                failed = expected - active and len(await self._ids(name, status="ERROR"))
                if active + failed >= expected:
                    if failed:
                        self.problems.append(f"{name}: {failed} of {expected} servers in ERROR")
                    return
            if time.perf_counter() > end:
                self.problems.append(f"{name}: still building")
                return
            await asyncio.sleep(POLL)

    async def _page(self, name: str, **query: Any) -> list[dict[str, Any]]:
        found = await self._control.json("GET", "/servers?" + urlencode({"name": f"^{name}", **query}))
        servers: list[dict[str, Any]] = found["servers"]
        return servers

    async def _ids(self, name: str, **query: Any) -> list[str]:
        found: list[str] = []
        while True:
            marker = {"marker": found[-1]} if found else {}
            page = await self._page(name, limit=500, **query, **marker)
            found += [server["id"] for server in page]
            if len(page) < 500:
                return found


def _brief(result: Any) -> str:
    """One line for people: the figures that matter, rounded."""
    if not isinstance(result, dict):
        return f"{result:.4g}" if isinstance(result, float) else str(result)
    skip = ("cpu_ms_by_name", "p90_ms", "p99_ms", "n", "client_cpu")
    return ", ".join(
        f"{key} ({_brief(value)})" if isinstance(value, dict) else f"{key} {_brief(value)}"
        for key, value in result.items()
        if key not in skip
    )
