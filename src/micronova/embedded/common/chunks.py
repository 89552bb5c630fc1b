"""Lists of ids, cut into parts that one SQL statement can take."""

import itertools
from collections.abc import Iterable, Iterator

SIZE = 500


def chunks(ids: Iterable[str | None], size: int = SIZE) -> Iterator[list[str]]:
    """Yield the distinct ids in lists of at most `size`, in their order; None and "" are left out."""
    distinct = iter(dict.fromkeys(each for each in ids if each))
    while part := list(itertools.islice(distinct, size)):
        yield part
