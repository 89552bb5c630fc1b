"""Secrets that are sealed anew, some in each transaction, when the key of secrets is changed."""

from typing import NamedTuple


class Resealed(NamedTuple):
    """What one transaction has done."""

    after: str  # the place of the last secret that was read; "" if there are no more
    read: int
    changed: int
    lost: list[str]  # what no key opens, which stays as it is
