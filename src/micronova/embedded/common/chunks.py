"""Lists of ids, cut into parts that one SQL statement can take.

A statement that is composed per request has `column.in_(part)`. One that is composed once takes a list of any length as
one parameter (`db.listed.one_of`); the list is cut only to limit the rows of one result, and an empty one is not read.
"""

import itertools
from collections.abc import Iterable, Iterator

SIZE = 500


def chunks(ids: Iterable[str | None], size: int = SIZE) -> Iterator[list[str]]:
    """Yield the distinct ids in lists of at most `size`, in their order; None and "" are left out."""
    distinct = iter(dict.fromkeys(each for each in ids if each))
    while part := list(itertools.islice(distinct, size)):
        yield part
