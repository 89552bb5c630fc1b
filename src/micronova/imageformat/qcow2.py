"""QEMU's qcow2, versions 2 and 3 (the layout is in QEMU's docs/interop/qcow2.txt)."""

from micronova.imageformat.reader import Header, Reader, big_endian
from micronova.imageformat.report import Malformed, Report

MAGIC = b"QFI\xfb"

# Incompatible features: a program that does not know one must not open the file.
_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = (1 << bit for bit in range(5))
_HARMLESS = _DIRTY | _COMPRESSION | _EXTENDED_L2

_END, _BACKING_FORMAT, _DATA_FILE_NAME, _ENCRYPTION = 0, 0xE2792ACA, 0x44415441, 0x0537BE77
_FORBIDDEN_EXTENSIONS = {
    _BACKING_FORMAT: ("backing_file", "It names the format of a backing file."),
    _DATA_FILE_NAME: ("data_file", "It names an external data file."),
    _ENCRYPTION: ("encrypted", "It is encrypted."),
}
_MAX_EXTENSIONS = 64

# QEMU's own limits, and one on snapshots, each of which makes opening the file slower.
_MAX_L1 = 32 << 20
_MAX_REFCOUNT_TABLE = 8 << 20
_MAX_SNAPSHOTS = 256


def matches(reader: Reader) -> bool:
    """Recognise any version but 1, which is another format."""
    start = reader.some(0, 8)
    return start[:4] == MAGIC and start[4:] != b"\0\0\0\1"


def examine(reader: Reader, report: Report) -> None:
    """Refuse references to other files, encryption, and tables that are too large."""
    header = big_endian(reader.exactly(0, 72, "qcow2 header"))
    version = header.u32(4)
    if version not in (2, 3):
        raise Malformed(f"It is of version {version}: only 2 and 3 exist.", "unsupported")
    _check_what_it_names(header, report)
    cluster_bits = header.u32(20)
    if not 9 <= cluster_bits <= 21:
        raise Malformed("Its clusters have an impossible size.")
    cluster = 1 << cluster_bits
    header_length, extended_l2 = 72, False
    if version == 3:
        header_length, extended_l2 = _check_version_3(reader, cluster, report)
    size = header.u64(24)
    if size < 1 << 63:
        report.virtual_size = size
    else:
        report.refuse("oversized", "Its virtual size is absurd.")
    _check_tables(header, reader, cluster, size, extended_l2, report)
    _check_extensions(reader, header_length, cluster, report)


def _check_what_it_names(header: Header, report: Report) -> None:
    if header.u64(8) or header.u32(16):
        report.refuse("backing_file", "It has a backing file.")
    if header.u32(32):
        report.refuse("encrypted", "It is encrypted.")


def _check_version_3(reader: Reader, cluster: int, report: Report) -> tuple[int, bool]:
    """Return the header's length and whether entries of second-level tables are wide."""
    header = big_endian(reader.exactly(72, 32, "qcow2 header"))
    features, refcount_order, length = header.u64(0), header.u32(24), header.u32(28)
    if features & _DATA_FILE:
        report.refuse("data_file", "Its data is in an external data file.")
    if features & _CORRUPT:
        report.refuse("corrupt", "It is marked as corrupt.")
    if features & ~(_HARMLESS | _DATA_FILE | _CORRUPT):
        report.refuse("unknown_features", "It needs features that are not known here.")
    if refcount_order > 6:
        report.refuse("malformed", "Its reference counts have an impossible width.")
    if not 104 <= length <= cluster or length % 8:
        raise Malformed("Its header has an impossible length.", "oversized" if length > cluster else "malformed")
    compression = reader.exactly(104, 1, "qcow2 header")[0] if length > 104 else 0
    if compression > 1 or bool(compression) != bool(features & _COMPRESSION):
        report.refuse("unknown_features", "It is compressed in a way that is not known here.")
    extended_l2 = bool(features & _EXTENDED_L2)
    if extended_l2 and cluster < 1 << 14:
        report.refuse("malformed", "Its clusters are too small for what they are divided into.")
    return length, extended_l2


def _check_tables(header: Header, reader: Reader, cluster: int, size: int, extended_l2: bool, report: Report) -> None:
    l1_entries, l1_offset = header.u32(36), header.u64(40)
    covered = cluster * (cluster // (16 if extended_l2 else 8))  # bytes of disk per entry
    if l1_entries * 8 > _MAX_L1:
        report.refuse("oversized", "Its table of clusters is oversized.")
    elif l1_entries < -(-size // covered):
        report.refuse("malformed", "Its table of clusters does not cover its virtual size.")
    elif l1_entries:
        _check_table("table of clusters", l1_offset, l1_entries * 8, reader, cluster, report)
    refcount_offset, refcount_clusters = header.u64(48), header.u32(56)
    if refcount_clusters * cluster > _MAX_REFCOUNT_TABLE:
        report.refuse("oversized", "Its table of reference counts is oversized.")
    elif not refcount_clusters:
        report.refuse("malformed", "It has no table of reference counts.")
    else:
        _check_table("table of reference counts", refcount_offset, refcount_clusters * cluster, reader, cluster, report)
    snapshots, snapshots_offset = header.u32(60), header.u64(64)
    if snapshots > _MAX_SNAPSHOTS:
        report.refuse("snapshots", f"It has more than {_MAX_SNAPSHOTS} snapshots.")
    elif snapshots:
        _check_table("table of snapshots", snapshots_offset, snapshots * 40, reader, cluster, report)


def _check_table(what: str, offset: int, length: int, reader: Reader, cluster: int, report: Report) -> None:
    # The first cluster is the header's: a table there would overlap it.
    if offset % cluster or offset < cluster:
        report.refuse("malformed", f"Its {what} lies where none can be.")
    elif not reader.holds(offset, length, cluster):
        report.refuse("truncated", f"Its {what} lies outside of the file.")


def _check_extensions(reader: Reader, at: int, cluster: int, report: Report) -> None:
    for _ in range(_MAX_EXTENSIONS):
        if at + 8 > min(cluster, reader.size):
            return  # readers stop at the end of the first cluster
        extension = big_endian(reader.exactly(at, 8, "header extension"))
        kind, length = extension.u32(0), extension.u32(4)
        if kind == _END:
            return
        if kind in _FORBIDDEN_EXTENSIONS:
            report.refuse(*_FORBIDDEN_EXTENSIONS[kind])
        if length > cluster - at - 8:
            raise Malformed("A header extension is longer than the header.", "oversized")
        at += 8 + -(-length // 8) * 8
    report.refuse("oversized", "It has too many header extensions.")
