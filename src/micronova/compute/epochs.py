"""The epochs of instances, by which a host refuses orders that are out of date."""

from collections import OrderedDict

REMEMBERED = 4_096
"""How many instances that left are remembered.

A late order for an instance that is no longer remembered is carried out, and its report is refused."""


class Epochs:
    """The highest epoch that a host has seen of each instance, and the one at which an instance left it."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._past: OrderedDict[str, tuple[int, int]] = OrderedDict()  # seen, left

    def highest(self, uuid: str) -> int:
        """Return the highest epoch seen of an instance; 0 if it is unknown."""
        seen = self._seen.get(uuid)
        return self._past.get(uuid, (0, 0))[0] if seen is None else seen

    def admit(self, uuid: str, epoch: int, *, removes: bool) -> bool:
        """Note the epoch of an order and return True; return False if a newer one was seen or the instance has left.

        An order that removes the guest is admitted even if the instance left at its epoch.
        """
        seen, left = self._past.get(uuid, (0, 0))
        if epoch < max(seen, self._seen.get(uuid, 0)) or (epoch <= left and not removes):
            return False
        self._seen[uuid] = epoch
        return True

    def note(self, uuid: str, epoch: int) -> None:
        """Note the epoch of a guest that was found."""
        self._seen[uuid] = max(epoch, self.highest(uuid))

    def go_back(self, uuid: str, epoch: int) -> None:
        """Note that the database is at this epoch, which may be earlier than what was seen: it was restored."""
        self._past.pop(uuid, None)
        self._seen[uuid] = epoch

    def leave(self, uuid: str, epoch: int) -> None:
        """Note that the instance left the host at this epoch: orders up to it are refused."""
        _, left = self._past.pop(uuid, (0, 0))
        self._past[uuid] = (max(epoch, self.highest(uuid)), max(epoch, left))

    def forget(self, uuid: str) -> None:
        """Move an instance without guest and work to the bounded list of past ones."""
        seen, left = self._past.pop(uuid, (0, 0))
        self._past[uuid] = (max(seen, self._seen.pop(uuid, 0)), left)
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
