"""Joins CommonJS modules, such as those of Debian's xterm.js, into one script that browsers can load."""

import posixpath
import re
from pathlib import Path

import msgspec

_REQUIRE = re.compile(r"""\brequire\(\s*["'](\.{1,2}/[^"']+)["']\s*\)""")

_SCRIPT = """(() => {
const modules = {%(modules)s};
const links = %(links)s;
const loaded = {};
const load = (path) => {
  if (!loaded[path]) {
    const module = (loaded[path] = { exports: {} });
    modules[path].call(window, (target) => load(links[path][target]), module, module.exports);
  }
  return loaded[path].exports;
};
const found = load(%(entry)s);
window.%(name)s = found.%(name)s ?? found;
})();
"""


def bundle(folder: Path, entry: str, name: str) -> bytes:
    """Return a script that makes what the entry exports a global, with all modules that it requires. Blocks."""
    modules: dict[str, str] = {}
    links: dict[str, dict[str, str]] = {}
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if path in modules:
            continue
        modules[path] = (folder / path).read_text()
        links[path] = {target: _resolve(path, target) for target in _REQUIRE.findall(modules[path])}
        waiting += links[path].values()
    written = [
        f"{_json(path)}: function (require, module, exports) {{\n{text}\n}}" for path, text in sorted(modules.items())
    ]
    values = {"modules": ",\n".join(written), "links": _json(links), "entry": _json(entry), "name": name}
    return (_SCRIPT % values).encode()


def _resolve(path: str, target: str) -> str:
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if found.startswith(".."):
        raise FileNotFoundError(f"{path} requires {target}, which is outside of its package")
    return found if found.endswith(".js") else f"{found}.js"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
