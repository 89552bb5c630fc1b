"""Reads a subunit stream and prints each test that has ended as a line of JSON. It runs where the tests run."""

import json
import sys
from typing import Any

import subunit  # type: ignore[import-not-found]
import testtools  # type: ignore[import-not-found]


def print_result(test: dict[str, Any]) -> None:
    """Print one test: its id, how it ended, why, and the seconds that it took."""
    begun, ended = test["timestamps"]
    seconds = (ended - begun).total_seconds() if begun and ended else 0.0
    details = {name: content.as_text() for name, content in test["details"].items() if "text" in str(content)}
    reason = details.get("reason") or next((text for name, text in details.items() if "traceback" in name), "")
    print(json.dumps({"id": test["id"], "status": test["status"], "why": reason, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    result = testtools.StreamToDict(print_result)
    result.startTestRun()
    subunit.ByteStreamToStreamResult(sys.stdin.buffer, non_subunit_name="stdout").run(result)
    result.stopTestRun()
