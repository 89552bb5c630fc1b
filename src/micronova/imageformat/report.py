"""The result of an inspection."""

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """A reason to refuse a file: a stable code, and a sentence for the user."""

    code: str
    message: str


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A disk image as its headers describe it."""

    format: str
    """raw, qcow2, vmdk, vhd, vhdx, vdi, iso; or one that we recognise only to refuse it: luks, qcow, qed…"""
    virtual_size: int | None
    """Bytes of the disk inside; None if the headers give no valid size."""
    file_size: int
    partitions: str | None = None
    """gpt or mbr, if a raw disk or an ISO has such a table."""
    findings: tuple[Finding, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether there is no reason to refuse the file."""
        return not self.findings


class Malformed(Exception):
    """A header is invalid, and the rest of the file is not checked."""

    def __init__(self, message: str, code: str = "malformed") -> None:
        super().__init__(message)
        self.finding = Finding(code, message)


class Report:
    """Collects the findings of a format's `examine`."""

    def __init__(self) -> None:
        self.virtual_size: int | None = None
        self.findings: list[Finding] = []

    def refuse(self, code: str, message: str) -> None:
        """Add a reason to refuse the file."""
        self.findings.append(Finding(code, message))
