"""Logs: text lines or JSON lines, each with the id of the request it belongs to."""

import contextlib
import contextvars
import fcntl
import logging
import os
import stat
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

import msgspec

from micronova.conf.settings import Settings

LOOK_EVERY: Final = 256  # records between looks at the size of the log

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class TextLines(logging.Formatter):
    """Text lines, for people."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("micronova.")
        request = request_id.get()
        text = f"{when} {record.levelname:<7} {name}: {record.getMessage()}"
        if request and request not in text:
            text += f" [{request}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JSONLines(logging.Formatter):
    """One JSON object in each line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get() or None,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class BoundedStream(logging.StreamHandler[TextIO]):
    """Writes to standard error, and keeps its file below a size if it is the log of a detached cloud.

    Such a file is open for appending and reading, and shared with the other processes of the cloud. So it is cut in
    place; a file that somebody redirects standard error to is not open for reading, and is left alone.
    """

    def __init__(self, stream: TextIO, most: int) -> None:
        super().__init__(stream)
        self._most = most
        self._until_look = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; look at the size of the file now and then."""
        super().emit(record)
        self._until_look -= 1
        if self._most and self._until_look < 0:
            self._until_look = LOOK_EVERY
            with contextlib.suppress(OSError, ValueError):  # ValueError: the stream has no descriptor
                shorten(self.stream.fileno(), self._most)


def shorten(file: int, most: int) -> None:
    """Keep the second half of a log that is larger than `most` bytes."""
    ours = os.O_RDWR | os.O_APPEND
    if fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND) != ours:
        return
    if not stat.S_ISREG(os.fstat(file).st_mode) or os.fstat(file).st_size <= most:
        return
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of several processes, one cuts
    try:
        size = os.fstat(file).st_size
        if size > most:
            kept = os.pread(file, most // 2, size - most // 2)
            os.ftruncate(file, 0)
            os.write(file, kept[kept.find(b"\n") + 1 :])
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error, with the level and the format of the settings."""
    handler = BoundedStream(sys.stderr, settings.default.log_file_max_size)
    handler.setFormatter(JSONLines() if settings.default.log_format == "json" else TextLines())
    logging.basicConfig(level=settings.default.log_level, handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
