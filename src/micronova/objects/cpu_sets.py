"""Sets of CPUs as settings, flavors and images write them."""

from typing import Final

LIMIT: Final = 1 << 16
"""CPU numbers are smaller than this: a range such as 0-9999999999 must not take up memory."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a set such as "0-3,^2,8"; raise ValueError if it is none."""
    wanted: set[int] = set()
    excluded: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if not part:
            continue
        target = excluded if part.startswith("^") else wanted
        first, _, last = part.removeprefix("^").partition("-")
        if not text.isascii() or not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"{text!r} is not a set of CPUs such as 0-3,^2,8")
        if max(int(first), int(last or first)) >= LIMIT:
            raise ValueError(f"{text!r} names a CPU above {LIMIT - 1}")
        target.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(wanted - excluded))


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Return a set of CPUs as text."""
    return ",".join(str(cpu) for cpu in cpus)
