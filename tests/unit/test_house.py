"""Rules of the house that import contracts cannot express."""

from pathlib import Path

import micronova

HOUSE = Path(micronova.__file__).parent


def test_packages_have_an_empty_init() -> None:
    folders = {path.parent for path in HOUSE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert [str(path) for path in HOUSE.rglob("__init__.py") if path.read_text().strip()] == []
