"""Writes docs/api-coverage.md from the route declarations: `python -m tests.api_coverage`.

The compute API is compared with Nova's (tests/nova_api.txt). Of the other services the page lists what they have.
"""

import asyncio
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from micronova.api.compute import removed
from micronova.http.service import Route, Service
from tests.functional.full_cloud import FullCloud

NEWEST = 104
PAGE = Path(__file__).parent.parent / "docs" / "api-coverage.md"
FACTS = Path(__file__).with_name("nova_api.txt")

HERE, PART, REFUSED, MISSING, REMOVED = "yes", "in part", "501", "**missing**", "removed"

# Routes whose handlers answer 501 to every request that is otherwise valid, and why.
ALWAYS_501 = {
    "GET /os-hosts/{id}/startup": "no driver switches hosts on, nor does Nova's for libvirt",
    "GET /os-hosts/{id}/shutdown": "no driver switches hosts off, nor does Nova's for libvirt",
    "GET /os-hosts/{id}/reboot": "no driver reboots hosts, nor does Nova's for libvirt",
    "GET /os-baremetal-nodes": "there is no bare metal service; Nova answers the same without one",
    "GET /os-baremetal-nodes/{id}": "there is no bare metal service; Nova answers the same without one",
    "POST /servers/{server_id}/shares": "there is no shared file system service",
}

# Where what Nova does not have is explained.
_OWN = {
    "/openapi.json": " (see [openapi.md](openapi.md))",
    "/os-fault-rules/{host}": " (only with `api.fault_injection`, see [fake-driver.md](fake-driver.md))",
}

INTRODUCTION = (
    "This page is generated from the route declarations: `python -m tests.api_coverage` writes it, and a test fails",
    "when it is out of date. It counts operations: a method on a path, or one action. An operation that is here may",
    "refuse options that need what the cloud does not have, for example the live migration of a real guest.",
)

Key = tuple[str, str, str]  # method, path with {} for its parameters, action
Declared = Sequence[tuple[Service, Route]]


@dataclass(frozen=True)
class Operation:
    """One operation of Nova's API."""

    method: str
    path: str
    action: str
    minors: frozenset[int]  # the microversions at which it exists; none if it was removed

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.method, self.path, self.action) if part)


def nova_operations() -> list[Operation]:
    """Read the facts about Nova."""
    found = []
    for line in FACTS.read_text().splitlines():
        if not line.startswith("#"):
            method, path, *action, versions = line.split()
            found.append(Operation(method, path, "".join(action), _minors(versions)))
    return found


def _minors(versions: str) -> frozenset[int]:
    if versions == "removed":
        return frozenset()
    first, last = versions.split("-")
    return frozenset(range(_minor(first), (_minor(last) if last else NEWEST) + 1))


def _minor(version: str) -> int:
    return int(version.removeprefix("2."))


def key(method: str, path: str, action: str) -> Key:
    """Return what an operation is known by, however the parameters in its path are called."""
    return method, re.sub(r"{[^}]*}", "{}", path), action


def compute_routes(declared: Declared) -> dict[Key, list[Route]]:
    """Return the routes of the compute API."""
    found: dict[Key, list[Route]] = {}
    for service, route in declared:
        if service.name == "compute":
            # Nova's facts name the actions once, for /servers.
            action = "" if route.path.startswith("/os-volumes_boot/") else route.action or ""
            found.setdefault(key(route.method, route.path or "/", action), []).append(route)
    return found


def state_of(operation: Operation, routes: Sequence[Route]) -> str:
    """Return whether an operation of Nova's is here."""
    if not operation.minors:
        return REMOVED if any(route.handler is removed.gone for route in routes) else MISSING
    ours = {minor for route in routes for minor in range(1, NEWEST + 1) if minor in route.versions}
    if not ours & operation.minors:
        return MISSING
    if operation.text in ALWAYS_501:
        return REFUSED
    return HERE if ours >= operation.minors else PART


