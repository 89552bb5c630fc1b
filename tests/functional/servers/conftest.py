"""Every test about servers has a cloud that it shares with its module; its tests run in the module's loop."""

from typing import Any

import pytest

from tests.functional.cloud import OneProcess, cloud, cluster, user

__all__ = ["cloud", "cluster", "user"]


@pytest.fixture
def told(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """The notifications of a cloud in one process since: event, server, fault."""
    heard: list[tuple[str, Any, Any]] = []

    def instance(event: str, row: Any, *, context: Any, fault: Any = None) -> None:
        heard.append((event, row, fault))

    monkeypatch.setattr(cloud.process.notifier, "instance", instance)
    return heard


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "servers":
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
