"""Flavor: how large a server is."""

import msgspec


class Flavor(msgspec.Struct, frozen=True, kw_only=True):
    """A flavor as it was when it was read; an instance keeps the copy that it was booted with."""

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

    def resources(self) -> dict[str, int]:
        """Return what one instance of this flavor claims, by resource class."""
        amounts = {
            "VCPU": self.vcpus,
            "MEMORY_MB": self.ram,
            "DISK_GB": self.disk + self.ephemeral + -(-self.swap // 1024),
        }
        return {name: amount for name, amount in amounts.items() if amount}
