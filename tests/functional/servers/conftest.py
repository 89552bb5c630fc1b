"""Every test about servers has a cloud that it shares with its module; its tests run in the module's loop."""

import pytest

from tests.functional.cloud import cloud, cluster, user

__all__ = ["cloud", "cluster", "user"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "servers":
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
