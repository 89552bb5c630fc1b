"""What the simulations share."""

from pathlib import Path

import pytest

from micronova.cli.state import StateDirectory


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a cloud that has its keys."""
    directory = tmp_path_factory.mktemp("template")
    StateDirectory(directory).keys()
    return directory
