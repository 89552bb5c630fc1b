"""Network namespaces: files in /run/netns on which none is mounted."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from micronova.privileged import devices, kernel
from micronova.privileged.verbs import EnsureNamespace

NAME = "mn-0123abcd"


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of a namespace whose mount is gone, such as after the end of the mount namespace that it was in."""
    for module in (devices, kernel):
        monkeypatch.setattr(module, "NAMESPACES", tmp_path)
    file = tmp_path / NAME
    file.touch()
    return file


def test_such_a_namespace_is_made_anew(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: Sequence[str], text: str | None = None, *, quiet: bool = False) -> str:
        asked.append((*command, left.exists()))
        raise kernel.Failed("enough")

    monkeypatch.setattr(devices, "run", run)
    with pytest.raises(kernel.Failed, match="enough"):
        devices.ensure_namespace(EnsureNamespace(namespace=NAME, forward=False), NAME)
    assert asked == [("ip", "netns", "add", NAME, False)]


def test_deleting_such_a_namespace_removes_the_file(left: Path) -> None:
    devices.delete_namespace(NAME)
    assert not left.exists()
    devices.delete_namespace(NAME)
