"""Rules about packages that import contracts cannot express."""

import subprocess
import sys
from pathlib import Path

import micronova

SOURCE = Path(micronova.__file__).parent
ROOT = Path(__file__).parents[2]


def test_packages_have_an_empty_init() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert [str(path) for path in SOURCE.rglob("__init__.py") if path.read_text().strip()] == []


def test_no_cycle_and_the_picture_shows_the_packages_as_they_are() -> None:
    script = ROOT / "scripts" / "import-graph"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
