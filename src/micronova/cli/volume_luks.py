"""LUKS files of the embedded volume service, by the host's `qemu-img`."""

from pathlib import Path

from micronova.embedded.volume.backend.luks import Cipher


class QemuLuks:
    """Implements `embedded.volume.backend.luks.LuksTool` by a program that opens nothing else."""

    async def format(self, target: Path, size: int, cipher: Cipher, passphrase: str) -> None:
        """Make a file for a volume that nothing was written to."""
        from micronova.virt.libvirt.storage import tools

        options = f"cipher-alg={cipher.algorithm},cipher-mode={cipher.mode},ivgen-alg={cipher.iv_generator}"
        if cipher.iv_hash is not None:
            options += f",ivgen-hash-alg={cipher.iv_hash}"
        await tools.create_luks(target, size, f"{options},hash-alg=sha256", passphrase)

    async def write(self, source: Path, source_format: str, target: Path, passphrase: str, size: int) -> None:
        """Write an image, which was inspected, to a file of `format`."""
        from micronova.virt.libvirt.storage import tools

        await tools.write_luks(source, {"vhd": "vpc"}.get(source_format, source_format), target, passphrase, size)
