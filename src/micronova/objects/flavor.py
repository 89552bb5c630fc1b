"""Flavor: the size of a server."""

import msgspec


class Flavor(msgspec.Struct, frozen=True, kw_only=True):
    """A flavor. An instance keeps a copy of the flavor that it was created with."""

    id: str
    name: str
    ram: int  # MiB
    vcpus: int
    disk: int  # GiB of root disk
    ephemeral: int = 0  # GiB
    swap: int = 0  # MiB
    rxtx_factor: float = 1.0
    is_public: bool = True
    disabled: bool = False
    description: str | None = None
    extra_specs: dict[str, str] = {}
    # Of a server's copy: its root disk is a volume, which takes nothing of the host's disk. A copy of an older version
    # does not say so, and its server goes on to claim the disk until it is deleted.
    root_on_volume: bool = False

    @property
    def swap_gb(self) -> int:
        """The GiB of a host's disk that the swap disk takes."""
        return -(-self.swap // 1024)

    def resources(self) -> dict[str, int]:
        """Return the resources that one instance of this flavor claims, by resource class."""
        amounts = {
            "VCPU": self.vcpus,
            "MEMORY_MB": self.ram,
            "DISK_GB": (0 if self.root_on_volume else self.disk) + self.ephemeral + self.swap_gb,
        }
        return {name: amount for name, amount in amounts.items() if amount}
