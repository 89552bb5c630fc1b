"""Commands of the documentation, for tests that run them as they stand there."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def command_with(page: str, *words: str) -> str:
    """Return the only command in the blocks of a page that has all these words, without its comment."""
    found: list[str] = [
        line.partition("     #")[0].partition("     --")[0].strip()
        for block in re.findall(r"^```\w*\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if all(word in line for word in words)
    ]
    assert len(found) == 1, f"{page} has {len(found)} commands with {' and '.join(words)}: {found}"
    return found[0]
