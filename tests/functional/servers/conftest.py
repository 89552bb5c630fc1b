"""The tests of a module about servers share a cloud and an event loop."""

from pathlib import Path
from typing import Any

import pytest

from tests.functional.cloud import OneProcess, cloud, cluster, user

__all__ = ["cloud", "cluster", "user"]


@pytest.fixture
def notifications(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """The notifications that a cloud in one process sends during the test: event, server, fault."""
    sent: list[tuple[str, Any, Any]] = []

    def instance(
        event: str, row: Any, *, context: Any, fault: Any = None, details: Any = None, sender: Any = None
    ) -> None:
        sent.append((event, row, fault))

    monkeypatch.setattr(cloud.process.notifier, "instance", instance)
    return sent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
