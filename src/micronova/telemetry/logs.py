"""Logs: text lines or JSON lines, each with the ids of the request and of the server that it belongs to."""

import asyncio
import contextlib
import contextvars
import io
import logging
import os
import stat
import sys
import threading
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import msgspec

from micronova.conf.settings import Settings
from micronova.objects.background import keep_running
from micronova.objects.clock import SystemClock

log = logging.getLogger(__name__)

LONGEST_MESSAGE: Final = 10_000  # characters of a record
LONGEST_TRACE: Final = 100_000
LOOK_EVERY: Final = 256  # records between looks at the size of the log
LOOK_INTERVAL: Final = 1.0  # seconds between looks at the size of the log

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
server_id: contextvars.ContextVar[str] = contextvars.ContextVar("server_id", default="")
"""The id of the server that the current work is about; empty if it is about none or about several."""


def one_line(text: str) -> str:
    """Return a text with characters escaped that would begin a new line or command a terminal.

    What hosts, guests and other services say is in messages. None of them may write lines of its own.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _message(record: logging.LogRecord) -> str:
    return _cut(record.getMessage(), LONGEST_MESSAGE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} characters more)"


class TextLines(logging.Formatter):
    """Text lines, for people."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("micronova.")
        text = f"{when}Z {record.levelname:<7} {name}: {one_line(_message(record))}"
        about = [each for each in (request_id.get(), server_id.get()) if each and each not in text]
        if about:
            text += f" [{' '.join(about)}]"
        if record.exc_info:
            trace = _cut(self.formatException(record.exc_info), LONGEST_TRACE)
            # Indented: a line of an error's text must not look like one of the log.
            text += "".join(f"\n    {one_line(line)}" for line in trace.splitlines())
        return text


class JSONLines(logging.Formatter):
    """One JSON object in each line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "request_id": request_id.get() or None,
            "server_id": server_id.get() or None,
        }
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info), LONGEST_TRACE)
        return msgspec.json.encode(line).decode()


class LogFile:
    """The log of a detached cloud, which is kept below a size.

    The processes of the cloud share the file. Their standard error can only append to it, and is no way to cut it. So
    the file's owner opens it once more. Other processes write meanwhile, so it is cut in place.
    """

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._most = most
        self._lock = threading.Lock()
        self._failed = False

    @classmethod
    def of(cls, stream: int, path: Path, most: int) -> "LogFile | None":
        """Return the file at `path` if the stream writes to it; None if the stream writes elsewhere.

        Raise OSError if this process may not read and change it. The file is opened by the stream, because the path may
        lead to another file a moment later.
        """
        try:
            ours = os.path.samestat(os.stat(path), written := os.fstat(stream))
        except FileNotFoundError:
            return None
        if not ours or not stat.S_ISREG(written.st_mode):
            return None
        return cls(os.open(f"/proc/self/fd/{stream}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC), most)

    def shorten(self) -> None:
        """Keep the second half of the log if it is too large; log an error if that fails, once until it succeeds."""
        if not self._lock.acquire(blocking=False):
            return  # another thread does it, or this one logs that it failed
        try:
            self._shorten()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                _not_limited(error)
        finally:
            self._lock.release()

    def _shorten(self) -> None:
        if self._descriptor < 0:
            return
        size = os.fstat(self._descriptor).st_size
        if size <= self._most:
            return
        kept = os.pread(self._descriptor, self._most // 2, size - self._most // 2)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, kept[kept.find(b"\n") + 1 :])

    def close(self) -> None:
        """Close the file, when no thread cuts it."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class LogStream(logging.StreamHandler[TextIO]):
    """Writes to standard error, or to a file that can be opened anew.

    If standard error is a file with a size to keep, it looks at the size now and then.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.file: LogFile | None = None
        self._until_look = 0
        self._opened: TextIO | None = None

    def write_to(self, path: Path) -> None:
        """Write to the file at `path` from now on; raise OSError, and go on as before, if it cannot be opened."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        opened = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115 - it stays open
        former, self._opened = self._opened, opened
        self.setStream(opened)
        if former is not None:
            former.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        super().emit(record)
        self._until_look -= 1
        if self.file is not None and self._until_look < 0:
            self._until_look = LOOK_EVERY
            self.file.shorten()


@contextlib.asynccontextmanager
async def limited_log(path: Path, most: int) -> AsyncGenerator[None]:
    """Keep the log of this cloud below a size, if its standard error is that file.

    Its other processes, such as the agents and libvirtd, write to the file as well. So the size is looked at every
    second, and not only when this process writes.
    """
    stream = _stream()
    file = None
    if most and stream is not None:
        try:
            file = LogFile.of(stream.stream.fileno(), path, most)
        except io.UnsupportedOperation:
            pass  # the stream is not a file
        except OSError as error:
            _not_limited(error)
    if file is None or stream is None:
        yield
        return
    stream.file = file
    looking = keep_running(partial(_look_forever, file), name="log-size", clock=SystemClock())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        stream.file = None
        file.close()


async def _look_forever(file: LogFile) -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL)
        await asyncio.to_thread(file.shorten)


def _not_limited(error: OSError) -> None:
    log.error(
        "the log cannot be kept below default.log_file_max_size, and may fill the disk: %s; make it a regular file of "
        "the user that the cloud runs as",
        error,
    )


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error, with the levels and the format of the settings."""
    handler = LogStream(sys.stderr)
    handler.setFormatter(JSONLines() if settings.default.log_format == "json" else TextLines())
    logging.basicConfig(level=settings.default.log_level, handlers=[handler], force=True)
    # No line has these facts; to find them out takes half of the time of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as Python's documentation says: no caller is looked for
    for noisy in ("uvicorn", "uvicorn.error", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    set_levels(settings)


def set_levels(settings: Settings, former: Settings | None = None) -> None:
    """Give the loggers the levels of the settings; those that only the `former` settings name get the general one."""
    logging.getLogger().setLevel(settings.default.log_level)
    for name in _named_levels(former) if former is not None else ():
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in _named_levels(settings).items():
        logging.getLogger(name).setLevel(level)


def _named_levels(settings: Settings) -> dict[str, str]:
    """Return the levels of single loggers. Lines of ours show a logger's name without the package's."""
    levels: dict[str, str] = {}
    for text in settings.default.default_log_levels:
        name, _, level = text.partition("=")
        levels |= {name: level, f"micronova.{name.removeprefix('micronova.')}": level}
    return levels


def use_log_file(settings: Settings) -> Path | None:
    """Open the log file of the settings, or open it anew; return None if they name none.

    Its process calls this as the user that it runs as: root follows no path into a directory of that user's. Raise
    OSError if it cannot be opened; lines then go where they went before.
    """
    stream = _stream()
    if not settings.default.log_file or stream is None:
        return None
    path = Path(settings.default.log_file)
    stream.write_to(path)
    return path


def _stream() -> LogStream | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, LogStream)), None)
