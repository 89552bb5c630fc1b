"""Images of simulated guests: real qcow2 files, whose disk says which guest they were made from."""

from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from micronova.testimage import qcow2
from micronova.virt.fake.guests import FakeGuest

SECTOR = 512


def disk_content(guest: FakeGuest) -> bytes:
    """Return the disk of a guest, as a user would find it in the image."""
    facts = {"uuid": guest.uuid, "hostname": guest.hostname, "image": guest.image, "boots": guest.boots}
    text = b"a simulated disk\n" + msgspec.json.encode(facts) + b"\n"
    return text.ljust(-(-len(text) // SECTOR) * SECTOR, b"\0")


class FakeDiskCopy:
    """A copy of the disk of a simulated guest; it is in memory only."""

    disk_format = "qcow2"

    def __init__(self, disk: bytes, during_upload: Callable[[], Awaitable[None]]) -> None:
        self._content = qcow2.encode(disk, qcow2.SMALL)
        self._during_upload = during_upload

    @property
    def size(self) -> int:
        """The bytes of the image."""
        return len(self._content)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the image, with the delays and faults of an upload in the middle."""
        middle = len(self._content) // 2
        yield self._content[:middle]
        await self._during_upload()
        yield self._content[middle:]

    async def close(self) -> None:
        """Forget the image."""
        self._content = b""
