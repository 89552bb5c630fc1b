"""The vulnerabilities of the field, each by its number: what an attacker did, and what stops it here."""

import io

import pytest

from micronova.imageformat.inspector import check, inspect
from micronova.objects.errors import Invalid
from tests.unit.imageformat import corpus
from tests.unit.imageformat.corpus import PASSWD, be32, be64, extension, patched


def refused(content: bytes, declared: str) -> str:
    with pytest.raises(Invalid) as refusal:
        check(io.BytesIO(content), declared)
    return refusal.value.message


def test_cve_2015_7548_a_guest_writes_a_qcow2_header_into_its_raw_disk() -> None:
    """A snapshot of the disk was made by probing it, and so contained the file that the header named.

    The disk is not what it was declared to be any more: it is refused as raw, and as qcow2.
    """
    disk = patched(corpus.GPT, (0, corpus.BACKED))
    assert inspect(io.BytesIO(disk)).format == "qcow2"
    assert "declared as 'raw', but its content is qcow2" in refused(disk, "raw")
    assert "backing file" in refused(disk, "qcow2")


def test_cve_2022_47951_a_vmdk_descriptor_names_a_file_of_the_host() -> None:
    """An image service or a host that converted the "flat" VMDK copied the named file into the disk."""
    for declared in ("vmdk", "raw"):
        refused(corpus.FLAT, declared)
    assert "monolithicFlat" in refused(corpus.vmdk(corpus.FLAT), "vmdk")
    assert "capacity" in refused(corpus.vmdk(corpus.FLAT, capacity=0), "vmdk")
    with_parent = corpus.descriptor(more='parentFileNameHint="/etc/passwd"\n')
    assert "parent" in refused(corpus.vmdk(with_parent), "vmdk")


def test_cve_2024_32498_a_qcow2_keeps_its_data_in_a_file_of_the_host() -> None:
    """The check of the day looked for backing files only; the data file's name is in a header extension."""
    assert "external data file" in refused(corpus.DATA_FILE, "qcow2")
    assert "external data file" in refused(patched(corpus.QCOW2, (72, be64(4))), "qcow2")
    assert "external data file" in refused(corpus.qcow2(extensions=extension(0x44415441, PASSWD)), "qcow2")
    assert "declared" in refused(corpus.DATA_FILE, "raw")


def test_cve_2024_40767_what_is_declared_raw_is_inspected_as_well() -> None:
    """The fix of CVE-2024-32498 trusted images that were declared raw, though tools down the road probed them."""
    for content in (corpus.BACKED, corpus.DATA_FILE, corpus.FLAT, corpus.vmdk(corpus.FLAT)):
        assert "declared as 'raw'" in refused(content, "raw")
    # Nor is a header believed to be harmless because the rest of it is damaged.
    assert "declared" in refused(patched(corpus.BACKED, (20, be32(99))), "raw")
    assert "declared" in refused(corpus.BACKED[:16], "raw")


def test_cve_2026_24708_a_header_written_before_a_resize() -> None:
    """qemu-img resized a "flat" disk without being told its format, and took the guest's header for the truth.

    Such a disk is not safe under any name: whoever asks before touching it is told so. (That qemu-img is always told
    the format is the driver's part.)
    """
    disk = patched(bytes(1 << 20), (0, corpus.DATA_FILE))
    for declared in ("raw", "qcow2", "ami"):
        refused(disk, declared)
    resized_away = patched(disk, (24, be64(0)), (36, be32(0)))  # "shrink me to nothing"
    assert not inspect(io.BytesIO(resized_away)).safe
