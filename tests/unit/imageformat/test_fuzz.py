"""Whatever a file contains, inspection ends, reads little, and answers or refuses; it never breaks."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from micronova.imageformat.inspector import check, inspect
from micronova.imageformat.reader import LIMIT
from micronova.imageformat.report import ImageInfo
from micronova.objects.errors import Invalid
from tests.unit.imageformat.corpus import HONEST, HOSTILE, patched

# Small ones change more often where it matters.
BASES = [sample.content for sample in HONEST + HOSTILE if len(sample.content) <= 1 << 17]
LARGE = [sample.content for sample in HONEST + HOSTILE if 1 << 17 < len(sample.content) <= 4 << 20]
INTERESTING = st.sampled_from(
    [value.to_bytes(width, order) for width in (1, 2, 4, 8) for order in ("big", "little")
     for value in {0, 1, 2, 3, 4, 2 ** (8 * width - 1), 2 ** (8 * width) - 1, 2 ** (8 * width) - 512} if value >= 0]
)  # fmt: skip
PIECES = st.one_of(INTERESTING, st.binary(min_size=1, max_size=32))
FORMATS = st.sampled_from(["raw", "qcow2", "vmdk", "vhd", "vhdx", "vdi", "iso", "ami", "nonsense"])


class Watched(io.BytesIO):
    """A stream that knows how much was asked of it."""

    bytes_read = 0
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None and size >= 0
        self.reads += 1
        data = super().read(size)
        self.bytes_read += len(data)
        return data


def inspected(content: bytes) -> ImageInfo:
    stream = Watched(content)
    info = inspect(stream)
    assert stream.bytes_read <= LIMIT
    assert stream.reads < 1000
    assert info.safe == (not info.findings)
    assert info.virtual_size is None or 0 <= info.virtual_size < 2**63
    assert all(finding.message.endswith(".") and finding.message.isprintable() for finding in info.findings)
    return info


@st.composite
def mutated(draw: Any, bases: list[bytes], span: int) -> bytes:
    content: bytes = draw(st.sampled_from(bases))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.one_of(st.integers(0, 512), st.integers(0, span), st.integers(-1600, -1)))
        content = patched(content, (max(at, -len(content)), draw(PIECES)))
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    return content


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=2048), FORMATS)
def test_noise(content: bytes, declared: str) -> None:
    inspected(content)
    try:
        check(io.BytesIO(content), declared, max_virtual_size=1 << 40)
    except Invalid as error:
        assert error.message


@pytest.mark.thorough
@settings(max_examples=600, deadline=None)
@given(mutated(BASES, 1 << 16), FORMATS)
def test_damaged_images(content: bytes, declared: str) -> None:
    info = inspected(content)
    try:
        assert check(io.BytesIO(content), declared, max_virtual_size=1 << 40) == info
        assert info.safe
    except Invalid as error:
        assert error.message


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(mutated(LARGE, 3 << 20))
def test_damaged_large_images(content: bytes) -> None:
    inspected(content)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BASES), min_size=2, max_size=3), st.integers(0, 70_000))
def test_images_laid_over_each_other(pieces: list[bytes], at: int) -> None:
    content = b""
    for n, piece in enumerate(pieces):
        content = patched(content, (n * at, piece))
    inspected(content)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"#", b"\n", b"\r\n", b" ", b"version=1", b"# Disk DescriptorFile", b"createType=", b'"', b"RW ", b"\0",
             b"1 FLAT ", b"SPARSE ", b'"/etc/passwd"', b"parentCID=", b"ffffffff", b"\x0b", b"\x85"]
        ), max_size=200,
    )
)  # fmt: skip
def test_descriptors(words: list[bytes]) -> None:
    """Text that is nearly a descriptor, alone and inside of a VMDK."""
    from tests.unit.imageformat.corpus import vmdk

    text = b"".join(words)
    info = inspected(text)
    assert info.format == "raw" or not info.safe
    inspected(vmdk(text[: 20 * 512]))
