"""Disk images that the tests make themselves: honest ones of every format, and hostile ones of every kind we know.

Everything is built from the formats' own descriptions. A hostile file is an honest one with something changed.
"""

import struct
import uuid
from dataclasses import dataclass

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@dataclass(frozen=True)
class Sample:
    """A file, what it is declared to be, and a word that the refusal must have."""

    name: str
    declared: str
    content: bytes
    word: str = ""

    def __str__(self) -> str:
        return self.name


def patched(content: bytes, *changes: tuple[int, bytes]) -> bytes:
    """Return the content with bytes written over it, beyond its end if need be; offsets may count from the end."""
    data = bytearray(content)
    for at, change in changes:
        begin = at if at >= 0 else len(content) + at
        data += bytes(max(0, begin + len(change) - len(data)))
        data[begin : begin + len(change)] = change
    return bytes(data)


def be32(value: int) -> bytes:
    return struct.pack(">I", value)


def be64(value: int) -> bytes:
    return struct.pack(">Q", value)


def le32(value: int) -> bytes:
    return struct.pack("<I", value)


def le64(value: int) -> bytes:
    return struct.pack("<Q", value)


# --- raw and what is in it ---------------------------------------------------------------------------------------

MBR = patched(bytes(64 * KIB), (446, b"\x80\xfe\xff\xff\x83\xfe\xff\xff" + le32(1) + le32(100)), (510, b"\x55\xaa"))
GPT = patched(MBR, (450, b"\xee"), (512, b"EFI PART\0\0\1\0"))


# --- qcow2 -------------------------------------------------------------------------------------------------------


