"""The `micronova` command as another process of this installation."""

import sys


def own_command(*arguments: str) -> list[str]:
    """Return the command line that runs `micronova` with these arguments, by the Python that runs this process.

    Python puts the current directory first in its search path for `-m` unless it gets -P: without it, a file there that
    is named like one of our modules would run instead, perhaps as root.
    """
    return [sys.executable, "-P", "-m", "micronova.cli.main", *arguments]
