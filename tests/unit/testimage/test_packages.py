"""The packages that the test image needs, from apt's lists, and the error if one is missing."""

from pathlib import Path

import pytest

from micronova.objects.errors import NotSupported
from micronova.testimage import builder, packages

LISTING = """\
linux-image-cloud-amd64
  Depends: linux-image-6.99.0-1-cloud-amd64
dropbear-bin
  Depends: libc6
 |Depends: libtomcrypt1
  Depends: <virtual>
libc6
  Depends: libgcc-s1
libgcc-s1
  Depends: gcc-12-base
  Depends: libc6
linux-image-6.99.0-1-cloud-amd64
  Depends: kmod
busybox-static
mtools
  Depends: libc6
syslinux
syslinux-common
"""


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with apt that knows what LISTING says, and nothing else in PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        (tools / name).touch()
        (tools / name).chmod(0o755)
    knows(tools, LISTING)
    monkeypatch.setenv("PATH", str(tools))
    return tools


def knows(tools: Path, listing: str) -> None:
    (tools / "apt-cache").write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{listing}END\n")


def test_the_kernel_of_the_day_and_libraries_are_chosen(debian: Path) -> None:
    assert builder.available() is None
    assert packages.choose() == [
        *("busybox-static", "dropbear-bin", "libc6", "libgcc-s1", "libtomcrypt1"),
        *("linux-image-6.99.0-1-cloud-amd64", "mtools", "syslinux", "syslinux-common"),
    ]


def test_packages_that_apt_does_not_know_are_named(debian: Path, tmp_path: Path) -> None:
    knows(debian, LISTING.replace("syslinux\n", "").replace("mtools\n", "other\n"))
    assert builder.available() == (
        "apt does not know mtools, syslinux, which the test image needs: run apt-get update."
    )
    with pytest.raises(NotSupported, match="mtools"):
        builder.build(tmp_path / "out", tmp_path / "cache")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_machine_without_apt_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = builder.available()
    assert missing is not None and "apt-get, apt-cache, dpkg-deb" in missing


def test_a_failing_download_says_why(debian: Path, tmp_path: Path) -> None:
    (debian / "apt-get").write_text("#!/bin/sh\necho 'W: careful' >&2\necho 'E: no network' >&2\nexit 100\n")
    with pytest.raises(NotSupported, match="apt-get download failed: E: no network"):
        builder.build(tmp_path / "out", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_image_that_was_built_needs_no_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"testimage-{builder._digest()}.qcow2").write_bytes(b"built before")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert builder.build(tmp_path / "new" / "out", cache).read_bytes() == b"built before"