def qcow2(version: int = 3, size: int = 16 * MIB, cluster_bits: int = 12, extensions: bytes = b"") -> bytes:
    """Header, table of reference counts, their block, table of clusters."""
    cluster = 1 << cluster_bits
    entries = max(1, -(-size // (cluster * (cluster // 8))))
    header = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", version, 0, 0, cluster_bits, size, 0, entries, 3 * cluster, cluster, 1, 0, 0
    )
    if version == 3:
        header += struct.pack(">QQQII", 0, 0, 0, 4, 104)
    table = struct.pack(">Q", 2 * cluster).ljust(cluster, b"\0")
    counts = struct.pack(">4H", 1, 1, 1, 1).ljust(cluster, b"\0")
    firsts = bytes(-(-entries * 8 // cluster) * cluster)
    return (header + extensions).ljust(cluster, b"\0") + table + counts + firsts


def extension(kind: int, content: bytes) -> bytes:
    return be32(kind) + be32(len(content)) + content + bytes(-len(content) % 8)


QCOW2 = qcow2()
PASSWD = b"/etc/passwd"
BACKED = patched(QCOW2, (8, be64(2048)), (16, be32(len(PASSWD))), (2048, PASSWD))
DATA_FILE = patched(qcow2(extensions=extension(0x44415441, PASSWD)), (72, be64(4)))


def backed_by(name: bytes) -> bytes:
    return patched(QCOW2, (8, be64(2048)), (16, be32(len(name))), (2048, name))


def _qcow2_samples() -> list[Sample]:
    v2 = qcow2(version=2)
    changed = {
        # points out of the file
        "backing file": (BACKED, "backing file"),
        "backing file, version 2": (patched(v2, (8, be64(2048)), (16, be32(11)), (2048, PASSWD)), "backing file"),
        "backing file as JSON": (backed_by(b'json:{"driver":"file","filename":"/etc/passwd"}'), "backing file"),
        "backing file by protocol": (backed_by(b"nbd://10.0.0.1/disk"), "backing file"),
        "backing file relative": (backed_by(b"../../other/disk"), "backing file"),
        "backing file is itself": (backed_by(b"disk"), "backing file"),
        "backing file without a name": (patched(QCOW2, (8, be64(2048))), "backing file"),
        "backing file of some length nowhere": (patched(QCOW2, (16, be32(4))), "backing file"),
        "backing file out of the file": (patched(QCOW2, (8, be64(2**64 - 1)), (16, be32(2**32 - 1))), "backing file"),
        "backing format only": (qcow2(extensions=extension(0xE2792ACA, b"raw")), "backing file"),
        "data file": (DATA_FILE, "external data file"),
        "data file by bit only": (patched(QCOW2, (72, be64(4))), "external data file"),
        "data file by name only": (qcow2(extensions=extension(0x44415441, PASSWD)), "external data file"),
        "data file, version 2": (qcow2(version=2, extensions=extension(0x44415441, PASSWD)), "external data file"),
        "data file behind others": (
            qcow2(extensions=extension(0x6803F857, bytes(144)) + extension(0x44415441, b"x")), "external data file"),
        "data file raw": (patched(DATA_FILE, (88, be64(2))), "external data file"),
        # hides what is in it
        "luks inside": (patched(QCOW2, (32, be32(2))), "encrypted"),
        "aes inside": (patched(QCOW2, (32, be32(1))), "encrypted"),
        "unknown encryption": (patched(QCOW2, (32, be32(99))), "encrypted"),
        "encryption header": (qcow2(extensions=extension(0x0537BE77, bytes(16))), "encrypted"),
        # asks for what we do not know
        "unknown feature": (patched(QCOW2, (72, be64(1 << 5))), "features"),
        "all features": (patched(QCOW2, (72, be64(2**64 - 1))), "features"),
        "marked corrupt": (patched(QCOW2, (72, be64(2))), "corrupt"),
        "unknown compression": (
            patched(QCOW2, (72, be64(8)), (100, be32(112)), (104, b"\7")), "compressed in a way"),
        "compression without its bit": (patched(QCOW2, (100, be32(112)), (104, b"\1")), "compressed in a way"),
        "version 4": (patched(QCOW2, (4, be32(4))), "version"),
        "version 0": (patched(QCOW2, (4, be32(0))), "version"),
        # numbers that make no sense
        "clusters of 1 byte": (patched(QCOW2, (20, be32(0))), "clusters"),
        "clusters of 256 bytes": (patched(QCOW2, (20, be32(8))), "clusters"),
        "clusters of 4 MiB": (patched(QCOW2, (20, be32(22))), "clusters"),
        "clusters past all bounds": (patched(QCOW2, (20, be32(2**32 - 1))), "clusters"),
        "header too short": (patched(QCOW2, (100, be32(8))), "length"),
        "header of 4 GiB": (patched(QCOW2, (100, be32(2**32 - 8))), "length"),
        "header unaligned": (patched(QCOW2, (100, be32(105))), "length"),
        "reference counts of 128 bits": (patched(QCOW2, (96, be32(7))), "reference counts"),
        "size past all bounds": (patched(QCOW2, (24, be64(2**64 - 1))), "absurd"),
        "size negative": (patched(QCOW2, (24, be64(1 << 63))), "absurd"),
        "size not covered": (patched(QCOW2, (24, be64(1 << 50))), "does not cover"),
        "l1 oversized": (patched(QCOW2, (36, be32(2**32 - 1))), "oversized"),
        "l1 in the header": (patched(QCOW2, (40, be64(0))), "where none can be"),
        "l1 unaligned": (patched(QCOW2, (40, be64(4097))), "where none can be"),
        "l1 outside": (patched(QCOW2, (40, be64(1 << 40))), "outside"),
        "l1 overflows": (patched(QCOW2, (40, be64(2**64 - 4096))), "outside"),
        "reference table oversized": (patched(QCOW2, (56, be32(2**32 - 1))), "oversized"),
        "reference table in the header": (patched(QCOW2, (48, be64(0))), "where none can be"),
        "reference table outside": (patched(QCOW2, (48, be64(2**64 - 4096))), "outside"),
        "no reference table": (patched(QCOW2, (56, be32(0))), "no table"),
        "too many snapshots": (patched(QCOW2, (60, be32(70_000)), (64, be64(4096))), "snapshots"),
        "snapshots outside": (patched(QCOW2, (60, be32(1)), (64, be64(1 << 50))), "outside"),
        "snapshots in the header": (patched(QCOW2, (60, be32(1))), "where none can be"),
        "extension of 4 GiB": (patched(QCOW2, (104, be32(0x6803F857) + be32(2**32 - 1))), "longer than the header"),
        "endless extensions": (patched(QCOW2, (104, extension(7, b"") * 499)), "too many"),
        "small clusters divided": (patched(QCOW2, (72, be64(16)), (36, be32(64))), "too small"),
        "truncated at the magic": (QCOW2[:8], "cut off"),
        "truncated in the header": (QCOW2[:71], "cut off"),
        "truncated in version 3": (QCOW2[:100], "cut off"),
        "truncated before its tables": (QCOW2[:4096], "outside"),
    }  # fmt: skip
    return [Sample(f"qcow2: {name}", "qcow2", content, word) for name, (content, word) in changed.items()]


# --- vmdk --------------------------------------------------------------------------------------------------------

CAPACITY = 2048  # sectors


def descriptor(
    create_type: str = "monolithicSparse",
    extents: str = f'RW {CAPACITY} SPARSE "disk.vmdk"',
    more: str = "",
    parent: str = "ffffffff",
) -> bytes:
    return (
        "# Disk DescriptorFile\nversion=1\nCID=12345678\n"
        f'parentCID={parent}\ncreateType="{create_type}"\n\n# Extent description\n{extents}\n\n'
        f'# The Disk Data Base\n#DDB\nddb.virtualHWVersion = "4"\nddb.adapterType = "ide"\n{more}'
    ).encode()


def vmdk_header(
    capacity: int = CAPACITY, directory: int = 21, descriptor_at: int = 1, descriptor_size: int = 20
) -> bytes:
    numbers = struct.pack(
        "<4sIIQQQQIQQQ", b"KDMV", 1, 3, capacity, 128, descriptor_at, descriptor_size, 512, 0, directory, 128
    )
    return (numbers + b"\0\n \r\n\0\0").ljust(512, b"\0")


def vmdk(text: bytes | None = None, **header: int) -> bytes:
    body = (descriptor() if text is None else text).ljust(20 * 512, b"\0")
    return (vmdk_header(**header) + body).ljust(64 * KIB, b"\0")


def stream_vmdk(footer: bytes | None = None) -> bytes:
    at_end = vmdk_header(directory=2**64 - 1)
    marker = (le64(1) + le32(0) + le32(3)).ljust(512, b"\0")
    body = (at_end + descriptor("streamOptimized").ljust(20 * 512, b"\0")).ljust(64 * KIB, b"\0")
    return body + marker + (vmdk_header() if footer is None else footer) + bytes(512)


VMDK = vmdk()
FLAT = descriptor("monolithicFlat", f'RW {CAPACITY} FLAT "/etc/passwd" 0')


def _vmdk_samples() -> list[Sample]:
    def extents(text: str) -> bytes:
        return vmdk(descriptor(extents=text))

    changed = {
        # a text that names files
        "descriptor": (FLAT, "descriptor"),
        "descriptor of sparse extents": (descriptor("twoGbMaxExtentSparse"), "descriptor"),
        "descriptor of a device": (descriptor("fullDevice", 'RW 63 FLAT "/dev/sda" 0'), "descriptor"),
        "descriptor for Windows": (FLAT.replace(b"\n", b"\r\n"), "descriptor"),
        "descriptor in capitals": (FLAT.replace(b"# Disk DescriptorFile", b"# DISK DESCRIPTORFILE"), "descriptor"),
        "descriptor without a title": (FLAT.partition(b"\n")[2], "descriptor"),
        "descriptor after comments": (b"#!/bin/sh\n#\n  \n" + FLAT.partition(b"\n")[2], "descriptor"),
        "descriptor of version 3": (FLAT.replace(b"version=1", b"version=3"), "descriptor"),
        "descriptor padded": (FLAT.ljust(64 * KIB, b"\0"), "descriptor"),
        "extent of ESX": (b"COWD" + bytes(2044), "extent of ESX"),
        "extent of ESX, newer": (b"\xbe\xba\xfe\xca\0\0\0\0" + bytes(2040), "extent of ESX"),
        # an embedded text that is more than it should be
        "embedded flat": (vmdk(FLAT), "monolithicFlat"),
        "embedded, no capacity": (vmdk(FLAT, capacity=0), "capacity"),
        "embedded split": (vmdk(descriptor("twoGbMaxExtentSparse")), "twoGbMaxExtentSparse"),
        "embedded type unknown": (vmdk(descriptor("somethingElse")), "somethingElse"),
        "embedded type twice": (vmdk(descriptor(more='createType="monolithicFlat"\n')), "exactly once"),
        "embedded type in a comment": (vmdk(b'# createType="monolithicFlat"\n' + descriptor()), "exactly once"),
        "embedded type missing": (vmdk(descriptor().replace(b"createType", b"other")), "exactly once"),
        "embedded type unquoted": (vmdk(descriptor().replace(b'"monolithicSparse"', b"monolithicSparse")), "once"),
        "embedded extent flat": (extents(f'RW {CAPACITY} FLAT "disk.vmdk" 0'), "sparse"),
        "embedded extent zero": (extents(f"RW {CAPACITY} ZERO"), "sparse"),
        "embedded extent of VMFS": (extents(f'RW {CAPACITY} VMFS "disk.vmdk"'), "sparse"),
        "embedded extent by path": (extents(f'RW {CAPACITY} SPARSE "/etc/passwd"'), "path"),
        "embedded extent relative": (extents(f'RW {CAPACITY} SPARSE "../disk.vmdk"'), "path"),
        "embedded extent by drive": (extents(f'RW {CAPACITY} SPARSE "c:disk"'), "path"),
        "embedded extent by protocol": (extents(f'RW {CAPACITY} SPARSE "nbd:host"'), "path"),
        "two embedded extents": (
            extents(f'RW {CAPACITY} SPARSE "disk.vmdk"\nRW 1 FLAT "/etc/passwd" 0'), "exactly one"),
        "embedded extent after a form feed": (
            extents(f'RW {CAPACITY} SPARSE "disk.vmdk"\n\x0bRW 1 FLAT "/etc/passwd" 0'), "exactly one"),
        "embedded extent in lower case": (
            extents(f'RW {CAPACITY} SPARSE "disk.vmdk"\nrdonly 1 flat "/etc/passwd" 0'), "exactly one"),
        "embedded extent unquoted": (extents(f"RW {CAPACITY} SPARSE disk.vmdk"), "sparse"),
        "no embedded extent": (extents(""), "exactly one"),
        "embedded extent of another size": (extents('RW 99999999999999999999999 SPARSE "disk.vmdk"'), "as large"),
        "embedded parent": (vmdk(descriptor(parent="12345678")), "parent"),
        "embedded parent's name": (vmdk(descriptor(more='parentFileNameHint="/etc/passwd"\n')), "parent"),
        "embedded text goes on": (patched(VMDK, (512 + 8000, b'createType="monolithicFlat"')), "goes on"),
        "embedded text without an end": (
            patched(vmdk(descriptor().ljust(512, b"#"), descriptor_size=1), (1024, b'\nparentFileNameHint="x"')),
            "goes on"),
        "embedded text is none": (vmdk(b"hello"), "is none"),
        # headers that make no sense
        "no embedded text": (vmdk(descriptor_at=0), "no description"),
        "embedded text of no length": (vmdk(descriptor_size=0), "no description"),
        "embedded text oversized": (vmdk(descriptor_size=2**32), "oversized"),
        "embedded text outside": (vmdk(descriptor_at=2**40), "outside"),
        "embedded text overflows": (vmdk(descriptor_at=2**64 - 1), "outside"),
        "directory oversized": (
            vmdk(descriptor(extents=f'RW {1 << 45} SPARSE "d"'), capacity=1 << 45), "directory of grains is oversized"),
        "capacity overflows": (vmdk(capacity=2**64 - 1), "absurd"),
        "directory outside": (vmdk(directory=2**50), "outside"),
        "grains of nothing": (patched(VMDK, (20, le64(0))), "grains"),
        "grains not a power of 2": (patched(VMDK, (20, le64(100))), "grains"),
        "grain tables of nothing": (patched(VMDK, (44, le32(0))), "grains"),
        "version 9": (patched(VMDK, (4, le32(9))), "version"),
        "unknown compression": (patched(VMDK, (77, b"\x05\x00")), "compressed"),
        "truncated header": (VMDK[:300], "cut off"),
        "truncated text": (VMDK[:600], "cut off"),
        # a footer that says something else
        "footer missing": (stream_vmdk()[:-512], "footer is missing"),
        "footer with other text": (stream_vmdk(vmdk_header(descriptor_at=30)), "contradict"),
        "footer with no capacity": (stream_vmdk(vmdk_header(capacity=0)), "contradict"),
        "footer without a directory": (stream_vmdk(vmdk_header(directory=2**64 - 1)), "no directory"),
        "footer is none": (stream_vmdk(bytes(512)), "footer is missing"),
        "only a header at the end": (vmdk_header(directory=2**64 - 1), "footer is missing"),
    }  # fmt: skip
    return [Sample(f"vmdk: {name}", "vmdk", content, word) for name, (content, word) in changed.items()]


# --- vhd ---------------------------------------------------------------------------------------------------------


def _summed(data: bytes, at: int) -> bytes:
    return patched(data, (at, be32(~sum(patched(data, (at, bytes(4)))) & 0xFFFFFFFF)))


def vhd_footer(kind: int, size: int, sparse_at: int = 2**64 - 1) -> bytes:
    data = struct.pack(
        ">8sIIQI4sI4sQQHBBII", b"conectix", 2, 0x10000, sparse_at, 0, b"test", 0x10000, b"Wi2k",
        size, size, 100, 4, 17, kind, 0,
    )  # fmt: skip
    return _summed((data + uuid.UUID(int=1).bytes).ljust(512, b"\0"), 64)


def vhd_sparse(entries: int, block: int = 2 * MIB, table: int = 1536, **parent: bytes) -> bytes:
    data = struct.pack(">8sQQIII", b"cxsparse", 2**64 - 1, table, 0x10000, entries, block).ljust(1024, b"\0")
    data = patched(data, (40, parent.get("id", b"")), (64, parent.get("name", b"")), (576, parent.get("locator", b"")))
    return _summed(data, 36)


def dynamic_vhd(size: int = 8 * MIB, kind: int = 3, footer: bytes | None = None, sparse: bytes | None = None) -> bytes:
    copy = vhd_footer(kind, size, 512)
    header = vhd_sparse(-(-size // (2 * MIB))) if sparse is None else sparse
    return copy + header + b"\xff" * 512 + (copy if footer is None else footer)


FIXED_VHD = bytes(MIB) + vhd_footer(2, MIB)
DYNAMIC_VHD = dynamic_vhd()


def _vhd_samples() -> list[Sample]:
    name = "..\\parent.vhd".encode("utf-16-be")
    changed = {
        "differencing": (dynamic_vhd(kind=4), "differencing"),
        "parent's name": (dynamic_vhd(sparse=vhd_sparse(4, name=name)), "parent"),
        "parent's id": (dynamic_vhd(sparse=vhd_sparse(4, id=uuid.UUID(int=7).bytes)), "parent"),
        "parent locator": (dynamic_vhd(sparse=vhd_sparse(4, locator=b"W2ku" + bytes(20))), "parent"),
        "last parent locator": (dynamic_vhd(sparse=vhd_sparse(4, locator=bytes(7 * 24) + b"W2ru")), "parent"),
        "copy says differencing": (patched(DYNAMIC_VHD, (0, vhd_footer(4, 8 * MIB, 512))), "contradict"),
        "copy has another size": (patched(DYNAMIC_VHD, (0, vhd_footer(3, GIB, 512))), "contradict"),
        "fixed with a copy of dynamic": (patched(FIXED_VHD, (0, vhd_footer(3, MIB, 512))), "contradict"),
        "no copy": (patched(DYNAMIC_VHD, (0, bytes(512))), "contradict"),
        "no footer": (DYNAMIC_VHD[:-512], "footer is missing"),
        "only a copy": (DYNAMIC_VHD[:512] + bytes(64 * KIB), "footer is missing"),
        "wrong checksum": (patched(FIXED_VHD, (-400, b"\1")), "checksum"),
        "wrong checksum of the header": (patched(DYNAMIC_VHD, (512 + 60, b"\1")), "checksum"),
        "unknown type": (bytes(MIB) + vhd_footer(9, MIB), "type"),
        "size past all bounds": (dynamic_vhd(size=2**64 - 1, sparse=vhd_sparse(4)), "absurd"),
        "fixed but short": (bytes(KIB) + vhd_footer(2, MIB), "shorter"),
        "header outside": (
            vhd_footer(3, MIB, 2**62) + bytes(512) + vhd_footer(3, MIB, 2**62), "outside"),
        "header is none": (patched(DYNAMIC_VHD, (512, bytes(1024))), "header is missing"),
        "header is the footer": (vhd_footer(3, MIB, 0) + bytes(1536) + vhd_footer(3, MIB, 0), "header is missing"),
        "blocks of nothing": (dynamic_vhd(sparse=vhd_sparse(4, block=0)), "blocks"),
        "blocks not a power of 2": (dynamic_vhd(sparse=vhd_sparse(4, block=3 * MIB)), "blocks"),
        "table too small": (dynamic_vhd(sparse=vhd_sparse(1)), "does not fit"),
        "table of 16 GiB": (dynamic_vhd(sparse=vhd_sparse(2**32 - 1)), "does not fit"),
        "table outside": (dynamic_vhd(sparse=vhd_sparse(4, table=2**63)), "outside"),
        "version 2": (patched(FIXED_VHD, (-500, be32(0x20000))), "version"),
    }  # fmt: skip
    return [Sample(f"vhd: {name}", "vhd", content, word) for name, (content, word) in changed.items()]


# --- vhdx --------------------------------------------------------------------------------------------------------

BAT = uuid.UUID("2DC27766-F623-4200-9D64-115E9BFD4A08")
METADATA = uuid.UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E")
PARAMETERS = uuid.UUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B")
DISK_SIZE = uuid.UUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8")
PARENT = uuid.UUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C")
STRANGE = uuid.UUID(int=99)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def vhdx_header(sequence: int, log: bytes = bytes(16), version: int = 1) -> bytes:
    data = struct.pack("<4sIQ16s16s16sHHIQ", b"head", 0, sequence, b"f" * 16, b"d" * 16, log, 0, version, MIB, MIB)
    data = data.ljust(4 * KIB, b"\0")
    return patched(data, (4, le32(crc32c(data))))


def vhdx_regions(*regions: tuple[uuid.UUID, int, int, int], count: int | None = None) -> bytes:
    entries = b"".join(name.bytes_le + struct.pack("<QII", *rest) for name, *rest in regions)
    return struct.pack("<4sIII", b"regi", 0, len(regions) if count is None else count, 0) + entries


REGIONS = ((BAT, 3 * MIB, MIB, 1), (METADATA, 2 * MIB, MIB, 1))
ITEMS = {PARAMETERS: (struct.pack("<II", 2 * MIB, 0), 4), DISK_SIZE: (le64(GIB), 6)}


def vhdx(
    items: dict[uuid.UUID, tuple[bytes, int]] | None = None,
    regions: bytes | None = None,
    second: bytes | None = None,
    headers: tuple[bytes, bytes] | None = None,
) -> bytes:
    first, other = headers or (vhdx_header(1), vhdx_header(2))
    table = vhdx_regions(*REGIONS) if regions is None else regions
    entries, content = b"", b""
    for name, (value, flags) in (ITEMS if items is None else items).items():
        entries += name.bytes_le + struct.pack("<IIII", 64 * KIB + len(content), len(value), flags, 0)
        content += value
    metadata = struct.pack("<8sHH", b"metadata", 0, len(entries) // 32).ljust(32, b"\0") + entries
    return patched(
        b"vhdxfile" + bytes(3 * MIB + 64 * KIB - 8),
        (64 * KIB, first), (128 * KIB, other), (192 * KIB, table), (256 * KIB, table if second is None else second),
        (2 * MIB, metadata), (2 * MIB + 64 * KIB, content),
    )  # fmt: skip


VHDX = vhdx()


def _vhdx_samples() -> list[Sample]:
    def with_item(name: uuid.UUID, value: bytes, flags: int = 4) -> bytes:
        return vhdx({**ITEMS, name: (value, flags)})

    changed = {
        "has a parent": (with_item(PARAMETERS, struct.pack("<II", 2 * MIB, 2)), "parent"),
        "parent locator": (with_item(PARENT, b"parent_linkage"), "parent"),
        "log not replayed": (vhdx(headers=(vhdx_header(1), vhdx_header(2, b"L" * 16))), "log"),
        "no valid header": (vhdx(headers=(bytes(4096), patched(vhdx_header(2), (9, b"\7")))), "Neither"),
        "version 2": (vhdx(headers=(vhdx_header(1), vhdx_header(2, version=2))), "version"),
        "two tables of regions": (vhdx(second=vhdx_regions(REGIONS[0], (METADATA, 4 * MIB, MIB, 1))), "contradict"),
        "second table of regions is none": (vhdx(second=bytes(100)), "missing"),
        "too many regions": (vhdx(regions=vhdx_regions(count=2**32 - 1)), "oversized"),
        "region named twice": (vhdx(regions=vhdx_regions(*REGIONS, REGIONS[1])), "twice"),
        "region in the headers": (vhdx(regions=vhdx_regions(REGIONS[0], (METADATA, 0, MIB, 1))), "where none can be"),
        "unknown region": (vhdx(regions=vhdx_regions(*REGIONS, (STRANGE, 3 * MIB, MIB, 1))), "not known"),
        "no metadata": (vhdx(regions=vhdx_regions(REGIONS[0])), "missing"),
        "metadata outside": (vhdx(regions=vhdx_regions(REGIONS[0], (METADATA, 2**63, MIB, 1))), "outside"),
        "table of blocks outside": (vhdx(regions=vhdx_regions((BAT, 2**63, MIB, 1), REGIONS[1])), "outside"),
        "table of blocks too small": (vhdx(regions=vhdx_regions((BAT, 3 * MIB, 8, 1), REGIONS[1])), "cover"),
        "unknown metadata": (with_item(STRANGE, b"x", 4), "not known"),
        "too many metadata": (patched(VHDX, (2 * MIB + 10, b"\xff\xff")), "oversized"),
        "metadata are none": (patched(VHDX, (2 * MIB, bytes(8))), "missing"),
        "no size": (vhdx({PARAMETERS: ITEMS[PARAMETERS]}), "incomplete"),
        "size of another length": (with_item(DISK_SIZE, b"\1"), "incomplete"),
        "size past all bounds": (with_item(DISK_SIZE, le64(2**64 - 1)), "absurd"),
        "blocks of nothing": (with_item(PARAMETERS, bytes(8)), "blocks"),
        "item named twice": (patched(VHDX, (2 * MIB + 32, DISK_SIZE.bytes_le)), "twice"),
        "item in the table": (patched(VHDX, (2 * MIB + 32 + 16, le32(0))), "incomplete"),
        "item outside": (patched(VHDX, (2 * MIB + 32 + 16, le32(2**32 - 1))), "outside"),
        "truncated": (VHDX[: 100 * KIB], "cut off"),
        "only the magic": (b"vhdxfile", "cut off"),
    }  # fmt: skip
    return [Sample(f"vhdx: {name}", "vhdx", content, word) for name, (content, word) in changed.items()]


# --- vdi ---------------------------------------------------------------------------------------------------------


def vdi(kind: int = 1, size: int = 8 * MIB, block: int = MIB, blocks: int = 8, **changes: bytes) -> bytes:
    data = b"<<< test >>>\n".ljust(64, b"\0") + b"\x7f\x10\xda\xbe" + le32(0x10001) + le32(400) + le32(kind)
    data = data.ljust(340, b"\0") + le32(512) + le32(1024) + bytes(12) + le32(512) + le32(0)
    data = data + le64(size) + le32(block) + le32(0) + le32(blocks) + le32(0)
    data = (data + changes.get("ids", b"")).ljust(512, b"\0")
    return data + (b"\xff" * (4 * min(blocks, 1024))).ljust(64 * KIB, b"\xff")


VDI = vdi()


def _vdi_samples() -> list[Sample]:
    changed = {
        "differencing": (vdi(kind=4), "parent"),
        "undo": (vdi(kind=3), "parent"),
        "parent's id": (vdi(ids=b"i" * 16 + bytes(32) + b"p" * 16), "parent"),
        "link's id": (vdi(ids=b"i" * 16 + bytes(16) + b"p" * 16), "parent"),
        "unknown version": (patched(VDI, (68, le32(7))), "version"),
        "blocks of nothing": (vdi(block=0), "blocks"),
        "blocks not a power of 2": (vdi(block=3 * MIB), "blocks"),
        "sectors of 4096": (patched(VDI, (360, le32(4096))), "blocks"),
        "size not covered": (vdi(size=2**64 - 1), "cover"),
        "table outside": (patched(VDI, (340, le32(2**32 - 1))), "outside"),
        "table in the header": (patched(VDI, (340, le32(0))), "outside"),
        "too many blocks": (vdi(blocks=2**32 - 1), "outside"),
        "truncated": (VDI[:100], "cut off"),
    }
    return [Sample(f"vdi: {name}", "vdi", content, word) for name, (content, word) in changed.items()]


# --- iso, and formats that we only recognise ----------------------------------------------------------------------


def iso(start: bytes = b"", identifier: bytes = b"CD001") -> bytes:
    primary = (b"\1" + identifier + b"\1").ljust(80, b"\0") + le32(20) + be32(20)
    end = (b"\xff" + identifier + b"\1").ljust(2048, b"\0")
    return start.ljust(32 * KIB, b"\0") + primary.ljust(2048, b"\0") + end + bytes(2048)


ISO = iso()
UDF = iso(identifier=b"BEA01")
HYBRID = iso(GPT[:2048])

LUKS1 = b"LUKS\xba\xbe\0\1" + b"aes".ljust(32, b"\0") + bytes(64 * KIB)
LUKS2 = b"LUKS\xba\xbe\0\2" + bytes(64 * KIB)
FOREIGN = {
    "luks 1": LUKS1,
    "luks 2": LUKS2,
    "qcow 1": b"QFI\xfb\0\0\0\1" + bytes(KIB),
    "qed": b"QED\0" + bytes(KIB),
    "cow": b"OOOM\0\0\0\2" + bytes(KIB),
    "parallels": b"WithoutFreeSpace" + bytes(KIB),
    "ploop": b"WithouFreSpacExt" + bytes(KIB),
    "bochs": b"Bochs Virtual HD Image\0" + bytes(KIB),
    "cloop": b"#!/bin/sh\n#V2.0 Format\n" + bytes(KIB),
    "dmg": bytes(KIB) + b"koly".ljust(512, b"\0"),
}

HONEST = [
    Sample("raw: empty", "raw", b""),
    Sample("raw: one byte", "raw", b"x"),
    Sample("raw: zeros", "raw", bytes(MIB)),
    Sample("raw: mbr", "raw", MBR),
    Sample("raw: gpt", "raw", GPT),
    Sample("raw: a script", "raw", b"#!/bin/sh\necho hello\n"),
    Sample("raw: a hybrid CD for a stick", "raw", HYBRID),
    Sample("ami: mbr", "ami", MBR),
    Sample("aki: a kernel", "aki", bytes(510) + b"\x55\xaaHdrS"),
    Sample("ari: a ramdisk", "ari", b"\x1f\x8b\x08" + bytes(100)),
    Sample("qcow2: version 3", "qcow2", QCOW2),
    Sample("qcow2: version 2", "qcow2", qcow2(version=2)),
    Sample("qcow2: large clusters", "qcow2", qcow2(cluster_bits=16, size=20 * GIB)),
    Sample("qcow2: dirty", "qcow2", patched(QCOW2, (72, be64(1)))),
    Sample("qcow2: zstd", "qcow2", patched(QCOW2, (72, be64(8)), (100, be32(112)), (104, b"\1"))),
    Sample("qcow2: names of features", "qcow2", qcow2(extensions=extension(0x6803F857, bytes(144)))),
    Sample("qcow2: bitmaps", "qcow2", qcow2(extensions=extension(0x23852875, bytes(24)))),
    Sample("qcow2: a snapshot", "qcow2", patched(QCOW2, (60, be32(1)), (64, be64(8192)))),
    Sample("vmdk: sparse", "vmdk", VMDK),
    Sample("vmdk: stream", "vmdk", stream_vmdk()),
    Sample("vmdk: for Windows", "vmdk", vmdk(descriptor().replace(b"\n", b"\r\n"))),
    Sample("vhd: fixed", "vhd", FIXED_VHD),
    Sample("vhd: dynamic", "vhd", DYNAMIC_VHD),
    Sample("vhd: footer of 511 bytes", "vhd", FIXED_VHD[:-1]),
    Sample("vhdx", "vhdx", VHDX),
    Sample("vdi: dynamic", "vdi", VDI),
    Sample("vdi: fixed", "vdi", vdi(kind=2)),
    Sample("iso: 9660", "iso", ISO),
    Sample("iso: udf", "iso", UDF),
    Sample("iso: hybrid", "iso", HYBRID),
]

POLYGLOTS = [
    Sample("polyglot: qcow2 and iso", "iso", iso(QCOW2), "at once"),
    Sample("polyglot: qcow2 and iso, as qcow2", "qcow2", iso(QCOW2), "at once"),
    Sample("polyglot: qcow2 and iso, as raw", "raw", iso(BACKED), "at once"),
    Sample("polyglot: descriptor and iso", "iso", iso(FLAT), "at once"),
    Sample("polyglot: vmdk and iso", "vmdk", iso(VMDK[: 32 * KIB]), "at once"),
    Sample("polyglot: vdi and iso", "iso", iso(VDI[: 32 * KIB]), "at once"),
    Sample("polyglot: vhdx and iso", "iso", patched(VHDX, (32 * KIB, ISO[32 * KIB :])), "at once"),
    Sample("polyglot: luks and iso", "iso", iso(LUKS1[:1024]), "at once"),
    Sample("polyglot: qcow2 and fixed vhd", "vhd", QCOW2 + vhd_footer(2, len(QCOW2)), "at once"),
    Sample("polyglot: qcow2 and fixed vhd, as qcow2", "qcow2", QCOW2 + vhd_footer(2, len(QCOW2)), "at once"),
    Sample("polyglot: iso and fixed vhd", "iso", ISO + vhd_footer(2, len(ISO)), "at once"),
    Sample("polyglot: qcow2 and vdi", "qcow2", patched(QCOW2, (64, VDI[64:72])), "at once"),
    Sample("polyglot: vmdk and vdi", "vmdk", patched(VMDK, (64, VDI[64:68])), "at once"),
    Sample("polyglot: dynamic vhd and iso", "vhd", iso(DYNAMIC_VHD[:2048]) + DYNAMIC_VHD[:512], "at once"),
    Sample("polyglot: qcow2 and dmg", "qcow2", QCOW2 + b"koly".ljust(512, b"\0"), "at once"),
]

# Small files with a large disk inside: whoever unpacks one has a full host.
BOMBS = [
    Sample("bomb: qcow2", "qcow2", qcow2(cluster_bits=21, size=64 * TIB)[: 8 * MIB], "may be"),
    Sample("bomb: vmdk", "vmdk", vmdk(
        descriptor(extents=f'RW {17 * TIB // 512} SPARSE "d"'), capacity=17 * TIB // 512,
    ).ljust(4 * MIB, b"\0"), "may be"),
    Sample("bomb: vhdx", "vhdx", vhdx(
        {PARAMETERS: (struct.pack("<II", 256 * MIB, 0), 4), DISK_SIZE: (le64(60 * TIB), 6)},
        vhdx_regions((BAT, 3 * MIB, 2 * MIB, 1), REGIONS[1])).ljust(5 * MIB, b"\0"), "may be"),
    Sample("bomb: vdi", "vdi", vdi(
        size=17 * TIB, block=256 * MIB, blocks=17 * TIB // (256 * MIB)).ljust(MIB, b"\xff"), "may be"),
]  # fmt: skip

LIES = [
    *(Sample(f"lie: {each.name} as raw", "raw", each.content, "declared")
      for each in HONEST if each.declared not in ("raw", "ami", "aki", "ari", "iso")),
    *(Sample(f"lie: {name} as raw", "raw", content, "declared") for name, content in FOREIGN.items()),
    Sample("lie: raw as qcow2", "qcow2", MBR, "declared"),
    Sample("lie: nothing as qcow2", "qcow2", b"", "declared"),
    Sample("lie: raw as iso", "iso", GPT, "declared"),
    Sample("lie: qcow2 as vmdk", "vmdk", QCOW2, "declared"),
    Sample("lie: vmdk as qcow2", "qcow2", VMDK, "declared"),
    Sample("lie: descriptor as raw", "raw", FLAT, "declared"),
    Sample("lie: backed qcow2 as raw", "raw", BACKED, "declared"),
    Sample("lie: backed qcow2 as a kernel", "aki", BACKED, "declared"),
    Sample("lie: backed qcow2 as ami", "ami", BACKED, "declared"),
    Sample("lie: qcow2 that is cut off as raw", "raw", QCOW2[:10], "declared"),
    Sample("lie: iso as a kernel", "aki", ISO, "declared"),
    Sample("lie: unknown format", "qed", FOREIGN["qed"], "not supported"),
]  # fmt: skip

HOSTILE = [
    *_qcow2_samples(), *_vmdk_samples(), *_vhd_samples(), *_vhdx_samples(), *_vdi_samples(), *POLYGLOTS, *BOMBS, *LIES,
]  # fmt: skip
