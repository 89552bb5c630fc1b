"""Microversions: negotiation with a client, and ranges of minor versions."""

import re
from dataclasses import dataclass

from micronova.objects.errors import Invalid, NotAcceptable

_FORM = re.compile(r"([1-9][0-9]*)\.([1-9][0-9]*|0)")
_LONGEST = 16  # characters; int() refuses very long numbers


@dataclass(frozen=True, slots=True)
class Versions:
    """The microversions of a service: MAJOR.least to MAJOR.newest."""

    service: str  # the type named in the OpenStack-API-Version header
    major: int
    least: int
    newest: int
    legacy_header: str | None = None

    def negotiate(self, modern: str | None, legacy: str | None) -> int:
        """Return the minor version that the headers name, by default the least."""
        wanted = self._named(modern) or (None if legacy is None else legacy.rpartition(",")[2].strip())
        if wanted is None:
            return self.least
        if wanted == "latest":
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

    def _named(self, modern: str | None) -> str | None:
        """Return the version that the standard header names for this service; the last of several counts."""
        for part in reversed((modern or "").split(",")):
            kind, _, version = part.strip().partition(" ")
            if kind.lower() == self.service and version.strip():
                return version.strip()
        return None

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
    """Return the range from this minor version on."""
    return Range(minor)


def until(minor: int) -> Range:
    """Return the range up to and including this minor version."""
    return Range(0, minor)


@dataclass(frozen=True, slots=True)
class Ranges:
    """The minor versions of several ranges: of a field that was removed and came back."""

    ranges: tuple[Range, ...]

    def __contains__(self, minor: object) -> bool:
        return any(minor in each for each in self.ranges)
