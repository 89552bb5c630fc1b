"""The flavor's extra specs and the image's properties that describe a guest's hardware, by Nova's names."""

from collections.abc import Mapping
from typing import Any

from micronova.objects.errors import BuildAborted
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta

_TRUE = frozenset({"1", "true", "yes", "on", "t", "y"})
_FALSE = frozenset({"0", "false", "no", "off", "f", "n", ""})


class GuestProperties:
    """Looks up extra specs and image properties; `hw:NAME` of the flavor wins over `hw_NAME` of the image."""

    def __init__(self, flavor: Flavor, image: ImageMeta | None) -> None:
        self._flavor: Mapping[str, str] = flavor.extra_specs
        self._image: Mapping[str, Any] = {} if image is None else image.properties

    def hardware(self, name: str) -> str | None:
        """Return `hw:NAME` of the flavor, or else `hw_NAME` of the image."""
        found = self._flavor.get(f"hw:{name}")
        return self.image(f"hw_{name}") if found is None else str(found)

    def image(self, name: str) -> str | None:
        """Return a property of the image."""
        found = self._image.get(name)
        return None if found is None else str(found)

    def flavor(self, name: str) -> str | None:
        """Return an extra spec of the flavor."""
        return self._flavor.get(name)

    def enabled(self, value: str | None, name: str, default: bool) -> bool:
        """Parse a boolean; `name` is for the error message."""
        if value is None:
            return default
        text = value.strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise BuildAborted(f"{name} is {value!r}: it should be yes or no.")

    def number(self, value: str | None, name: str, *, least: int = 0) -> int | None:
        """Parse a number; `name` is for the error message."""
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if number < least:
            raise BuildAborted(f"{name} is {value!r}: it should be a number of at least {least}.")
        return number

    def choice(self, value: str | None, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return a value that must be one of several; `name` is for the error message."""
        if value is None:
            return default
        if value not in allowed:
            raise BuildAborted(f"{name} is {value!r}: it should be one of {', '.join(allowed)}.")
        return value

    def numbered(self, prefix: str) -> dict[int, str]:
        """Return the values of `PREFIX.0`, `PREFIX.1`… by number; the flavor's win over the image's."""
        found: dict[int, str] = {}
        image_prefix = prefix.replace(":", "_", 1)
        for source, start in ((self._image, image_prefix), (self._flavor, prefix)):
            for name, value in source.items():
                if name.startswith(f"{start}.") and name.removeprefix(f"{start}.").isdigit():
                    found[int(name.removeprefix(f"{start}."))] = str(value)
        return found
