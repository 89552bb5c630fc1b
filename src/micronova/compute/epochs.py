"""Which orders are too old to be carried out."""

from collections import OrderedDict

REMEMBERED = 4_096
"""How many instances that left are remembered; a late order for a forgotten one fails at the conductor."""


class Epochs:
    """The highest epoch that a host has seen of each instance, and the one at which an instance left it."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._past: OrderedDict[str, tuple[int, int]] = OrderedDict()  # seen, left

    def highest(self, uuid: str) -> int:
        """The newest epoch known of an instance; 0 if it is unknown."""
        seen = self._seen.get(uuid)
        return self._past.get(uuid, (0, 0))[0] if seen is None else seen

    def admit(self, uuid: str, epoch: int, *, removes: bool) -> bool:
        """Note an order's epoch, or refuse it: something newer was seen, or the instance left since.

        An order that removes the guest is welcome also when the instance is known to have left at its epoch.
        """
        seen, left = self._past.get(uuid, (0, 0))
        if epoch < max(seen, self._seen.get(uuid, 0)) or (epoch <= left and not removes):
            return False
        self._seen[uuid] = epoch
        return True

    def note(self, uuid: str, epoch: int) -> None:
        """Note a guest that was found."""
        self._seen[uuid] = max(epoch, self.highest(uuid))

    def leave(self, uuid: str, epoch: int) -> None:
        """Note that the instance left at this epoch: orders up to it are void."""
        _, left = self._past.pop(uuid, (0, 0))
        self._past[uuid] = (max(epoch, self.highest(uuid)), max(epoch, left))

    def forget(self, uuid: str) -> None:
        """The host holds nothing of this instance any more: keep its epoch only as long as there is room."""
        seen, left = self._past.pop(uuid, (0, 0))
        self._past[uuid] = (max(seen, self._seen.pop(uuid, 0)), left)
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
