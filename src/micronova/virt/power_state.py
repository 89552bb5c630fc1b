"""Power states of a guest, with the numbers that the compute API shows."""

from typing import Final

NOSTATE: Final = 0
"""Also of a guest whose spawn has not been completed: it never ran for its owner and may be made anew."""
RUNNING: Final = 1
PAUSED: Final = 3
SHUTDOWN: Final = 4
CRASHED: Final = 6
SUSPENDED: Final = 7
