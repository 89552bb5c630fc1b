"""The files that browsers load: our own pages, and libraries from the system's packages."""

import html
import importlib.resources
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from micronova.console.bundle import bundle

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}

File = tuple[int, str, bytes]
"""Status, type and content."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A JavaScript library that is installed on this machine."""

    name: str
    folder: Path
    entry: str  # a file that must exist
    package: str
    setting: str

    def missing(self) -> str | None:
        """Return one line that says what to do if it is not installed, else None."""
        if (self.folder / self.entry).is_file():
            return None
        return (
            f"{self.name} is not installed on the console proxy's machine ({self.folder} has no {self.entry}): "
            f"apt-get install {self.package}, or say where it is with {self.setting}."
        )


class Pages:
    """Serves files by path, if their type is known."""

    def __init__(self, novnc: Path, xterm: Path, spice: Path) -> None:
        self._own = Path(str(importlib.resources.files("micronova.console") / "pages"))
        self._novnc = Library(
            name="noVNC", folder=novnc, entry="core/rfb.js", package="novnc", setting="console.novnc_path"
        )
        self._xterm = Library(
            name="xterm.js", folder=xterm, entry="lib/xterm.js", package="node-xterm", setting="console.xterm_path"
        )
        self._spice = Library(
            name="spice-html5", folder=spice, entry="main.js", package="spice-html5", setting="console.spice_html5_path"
        )
        self._needs = {"vnc_lite.html": self._novnc, "serial.html": self._xterm, "spice_auto.html": self._spice}

    def missing(self) -> list[str]:
        """Return what to install, one line per library; SPICE is left out, as few clouds offer it: its page says it."""
        return [text for library in (self._novnc, self._xterm) if (text := library.missing())]

    def find(self, path: str) -> File | None:
        """Return the file at a path, or None. Blocks."""
        name = path.lstrip("/")
        library = self._needs.get(name)
        problem = library.missing() if library else None
        if problem:
            return 503, TYPES[".html"], self.problem(problem)
        try:
            if name == "xterm.js":
                return 200, TYPES[".js"], bundle(self._xterm.folder, self._xterm.entry, "Terminal")
            if name == "xterm.css":  # Debian's package has it in lib, the others in css
                return _read(self._xterm.folder, "lib/xterm.css") or _read(self._xterm.folder, "css/xterm.css")
            if name.startswith("novnc/"):
                return _read(self._novnc.folder, name.removeprefix("novnc/"))
            if name.startswith("spice-html5/"):
                return _read(self._spice.folder, name.removeprefix("spice-html5/"))
            return _read(self._own, name)
        except (OSError, ValueError):  # no such file, or an invalid name
            return None

    def problem(self, text: str) -> bytes:
        """Return a page that says what is wrong."""
        template = (self._own / "problem.html").read_text()
        return template.replace("PROBLEM", html.escape(text)).encode()


def _read(folder: Path, name: str) -> File | None:
    parts = PurePosixPath(name).parts
    kind = TYPES.get(PurePosixPath(name).suffix)
    if kind is None or any(part == "/" or part.startswith(".") for part in parts):
        return None
    file = folder / name
    return (200, kind, file.read_bytes()) if file.is_file() else None
