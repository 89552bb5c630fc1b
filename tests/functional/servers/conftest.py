"""The tests of a module about servers share a cloud and an event loop."""

from typing import Any

import pytest

from tests.functional.cloud import ON_CLUSTER, OneProcess, cloud, cluster, user

__all__ = ["cloud", "cluster", "user"]


@pytest.fixture
def notifications(cloud: OneProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """The notifications that a cloud in one process sends during the test: event, server, fault."""
    sent: list[tuple[str, Any, Any]] = []

    def instance(event: str, row: Any, *, context: Any, fault: Any = None) -> None:
        sent.append((event, row, fault))

    monkeypatch.setattr(cloud.process.notifier, "instance", instance)
    return sent


WITHIN = {"caplog", "monkeypatch", "notifications", "spawned"}
"""Fixtures that change or watch this process, in which a cloud of separate processes does not run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "servers":
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
            if ON_CLUSTER and WITHIN & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.skip(reason="changes or watches the process of the cloud"))
