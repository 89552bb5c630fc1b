"""What runs in an environment with Nova: prints Nova's request schemas, and what they say of requests.

    PYTHON nova_side.py schemas                  prints the schemas of each operation as JSON
    PYTHON nova_side.py serve                    judges a list of requests in each line of its input
    PYTHON nova_side.py judge < REQUESTS         prints for each request whether Nova's schema accepts it

A request is [operation, "body" or "query", minor version, value]; operations are counted as in the first list. This
file imports nothing of ours, because Nova needs other versions of what we use.
"""

import json
import sys
from typing import Any

from nova.api.openstack.compute import routes  # type: ignore[import-not-found]
from nova.api.validation import validators  # type: ignore[import-not-found]

NEWEST = 104


def operations() -> list[dict[str, Any]]:
    """Return every operation with its schemas: [schema, first version, last version]."""
    found = []
    for path, methods in routes.ROUTE_LIST:
        if isinstance(methods, str):
            continue
        for method, (factory, name) in methods.items():
            main, others = factory.args
            if name == "action":
                for owner in (main, *others):
                    for action, function in getattr(owner, "wsgi_actions", {}).items():
                        found.append(_operation(method, path, action, getattr(owner, function)))
            else:
                found.append(_operation(method, path, "", getattr(main, name)))
    return found


def _operation(method: str, path: str, action: str, function: Any) -> dict[str, Any]:
    first, last = getattr(function, "min_version", None), getattr(function, "max_version", None)
    return {
        "method": method,
        "path": path,
        "action": action,
        "removed": getattr(function, "removed", False),
        "versions": [_minor(first, 1), _minor(last, NEWEST)],
        "body": _ranges(getattr(function, "request_body_schemas", None)),
        "query": _ranges(getattr(function, "request_query_schemas", None)),
    }


def _minor(version: str | None, default: int) -> int:
    return int(version.split(".")[1]) if version else default


def _ranges(schemas: Any) -> list[tuple[Any, int, int]]:
    if schemas is None:
        return []
    return [
        (schema, 1 if first.is_null() else first.ver_minor, NEWEST if last.is_null() else last.ver_minor)
        for schema, first, last in schemas._schemas
    ]


def judge(requests: list[Any]) -> list[bool]:
    """Return for each request whether the schema of its version accepts it."""
    known = operations()
    made: dict[tuple[int, str, int], Any] = {}
    verdicts = []
    for number, kind, minor, value in requests:
        key = number, kind, minor
        if key not in made:
            schema = next(schema for schema, first, last in known[number][kind] if first <= minor <= last)
            made[key] = validators._SchemaValidator(schema, False, kind == "body")
        try:
            made[key].validate(value)
            verdicts.append(True)
        except Exception:
            verdicts.append(False)
    return verdicts


def serve() -> None:
    """Judge a list of requests in each line."""
    for line in sys.stdin:
        print(json.dumps(judge(json.loads(line))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
        sys.exit()
    result = operations() if sys.argv[1] == "schemas" else judge(json.load(sys.stdin))
    json.dump(result, sys.stdout, default=str)
