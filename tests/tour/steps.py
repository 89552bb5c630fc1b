"""What every part of the tour needs: whose cloud it is, and waiting for what the cloud does."""

import time
from collections.abc import Callable
from typing import Any

from tests.osc import OpenStackClient

DEMO = "micronova-demo"
ON_TEST_IMAGE = ("--image", "test-image", "--flavor", "m1.tiny")


def until(holds: Callable[[], bool], what: str = "") -> None:
    """Ask until it holds; a command of the client takes long enough to be the pause."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what


def until_status(osc: OpenStackClient, server: str, status: str, *, cloud: str = DEMO) -> dict[str, Any]:
    """Wait until the server has the status and nothing is under way; return what the client shows of it."""
    deadline = time.monotonic() + 60
    while True:
        shown: dict[str, Any] = osc.json("server show", server, cloud=cloud)
        if shown["status"] == status and shown["OS-EXT-STS:task_state"] is None:
            return shown
        assert time.monotonic() < deadline, f"{server} is {shown['status']} ({shown['OS-EXT-STS:task_state']})"


def fields(rows: list[dict[str, Any]], name: str, value: str) -> dict[Any, Any]:
    """Return two columns of a list as a mapping."""
    return {row[name]: row[value] for row in rows}
