"""Reading console logs that virtlogd rotates."""

from pathlib import Path

from micronova.virt.libvirt.guests.console_log import MOST_BYTES, from_files, read_console


def test_console_log(tmp_path: Path) -> None:
    def read(lines: int | None) -> str:
        return read_console(from_files(tmp_path), "x.log", lines)

    assert read(None) == ""
    (tmp_path / "x.log.0").write_bytes(b"one\ntwo\n")
    assert read(None) == "one\ntwo\n"  # the new one is just being made
    (tmp_path / "x.log").write_bytes(b"three\nf\xffur\x00\n")
    assert read(None) == "one\ntwo\nthree\nf\ufffdur\n"
    assert read(2) == "three\nf\ufffdur"
    assert read(0) == ""
    (tmp_path / "x.log").write_bytes(b"x" * (MOST_BYTES * 2))
    assert len(read(None)) == MOST_BYTES
