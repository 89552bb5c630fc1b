"""Compares the requests that our compute API accepts with those that Nova's schemas accept.

    python -m tests.nova_schemas [--nova PYTHON]

PYTHON is that of an environment with Nova; without it, Nova is installed into a temporary one. For each operation, at
each microversion at which Nova's schema of its body or query changes, requests are made that differ from a good one in
one place. Nova's own validator says which of them are valid. A cloud on the fake driver gets all of them: what Nova
refuses must be answered with 400, and what Nova's schema accepts must not be called malformed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

from micronova.http.service import Route
from tests.api_coverage import key
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud
from tests.nova_schemas.known import reason_for
from tests.nova_schemas.probes import Probe, body_probes, minimal, query_probes
from tests.schemas.openapi import Wrong

SIDE = Path(__file__).with_name("nova_side.py")
NOVA = "34.0.0"
DELETES = ("forceDelete",)
# Good bodies of old microversions, where good_requests.py has only the newest.
OLD_BODIES = {"POST /os-server-groups": {"server_group": {"name": "x", "policies": ["affinity"]}}}
# How answers begin that call a request malformed; others of 400 are about what it names.
MALFORMED = ("Invalid input", "Malformed", "Additional properties", "There is no such action")


def ask_nova(python: str, what: str, given: Any = None) -> Any:
    """Run the part that needs Nova."""
    done = subprocess.run([python, SIDE, what], input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


class Comparison:
    """The comparison of one cloud with Nova."""

    def __init__(self, python: str, cloud: FullCloud, only: str) -> None:
        self._python = python
        self._cloud = cloud
        self._only = only
        self._operations: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.differences: list[tuple[str, Probe, int, str]] = []

    async def run(self) -> None:
        """Compare everything."""
        self._operations = ask_nova(self._python, "schemas")
        self._owner = await self._cloud.person("admin", "member", "reader")
        self._things = await good.make_things(self._cloud, self._owner)
        self._service = self._cloud.process.services["compute"]
        probes = self._probes()
        verdicts = ask_nova(self._python, "judge", [[p.operation, p.kind, p.minor, p.value] for p in probes])
        for accepted in (False, True):
            for probe, verdict in zip(probes, verdicts, strict=True):
                if verdict == accepted:
                    await self._send(probe, accepted)
            print(f"{self.counts.total()} requests, {len(self.differences)} differences", file=sys.stderr)

    def _route(self, number: int, minor: int) -> Route | None:
        operation = self._operations[number]
        wanted = key(operation["method"], operation["path"], operation["action"])
        for route in self._service.routes:
            if key(route.method, route.path, route.action or "") == wanted and minor in route.versions:
                return route
        return None

    def _probes(self) -> list[Probe]:
        found: list[Probe] = []
        for number, operation in enumerate(self._operations):
            title = f"{operation['method']} {operation['path']} {operation['action']}".strip()
            if operation["removed"] or self._only not in title or operation["path"].startswith("/os-volumes_boot"):
                continue
            first, last = operation["versions"]
            for kind in ("body", "query"):
                ranges = [
                    (schema, max(1, low, first))
                    for schema, low, high in operation[kind]
                    if max(1, low, first) <= min(high, last)
                ]
                names = {name for schema, _ in ranges for name in schema.get("properties", {})}
                before = None
                for index, (schema, minor) in enumerate(ranges):
                    route = self._route(number, minor)
                    if route is None:
                        self.counts[f"not here: {title} at 2.{minor}"] += 1
                        continue
                    if kind == "query":
                        found += query_probes(number, minor, schema, names)
                        continue
                    base = self._good(number, minor, route, schema)
                    if base is None:
                        self.counts[f"no good body: {title} at 2.{minor}"] += 1
                        continue
                    whole = index in (0, len(ranges) - 1)
                    found += body_probes(number, minor, schema, None if whole else before, base, None)
                    before = schema
        found.sort(key=lambda each: "quota" in self._operations[each.operation]["path"])  # low quotas refuse the rest
        unique = {(p.operation, p.kind, p.minor, json.dumps(p.value, sort_keys=True)): p for p in found}
        return list(unique.values())

    def _good(self, number: int, minor: int, route: Route, schema: dict[str, Any]) -> Any:
        """Return a body that Nova accepts at this version."""
        candidates = [OLD_BODIES.get(route.label), minimal(schema)]
        try:
            candidates.insert(0, json.loads(json.dumps(good.body(route, self._things))))
        except (good.Unknown, TypeError):
            pass
        verdicts = self._judge_once(number, minor, candidates)
        return next((each for each, fine in zip(candidates, verdicts, strict=True) if fine), None)

    def _judge_once(self, number: int, minor: int, values: list[Any]) -> list[bool]:
        if not hasattr(self, "_judge"):
            self._judge = subprocess.Popen(
                [self._python, SIDE, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        assert self._judge.stdin and self._judge.stdout
        self._judge.stdin.write(json.dumps([[number, "body", minor, value] for value in values]) + "\n")
        self._judge.stdin.flush()
        found: list[bool] = json.loads(self._judge.stdout.readline())
        return found

    async def _send(self, probe: Probe, accepted: bool) -> None:
        route = self._route(probe.operation, probe.minor)
        assert route is not None
        if accepted and (route.action in DELETES or route.method == "DELETE"):
            return
        if accepted:
            await self._have_a_server()
        path = good.path(self._service, route, self._things)
        noun = route.path.split("/")[1]
        if (old := good.old_id(noun, probe.minor)) is not None:
            path = path.replace(self._things[noun], old)
        body = probe.value if probe.kind == "body" else None
        if probe.kind == "query":
            path += "?" + urllib.parse.urlencode(probe.value, doseq=True)
            if route.body is not None:
                body = good.body(route, self._things)
        try:
            answer = await self._owner.request(route.method, path, body, minor=probe.minor)
        except Wrong as wrong:  # the answer is not what our OpenAPI document says
            self.differences.append((route.label, probe, 0, str(wrong)))
            return
        self.counts["accepted by Nova" if accepted else "refused by Nova"] += 1
        if answer.status == 202 and route.path == "/servers":
            await self._make_room()
        if not accepted and answer.status != 400:
            self.differences.append((route.label, probe, answer.status, ""))
        elif accepted and answer.status == 400:
            message = next(iter(answer.json().values()))["message"]
            if message.startswith(MALFORMED):
                self.differences.append((route.label, probe, 400, message))
            else:
                self.counts["accepted by Nova's schema, and refused for another reason"] += 1

    async def _make_room(self) -> None:
        """Delete the servers that requests have made."""
        for server in (await self._owner.do("GET", f"{good.C}/servers"))["servers"]:
            if server["id"] != self._things["servers"]:
                await self._owner.request("DELETE", f"{good.C}/servers/{server['id']}")

    async def _have_a_server(self) -> None:
        """Boot another server when the last one is gone or busy with what a request before asked for."""
        path = f"{good.C}/servers/{self._things['servers']}"
        shown = await self._owner.request("GET", path)
        if shown.status == 200 and shown.json()["server"]["status"] == "ACTIVE":
            return
        await self._enable_hosts()
        server = {"name": "x", "imageRef": self._things["image"], "flavorRef": "1", "networks": "none"}
        answer = await self._owner.do("POST", f"{good.C}/servers", {"server": server})
        self._things["servers"] = self._things["os-volumes_boot"] = answer["server"]["id"]
        path = f"{good.C}/servers/{self._things['servers']}"

        async def active() -> bool | None:
            return True if (await self._owner.do("GET", path))["server"]["status"] == "ACTIVE" else None

        await self._make_room()
        await self._cloud.until(active, "the server to run")

    async def _enable_hosts(self) -> None:
        """Undo what requests about services and hosts may have done."""
        path = f"{good.C}/os-services"
        for service in (await self._owner.do("GET", f"{path}?binary=nova-compute"))["services"]:
            await self._owner.do("PUT", f"{path}/{service['id']}", {"status": "enabled", "forced_down": False})


async def compare(python: str, only: str) -> int:
    """Print every difference that has no known reason; return how many there are."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        cloud = FullCloud(Path(place))
        await cloud.start()
        try:
            comparison = Comparison(python, cloud, only)
            await comparison.run()
        except AssertionError as error:  # what was compared until then is shown
            print(f"stopped: {error}")
        finally:
            await cloud.stop()
    unexplained: dict[str, list[str]] = {}
    reasons: Counter[str] = Counter()
    for label, probe, status, message in comparison.differences:
        reason = reason_for(label, probe, status, message)
        if reason:
            reasons[reason] += 1
            continue
        where = f"{label} {probe.kind} {probe.place}: {status} {message[:150]}"
        unexplained.setdefault(where, []).append(f"2.{probe.minor} {probe.tried}")
    for where, tried in unexplained.items():
        print(f"{where}\n    {'; '.join(tried)[:600]}")
    for text, count in sorted((comparison.counts | reasons).items()):
        print(f"{count:7} {text}")
    print(f"{sum(map(len, unexplained.values()))} differences without a reason, {time.monotonic() - begin:.0f} s")
    return sum(map(len, unexplained.values()))


def nova_environment(place: str) -> str:
    """Install Nova into a directory; return its Python."""
    print(f"Installing Nova {NOVA} into a temporary environment", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    subprocess.run([f"{place}/bin/pip", "install", "--quiet", f"nova=={NOVA}"], check=True)
    return f"{place}/bin/python"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.nova_schemas")
    parser.add_argument("--nova", metavar="PYTHON", help="Python of an environment with Nova.")
    parser.add_argument("--only", default="", help="Only operations whose method, path and action contain this.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nova-") as place:
        sys.exit(asyncio.run(compare(given.nova or nova_environment(place), given.only)) != 0)
