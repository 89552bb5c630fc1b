"""Files that are replaced as a whole: there is the old one or the new one, whatever fails."""

import os
from collections.abc import Mapping
from pathlib import Path


def replace_files(contents: Mapping[Path, bytes], *, private: bool = False) -> None:
    """Replace files that belong together; with `private` others lose a right to read them that they had.

    All are written, and on the disk, before the first one is replaced: a full disk leaves the old ones, which fit.
    """
    written = [(_written(file, content, private=private), file) for file, content in contents.items()]
    for new, file in written:
        new.replace(file)
    for directory in {file.parent for file in contents}:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _written(file: Path, content: bytes, *, private: bool) -> Path:
    """Write what a file is replaced by; only its owner reads it, unless the file leaves it another owner and mode."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if file.exists():
                before = file.stat()
                mode = before.st_mode & 0o777
                os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), 0o600 if private and mode & 0o007 else mode)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return new
