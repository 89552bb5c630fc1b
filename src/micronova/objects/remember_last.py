"""Remembers what was found last of a flavor and an image: a decision of the scheduler asks for it many times."""

from collections.abc import Callable
from typing import Generic, TypeVar

from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta

R = TypeVar("R")


class RememberLast(Generic[R]):
    """A function that is not called again for the flavor and the image of its last call; results are not changed."""

    def __init__(self, find: Callable[[Flavor, ImageMeta | None], R]) -> None:
        self._find = find
        self._last: tuple[Flavor, ImageMeta | None, R] | None = None

    def __call__(self, flavor: Flavor, image: ImageMeta | None) -> R:
        """Return what the function returns."""
        last = self._last
        if last is None or last[0] is not flavor or last[1] is not image:
            last = self._last = flavor, image, self._find(flavor, image)
        return last[2]
