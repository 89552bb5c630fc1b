"""Tempest's own response schemas, as the judge of what we answer.

`check("flavors", "list_flavors", 61, status, body)` finds the schema that Tempest would use for this microversion and
fails when the answer does not match. Tempest is not installed into the test environment: its package alone, without
anything that it depends on, is fetched once into a cache (its schemas import nothing but `copy`).
"""

import copy
import functools
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema

VERSION = "47.0.0"
NEWEST = 104
_ROOM = "tempest.lib.api_schema.response.compute"


def check(
    resource: str,
    operation: str,
    minor: int,
    status: int,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Assert that an answer is what Tempest accepts at microversion 2.`minor`."""
    schema = find(resource, operation, minor)
    where = f"{resource}.{operation} at 2.{minor}"
    assert status in schema["status_code"], f"{where}: status {status}, expected {schema['status_code']}: {body}"
    wanted = schema.get("response_body")
    if wanted is None:
        assert body in (None, b"", "", {}), f"{where}: the answer must have no body, not {body}"
    else:
        _validate(wanted, body, where)
    if "response_header" in schema:
        _validate(schema["response_header"], dict(headers or {}), f"{where}, headers")


def find(resource: str, operation: str, minor: int) -> dict[str, Any]:
    """Return the newest schema of an operation that is not newer than the microversion."""
    for at in sorted(_modules(resource), reverse=True):
        if at <= minor and hasattr(_modules(resource)[at], operation):
            return _brought_up_to_date(resource, operation, minor, getattr(_modules(resource)[at], operation))
    raise LookupError(f"Tempest has no schema {resource}.{operation} up to 2.{minor}.")


def versions_of(resource: str, *more: int) -> list[int]:
    """Return the microversions that are worth a look: the first, the newest, and both sides of each change."""
    changes = {*_modules(resource), *more}
    return sorted({1, NEWEST, *changes, *(at - 1 for at in changes if at > 1)})


def _validate(schema: dict[str, Any], value: Any, where: str) -> None:
    problems = sorted(jsonschema.Draft4Validator(schema, format_checker=FORMATS).iter_errors(value), key=str)
    if problems:
        lines = [f"{'.'.join(map(str, problem.absolute_path)) or 'body'}: {problem.message}" for problem in problems]
        raise AssertionError(f"{where}: " + "; ".join(lines))


FORMATS = jsonschema.FormatChecker()


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.fromisoformat(value))


def _is_uri(value: object) -> bool:
    return not isinstance(value, str) or value.partition("://")[1] == "://"


FORMATS.checks("iso8601-date-time", raises=ValueError)(_is_time)
FORMATS.checks("date-time", raises=ValueError)(_is_time)
FORMATS.checks("uri")(_is_uri)


@functools.cache
def _modules(resource: str) -> dict[int, ModuleType]:
    """Return a resource's schema modules by the minor version from which on they hold."""
    folder = _installed() / _ROOM.replace(".", "/")
    found = {}
    for each in folder.glob("v2_*"):
        if (each / f"{resource}.py").exists():
            found[int(each.name.removeprefix("v2_"))] = importlib.import_module(f"{_ROOM}.{each.name}.{resource}")
    return found


@functools.cache
def _installed() -> Path:
    """Return where Tempest's package is, on the import path; fetch it when no run before us did."""
    given = os.environ.get("MICRONOVA_TEST_TEMPEST")  # a directory that has the package `tempest`
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "micronova" / f"tempest-{VERSION}"
    place = Path(given) if given else cache
    if not (place / "tempest").exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=place.parent))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(fresh), f"tempest=={VERSION}"], check=True)
        try:
            fresh.rename(place)  # another process may have been faster: its copy is as good
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
    sys.path.append(str(place))
    return place


# --- where Tempest's schemas have stayed behind the API ------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def _brought_up_to_date(resource: str, operation: str, minor: int, schema: dict[str, Any]) -> dict[str, Any]:
    changes = [change for name, since, change in _LATER if name == resource and minor >= since]
    if not changes or "response_body" not in schema:
        return schema
    fresh = copy.deepcopy(schema)
    for each in _objects(fresh["response_body"]):
        for change in changes:
            change(each)
    return fresh


def _objects(schema: Any) -> list[dict[str, Any]]:
    """Return every object schema inside a schema."""
    if isinstance(schema, list):
        return [found for each in schema for found in _objects(each)]
    if not isinstance(schema, dict):
        return []
    inside = [found for each in schema.values() for found in _objects(each)]
    return [schema, *inside] if isinstance(schema.get("properties"), dict) else inside


def _drop(*names: str) -> Change:
    def change(schema: dict[str, Any]) -> None:
        if all(name in schema["properties"] for name in names):
            schema["properties"] = {k: v for k, v in schema["properties"].items() if k not in names}
            schema["required"] = [name for name in schema.get("required", []) if name not in names]

    return change


_RESOURCES = (
    "vcpus", "memory_mb", "local_gb", "vcpus_used", "memory_mb_used", "local_gb_used", "free_ram_mb", "free_disk_gb",
    "current_workload", "running_vms", "disk_available_least", "cpu_info",
)  # fmt: skip


def _no_resources(schema: dict[str, Any]) -> None:
    """2.88: numbers of resources went out of hypervisors, the uptime came in."""
    if "free_ram_mb" in schema["properties"]:
        _drop(*_RESOURCES)(schema)
        schema["properties"]["uptime"] = {"type": ["string", "null"]}
        schema["required"].append("uptime")


def _hints_as_lists(schema: dict[str, Any]) -> None:
    """2.100: Tempest has the schema of requests, in which a hint may be a text; Nova stores and shows lists."""
    if "scheduler_hints" in schema["properties"]:
        values = {"type": "array", "items": {"type": "string"}}
        schema["properties"]["scheduler_hints"] = {"type": "object", "additionalProperties": values}


_LATER: tuple[tuple[str, int, Change], ...] = (
    ("hypervisors", 88, _no_resources),
    ("servers", 100, _hints_as_lists),
    ("flavors", 102, _drop("rxtx_factor", "OS-FLV-DISABLED:disabled")),
)
