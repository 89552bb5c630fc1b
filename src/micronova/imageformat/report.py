"""What an inspection says about a file."""

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """A reason to refuse a file: a stable code, and a sentence for whoever made the file."""

    code: str
    message: str


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A disk image as its headers describe it."""

    format: str
    """raw, qcow2, vmdk, vhd, vhdx, vdi, iso; or one that we recognise only to refuse it: luks, qcow, qed…"""
    virtual_size: int | None
    """Bytes of the disk inside; None if the headers do not say it in a way that makes sense."""
    file_size: int
    partitions: str | None = None
    """gpt or mbr, if a raw disk or an ISO has such a table."""
    findings: tuple[Finding, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether nothing was found that speaks against opening the file as what it is."""
        return not self.findings


class Malformed(Exception):
    """A header makes no sense; there is nothing more to be learned from it."""

    def __init__(self, message: str, code: str = "malformed") -> None:
        super().__init__(message)
        self.finding = Finding(code, message)


class Report:
    """What the examination of one format has come to know."""

    def __init__(self) -> None:
        self.virtual_size: int | None = None
        self.findings: list[Finding] = []

    def refuse(self, code: str, message: str) -> None:
        """Note a reason to refuse the file, and go on."""
        self.findings.append(Finding(code, message))
