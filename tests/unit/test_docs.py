"""What the documents and the module docstrings name exists: files, functions, links, commands, settings, commits."""

import ast
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

import micronova
from micronova.cli.main import main
from micronova.conf.settings import Settings
from micronova.scheduler.filters.registry import BUILT_IN as BUILT_IN_FILTERS
from micronova.scheduler.weights.registry import BUILT_IN as BUILT_IN_WEIGHERS
from tests.documented import command_with

ROOT = Path(__file__).parents[2]
SOURCE = Path(micronova.__file__).parent
# CHANGELOG.md is left out: it names files as they were.
DOCUMENTS = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(ROOT / "docs").glob("*.md"),
]
MODULES = sorted(SOURCE.rglob("*.py"))
TARGETS = set(re.findall(r"^([a-z][a-z0-9.-]*|\.venv):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SECTIONS = {
    section.name: {option.name for option in msgspec.structs.fields(section.type)}
    for section in msgspec.structs.fields(Settings)
}
FILE = re.compile(r"\.?[\w.-]+(/[\w.-]+)*\.(py|md|toml|svg|png|txt|yml|service|mako)")
SYMBOL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FOLDER = re.compile(r"[a-z_]+(/[a-z_]+)*/")

# Files of a cloud's directory, of a user's project, or of other programs.
GENERATED = {"micronova.toml"}


def _code(text: str) -> list[str]:
    """Return what stands in backticks or in blocks of code."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"``?([^`\n]+)``?", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [*blocks, *spans]


def _spans(text: str) -> list[str]:
    return re.findall(r"``?([^`\n]+)``?", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _files_in_blocks(text: str) -> list[str]:
    """Return our files that blocks of code name; a path of a machine or of a URL is not ours."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    words = [word.strip("(),:;'\"") for block in blocks for word in block.split()]
    return [word for word in words if FILE.fullmatch(word) and (_is_ours(word) or word.endswith((".py", ".md")))]


NAMES = {
    path.name: path
    for base in (SOURCE, ROOT / "tests", ROOT / "packaging")
    for path in sorted(base.rglob("*"), reverse=True)
    if "__pycache__" not in path.parts
}


def _exists(name: str, beside: Path) -> Path | None:
    """Return the file or folder of that name: from the root, the source, the tests, or beside who names it."""
    for base in (ROOT, SOURCE, beside, beside.parent, ROOT / "tests", ROOT / "docs"):
        if (base / name).exists():
            return base / name
    return NAMES.get(name.rstrip("/"))


@functools.cache
def _texts() -> list[tuple[Path, str]]:
    """Return the documents, and the docstrings of modules with the files that they are of."""
    docstrings = [(path, ast.get_docstring(ast.parse(path.read_text())) or "") for path in MODULES]
    return [(path, path.read_text()) for path in DOCUMENTS] + docstrings


def _here(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_and_the_functions_in_them() -> None:
    wrong = []
    for path, text in _texts():
        for span in [*_spans(text), *_files_in_blocks(text)]:
            name, _, symbol = span.partition(" ")
            if "NAME" in name or "NNNN" in name or not (FILE.fullmatch(name) or FOLDER.fullmatch(name)):
                continue
            found = _exists(name, path.parent)
            if found is None and (name in GENERATED or (FOLDER.fullmatch(name) and not _is_ours(name))):
                continue
            if found is None:
                wrong.append(f"{_here(path)}: {name}")
            elif found.suffix == ".py" and symbol.isidentifier() and not _defines(found, symbol):
                wrong.append(f"{_here(path)}: {span}")
    assert wrong == []


def test_functions_that_follow_the_name_of_their_file() -> None:
    wrong = []
    for path, text in _texts():
        for name, symbols in re.findall(r"`([\w./-]+\.py)`( `[\w.]+`(?:, `[\w.]+`)*)", text):
            module = _exists(name, path.parent)
            named = [symbol for symbol in re.findall(r"`([\w.]+)`", symbols) if not FILE.fullmatch(symbol)]
            if module is not None:  # else the test above says so
                wrong += [f"{_here(path)}: {name} {symbol}" for symbol in named if not _defines_all(module, symbol)]
    assert wrong == []


def test_functions_after_an_arrow() -> None:
    """A span after an arrow is in the file that was named last, or a file."""
    wrong = []
    for path, text in _texts():
        for line in text.splitlines():
            module: Path | None = None
            for arrow, span in re.findall(r"(→\s*)?`([^`]+)`", line):
                if FILE.fullmatch(span):
                    module = _exists(span, path.parent)
                elif arrow and module is not None and module.suffix == ".py" and SYMBOL.fullmatch(span):
                    wrong += [] if _defines_all(module, span) else [f"{_here(path)}: {module.name} {span}"]
    assert wrong == []


def test_private_names_are_in_a_file_that_stands_beside_them() -> None:
    """A private name in a paragraph, a list item or a row of a table is in one of the modules that it names."""
    wrong = []
    for path in DOCUMENTS:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for item in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", prose):
            spans = _spans(item)
            files = [
                _exists(name, path.parent)
                for name in (span.partition(" ")[0] for span in spans)
                if FILE.fullmatch(name)
            ]
            modules = [file for file in files if file is not None and file.suffix == ".py"]
            private = [span for span in spans if re.fullmatch(r"_[A-Za-z]\w*", span)] if modules else []
            wrong += [f"{_here(path)}: {name}" for name in private if not any(_defines(each, name) for each in modules)]
    assert wrong == []


def _defines_all(module: Path, dotted: str) -> bool:
    return all(_defines(module, symbol) for symbol in dotted.split("."))


def _defines(module: Path, symbol: str) -> bool:
    pattern = rf"^\s*(async def|def|class) {symbol}\b|^{symbol}\b"
    return re.search(pattern, module.read_text(), re.MULTILINE) is not None


def _is_ours(folder: str) -> bool:
    return (SOURCE / folder.split("/")[0]).is_dir() or folder.split("/")[0] in ("tests", "docs", "scripts", "packaging")


@pytest.mark.parametrize("path", DOCUMENTS, ids=_here)
def test_links(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    local = [link.partition("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_here)
def test_make_targets(path: Path) -> None:
    named = {
        target
        for code in _code(path.read_text())
        for target in re.findall(r"^(?:\$ )?(?:sudo )?make ([a-z.][\w.-]*)", code, re.MULTILINE)
    }
    assert named - TARGETS == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=_here)
def test_commands(path: Path) -> None:
    context = click.Context(main)
    wrong = []
    for code in _code(path.read_text()):
        for line in re.findall(r"^\W*(?:\.venv/bin/|sudo )*micronova ((?:[a-z][a-z-]* ?)+)", code, re.MULTILINE):
            group: click.Command = main
            for word in line.split():
                if not isinstance(group, click.Group):
                    break
                command = group.get_command(context, word)
                if command is None:
                    wrong.append(f"micronova {line}")
                    break
                group = command
    assert wrong == []


@pytest.mark.parametrize(
    "words",
    [("pg_dump ",), ("pg_restore ",), ("CREATE ROLE micronova_2",), ("ALTER ROLE micronova_2",), ("PASSWORD NULL",)],
)
def test_commands_of_the_upgrade_and_of_the_rotation(words: tuple[str, ...]) -> None:
    """`make upgrade-test` and `make rotation-test` run them as they stand in the page; here they are only found."""
    assert command_with("operate.md", *words)


def test_settings() -> None:
    wrong = []
    for path, text in _texts():
        for span in _spans(text):
            section, dot, option = span.partition(" ")[0].partition(".")
            if span in ("metrics.update", "volume.usage"):  # notifications
                continue
            if not dot or section not in SECTIONS or not re.fullmatch("[a-z_]+", option):
                continue
            module = SOURCE / section / option
            known = option in SECTIONS[section] or module.is_dir() or module.with_suffix(".py").exists()
            if not known and option not in ("py", "md", "toml"):
                wrong.append(f"{_here(path)}: {span}")
    assert wrong == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_version_is_the_package_s_or_that_of_the_last_release() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (".dev" in version) == (sections[0] == "Unreleased")
    released = next(each for each in sections if each != "Unreleased").split()[0]
    texts = {path: path.read_text() for path in [*DOCUMENTS, *(ROOT / "docs").glob("*.svg")]}
    named = {
        (_here(path), found)
        for path, text in texts.items()
        for found in re.findall(r"\b[Mm]icronova(?: |&#160;|==|-)v?(\d+\.\d+\.\d+(?:\.dev\d+)?)", text)
    }
    assert {(where, found) for where, found in named if found not in (version, released)} == set()
    assert {where for where, _ in named} >= {"docs/first-server.md", "docs/demo.svg"}


def _git(*arguments: str) -> str:
    # Who runs the tests may be another user than the owner of the work tree.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_commits() -> None:
    """The commits that documents name, such as those that figures were measured at, are in the history.

    A source distribution has no history and a shallow clone only the end of it: there is nothing to check then.
    """
    if not (ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository").strip() == "true":
        return
    history = _git("rev-list", "HEAD").split()
    wrong = [
        f"{_here(path)}: {word}"
        for path in (*DOCUMENTS, ROOT / "CHANGELOG.md")
        for word in _commits(path.read_text())
        if not any(commit.startswith(word) for commit in history)
    ]
    assert wrong == []


def _commits(text: str) -> list[str]:
    """Return the words outside of code that have the form of a commit id: 7 to 40 hexadecimal digits of both kinds."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.DOTALL)
    words = re.findall(r"(?<![\w-])[0-9a-f]{7,40}(?![\w-])", prose)
    return [word for word in words if not word.isdecimal() and not word.isalpha()]


def test_the_form_of_commit_ids() -> None:
    text = "at 06c959e (41f209a), `1a2b3c4d`, bug 1161411, 87217b19-0000-4000-8000-de71e10e3050\n```\ned25519\n```"
    assert _commits(text) == ["06c959e", "41f209a"]


def test_a_release_begins_with_a_summary_and_has_its_changes_in_groups() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    newest = next(section for section in sections if not section.startswith("Unreleased"))
    summary, *groups = re.split(r"^### ", newest, flags=re.MULTILINE)
    assert summary.splitlines()[2] == "What users get:", "put the line of a change into its group"
    assert len(summary.splitlines()) <= 30
    assert len(groups) > 5
    titles = [group.splitlines()[0] for group in groups]
    assert len(set(titles)) == len(titles)
    assert max(len(group.splitlines()) for group in groups) <= 40, "shorten what belongs together"


def test_promises_are_in_the_order_of_their_numbers() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text()
    numbers = [
        (int(section), int(number), letter)
        for section, number, letter in re.findall(r"^\| (\d+)\.(\d+)([a-z]?) \|", text, re.MULTILINE)
    ]
    assert numbers == sorted(set(numbers))


def test_the_page_of_the_scheduler_has_all_filters_and_weighers() -> None:
    page = (ROOT / "docs/scheduler.md").read_text()
    filters = set[str]()
    default = set[str]()
    for row in re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE):
        filters |= set(re.findall(r"`(\w+)`", row))
        default |= set(re.findall(r"`(\w+)` \*", row))
    assert {*BUILT_IN_FILTERS, *BUILT_IN_WEIGHERS} <= filters
    assert default == set(Settings().filter_scheduler.enabled_filters)


def test_the_table_of_packages_has_the_layers_of_the_import_contract() -> None:
    [contract] = [
        each
        for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if each["type"] == "layers" and each["containers"] == ["micronova"]
    ]
    layers: list[set[str]] = []
    for name, packages in re.findall(
        r"^\| ([\w ]*?) ?\| ((?:`\w+/` ?)+)\|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE
    ):
        if name:
            layers.append(set())
        layers[-1] |= set(re.findall(r"\w+", packages))
    assert layers == [set(layer.split(" | ")) for layer in contract["layers"]]