def page(declared: Declared) -> str:
    """Return the text of docs/api-coverage.md."""
    operations, ours = nova_operations(), compute_routes(declared)
    states = {each: state_of(each, ours.get(key(each.method, each.path, each.action), [])) for each in operations}
    counts = {state: list(states.values()).count(state) for state in (HERE, PART, REFUSED, MISSING, REMOVED)}
    actions = [state for each, state in states.items() if each.path == "/servers/{id}/action"]
    known = {key(each.method, each.path, each.action) for each in operations}
    own = [route for name, routes in ours.items() if name not in known for route in routes]
    lines = [
        "# API coverage",
        "",
        *INTRODUCTION,
        "",
        "## Compute",
        "",
        f"Nova has {len(operations)} operations at microversion 2.{NEWEST} and below, of which "
        f"{sum(not each.minors for each in operations)} were removed and answer 410.",
        "",
        "| | operations |",
        "|---|---|",
        f"| here at all of Nova's microversions | {counts[HERE]} |",
        f"| here at some of them | {counts[PART]} |",
        f"| here, always answers 501 | {counts[REFUSED]} |",
        f"| missing | {counts[MISSING]} |",
        f"| removed in Nova, answers 410 here too | {counts[REMOVED]} |",
        "",
        f"Of the {len(actions)} server actions {sum(state == HERE for state in actions)} are here, "
        f"{actions.count(MISSING)} are missing and {actions.count(REMOVED)} were removed.",
        "",
        "Besides there are "
        + ", ".join(f"`{route.method} {route.path}`{_OWN.get(route.path, '')}" for route in own)
        + ".",
        "",
        "Compute uses no shared file system service, so no server has shares. "
        "`/os-assisted-volume-snapshots`, with which a volume service asks for snapshots of attached volumes that are "
        "files on a shared file system, makes none: hosts have no such volumes. As in Nova, a request is checked and "
        "accepted, and the snapshot gets the status `error` (`error_deleting`) at the volume service. What `PUT` of a "
        "volume attachment cannot do is in "
        "[volumes.md](volumes.md).",
        "",
        "`/os-volumes_boot/{id}/action` takes the same actions as `/servers/{id}/action`; they are counted once.",
        "",
        "| operation | microversions | here |",
        "|---|---|---|",
        *(_row(each, state) for each, state in states.items()),
        "",
    ]
    for title, name in (
        ("Identity", "identity"),
        ("Image", "image"),
        ("Network", "network"),
        ("Block storage", "volume"),
    ):
        lines += _service(title, [(service, route) for service, route in declared if service.name == name])
    return "\n".join(lines)


def _row(operation: Operation, state: str) -> str:
    action = f" `{operation.action}`" if operation.action else ""
    versions = ""
    if operation.minors:
        first, last = min(operation.minors), max(operation.minors)
        versions = f"2.{first} and later" if last == NEWEST else f"2.{first} to 2.{last}"
    why = f": {ALWAYS_501[operation.text]}" if state == REFUSED else ""
    return f"| `{operation.method} {operation.path}`{action} | {versions} | {state}{why} |"


def _service(title: str, declared: Declared) -> list[str]:
    methods: dict[str, list[str]] = {}
    for service, route in declared:
        methods.setdefault(f"{service.mount}{service.prefix}{route.path}", []).append(route.method)
    rows = [f"| `{path}` | {', '.join(_in_order(found))} |" for path, found in sorted(methods.items())]
    return [
        f"## {title}",
        "",
        f"The embedded service has {sum(len(set(found)) for found in methods.values())} operations on "
        f"{len(methods)} paths.",
        "",
        "| path | methods |",
        "|---|---|",
        *rows,
        "",
    ]


def _in_order(methods: Iterable[str]) -> list[str]:
    return sorted(set(methods), key=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE").index)


async def main() -> None:
    """Start a cloud, and write the page from the routes of its services."""
    with tempfile.TemporaryDirectory() as directory:
        cloud = FullCloud(Path(directory))
        await cloud.start()
        try:
            PAGE.write_text(page(cloud.routes()))
        finally:
            await cloud.stop()


if __name__ == "__main__":
    asyncio.run(main())
