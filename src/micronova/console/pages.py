"""What browsers load: our own pages, and the libraries that the system's packages bring."""

import html
import importlib.resources
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True)
class Library:
    """A JavaScript library that is installed on this machine."""

    name: str
    folder: Path
    entry: str  # the file that must be there
    package: str
    setting: str

    def missing(self) -> str | None:
        """Say in one line what to do if it is not installed."""
        if (self.folder / self.entry).is_file():
            return None
        return (
            f"{self.name} is not installed on the console proxy's machine ({self.folder} has no {self.entry}): "
            f"apt-get install {self.package}, or say where it is with {self.setting}."
        )


class Pages:
    """Files by path; what is not there, or not of a known type, is not served."""

    def __init__(self, novnc: Path, xterm: Path) -> None:
        self._own = Path(str(importlib.resources.files("micronova.console") / "pages"))
        self._libraries = {
            "novnc": Library(
                name="noVNC", folder=novnc, entry="core/rfb.js", package="novnc", setting="console.novnc_path"
            ),
            "xterm": Library(
                name="xterm.js", folder=xterm, entry="xterm.js", package="libjs-xterm", setting="console.xterm_path"
            ),
        }
        self._needs = {"vnc_lite.html": "novnc", "serial.html": "xterm"}

    def missing(self) -> list[str]:
        """Say what to install, one line for each library."""
        return [text for library in self._libraries.values() if (text := library.missing())]

    def find(self, path: str) -> tuple[int, str, bytes] | None:
        """Return status, type and content of a path, or None. Blocks."""
        first, _, rest = path.lstrip("/").partition("/")
        if not rest:
            needed = self._needs.get(first)
            problem = self._libraries[needed].missing() if needed else None
            if problem:
                return 503, TYPES[".html"], self.problem(problem)
            return _read(self._own, first)
        library = self._libraries.get(first)
        return None if library is None else _read(library.folder, rest)

    def problem(self, text: str) -> bytes:
        """Return a page that says what is wrong."""
        template = (self._own / "problem.html").read_text()
        return template.replace("PROBLEM", html.escape(text)).encode()


def _read(folder: Path, name: str) -> tuple[int, str, bytes] | None:
    parts = PurePosixPath(name).parts
    kind = TYPES.get(PurePosixPath(name).suffix)
    if kind is None or any(part in ("..", "/") or part.startswith(".") for part in parts):
        return None
    try:
        return 200, kind, (folder / name).read_bytes()
    except (OSError, ValueError):  # no such file, or no such name
        return None
