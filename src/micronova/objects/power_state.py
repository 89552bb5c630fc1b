"""Power states of a guest, with the numbers that the compute API shows."""

from typing import Final

NOSTATE: Final = 0
"""Also the state of a guest whose spawn is not complete: such a guest may be removed and built again."""
RUNNING: Final = 1
PAUSED: Final = 3
SHUTDOWN: Final = 4
CRASHED: Final = 6
SUSPENDED: Final = 7

NAMES: Final = {
    NOSTATE: "pending",
    RUNNING: "running",
    PAUSED: "paused",
    SHUTDOWN: "shutdown",
    CRASHED: "crashed",
    SUSPENDED: "suspended",
}
"""The words for power states in notifications and diagnostics."""
