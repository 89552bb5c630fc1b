"""What a guest has written to its console: a ring of two files that virtlogd keeps."""

from pathlib import Path
from typing import Final

from micronova.virt.driver import DriverFailed

MOST_BYTES: Final = 256 * 1024
"""How much of the end is given at most."""


def read_console(log: Path, lines: int | None) -> str:
    """Give the last lines, or all that is kept. Blocks."""
    # The older file is named NAME.0; with other settings of virtlogd there are more.
    data = b""
    for file in (log, *(log.with_name(f"{log.name}.{number}") for number in range(10))):
        wanted = MOST_BYTES - len(data)
        if wanted <= 0:
            break
        piece = _tail(file, wanted)
        if piece is None:
            if file is log:
                continue  # just being replaced, or it has not run yet
            break
        data = piece + data
    text = data.decode(errors="replace").replace("\x00", "")
    if lines is None or lines < 0:
        return text
    return "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""


def _tail(file: Path, most: int) -> bytes | None:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - most))
            return stream.read(most)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise DriverFailed(f"The console log cannot be read: {error.strerror}.", details=str(error)) from error
