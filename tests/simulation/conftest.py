"""The fixture that all simulations share."""

from pathlib import Path

import pytest

from micronova.cli.state import StateDirectory


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a cloud whose keys have been created."""
    directory = tmp_path_factory.mktemp("template")
    StateDirectory(directory).keys()
    return directory
