"""Microversions: what a request asked for, as a comparable minor number, and ranges of them."""

import re
from dataclasses import dataclass

from micronova.objects.errors import Invalid, NotAcceptable

_FORM = re.compile(r"([1-9][0-9]*)\.([1-9][0-9]*|0)")
_LONGEST = 16  # no version has so many digits, and very long ones are not even numbers to Python


@dataclass(frozen=True, slots=True)
class Versions:
    """The microversions that a service speaks: MAJOR.least to MAJOR.newest."""

    service: str  # the type named in the OpenStack-API-Version header
    major: int
    least: int
    newest: int
    legacy_header: str | None = None

    def negotiate(self, modern: str | None, legacy: str | None) -> int:
        """Return the minor version asked for; the least when nothing was."""
        wanted: str | None = None
        if modern:
            for part in modern.split(","):
                kind, _, value = part.strip().partition(" ")
                if kind.lower() == self.service:
                    wanted = value.strip()
                    break
        if wanted is None:
            wanted = legacy
        if wanted is None:
            return self.least
        if wanted.lower() == "latest":
            return self.newest
        found = _FORM.fullmatch(wanted)
        if not found:
            raise Invalid(
                f"API Version String {wanted[:64]} is of invalid format. "
                "Must be of format MajorNum.MinorNum, or latest."
            )
        if len(wanted) <= _LONGEST and int(found[1]) == self.major and self.least <= int(found[2]) <= self.newest:
            return int(found[2])
        raise NotAcceptable(
            f"Version {wanted[:64]} is not supported by the API. Minimum is {self.text(self.least)} and "
            f"maximum is {self.text(self.newest)}."
        )

    def text(self, minor: int) -> str:
        """Return a minor version as clients write it."""
        return f"{self.major}.{minor}"


@dataclass(frozen=True, slots=True)
class Range:
    """The minor versions from `since` up to and including `until`."""

    since: int = 0
    until: int = 1_000_000

    def __contains__(self, minor: object) -> bool:
        return isinstance(minor, int) and self.since <= minor <= self.until


def since(minor: int) -> Range:
    """From this minor version on."""
    return Range(minor)


def until(minor: int) -> Range:
    """Up to and including this minor version."""
    return Range(0, minor)
