"""Tests of Placement that ours does not pass, and why."""

KNOWN = {
    "basic-http: bad content length not int": "The HTTP server answers 400 before the service sees the request.",
    "aggregate: put aggregates for bad resource provider": "The body is checked before the provider is looked up: 400.",
}


def reason_for(id: str) -> str:
    """Return why a test of this id (file: name) is not passed, or nothing."""
    return KNOWN.get(id, "")
