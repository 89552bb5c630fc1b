"""A process that root starts on a machine with real guests, and starts again when it was killed."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import msgspec

from micronova.conf.default import DefaultSettings
from micronova.conf.settings import Settings
from micronova.objects.errors import MicronovaError, resource_exhausted
from micronova.telemetry.logs import set_levels

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a process is started again
STEADY = 60.0  # seconds after which a process that ends was no failed start
STOP_TIMEOUT = 10.0
READY = "ready\n"
MOST_SAID = 4096  # bytes that root reads at once of what a process says
_ENVIRONMENT = ("PATH", "TZ", "LANG", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_ENVIRONMENT_PREFIXES = ("LC_", "PYTHON")


class LogLevels(msgspec.Struct, frozen=True):
    """What root's process tells another one while it runs."""

    log_level: str
    default_log_levels: tuple[str, ...]


class FromRoot:
    """What root's process writes: the input of a supervised process, of which the programs that it starts get none."""

    def __init__(self) -> None:
        self._from = os.dup(sys.stdin.fileno())  # not inherited
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        self._part = b""
        self._levels: Settings | None = None

    def start_message(self) -> bytes:
        """Return what the process is told at its start."""
        while b"\n" not in self._part:
            read = os.read(self._from, 65_536)
            self._part += read or b"\n"
        message, _, self._part = self._part.partition(b"\n")
        return message

    def follow(self, settings: Settings) -> None:
        """Take over levels of the log from now on; those of the settings hold until then. For the event loop."""
        self._levels = settings
        os.set_blocking(self._from, False)
        asyncio.get_running_loop().add_reader(self._from, self._take)

    def _take(self) -> None:
        try:
            read = os.read(self._from, 65_536)
        except BlockingIOError:
            return
        if not read:  # root's process has ended, and this one does, too
            asyncio.get_running_loop().remove_reader(self._from)
            return
        *lines, self._part = (self._part + read).split(b"\n")
        for line in lines:
            levels = msgspec.json.decode(line, type=LogLevels)
            new = Settings(
                default=DefaultSettings(log_level=levels.log_level, default_log_levels=levels.default_log_levels)
            )
            set_levels(new, self._levels)
            self._levels = new
            log.warning(
                "SIGHUP: the levels of the log are %s", " ".join((levels.log_level, *levels.default_log_levels))
            )


def tell_root(text: str) -> None:
    """Write what root's process reads: READY, or why this process ends. Nobody reads it if that process has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), text.encode())


def _environment() -> dict[str, str]:
    """Return what such a process gets of root's environment, which may have secrets: settings are among it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }


class SupervisedProcess(ABC):
    """A new program, not a fork: root's process has read the settings and keys of the cloud. Methods block.

    The program reads what it is told from its input, a line of JSON, and later lines with levels of the log. It writes
    READY, or why it ends, to its output.
    """

    _settings: Settings
    what: ClassVar[str]  # in log lines
    consequence: ClassVar[str]  # what its end means, in log lines

    def __init__(self, module: str, directory: Path) -> None:
        """`directory` is DIR, which is named for people who look at the list of processes."""
        self._module = module
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False
        self._started = self._again_at = 0.0
        self._pause = FIRST_PAUSE
        self._told_to_stop = False

    @abstractmethod
    def start_message(self, groups: Iterable[int]) -> bytes:
        """Return what the process is told; `groups` are more groups of its user."""

    @abstractmethod
    def descriptors(self) -> list[int]:
        """Return the descriptors that the process inherits."""

    def start(self, groups: Iterable[int]) -> None:
        """Start the process."""
        start_message = self.start_message(groups)
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, str(self._directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self.descriptors(),
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the cloud, which then stops the agents
            cwd="/",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `tend` sees that
            self._process.stdin.write(start_message + b"\n")
            self._process.stdin.flush()
        os.set_blocking(self._process.stdin.fileno(), False)

    def use_levels(self, new: DefaultSettings) -> None:
        """Give the process other levels of the log, now and whenever it is started again."""
        levels = LogLevels(new.log_level, new.default_log_levels)
        default = msgspec.structs.replace(self._settings.default, **msgspec.structs.asdict(levels))
        self._settings = msgspec.structs.replace(self._settings, default=default)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it ends, or stands still
                os.write(self._process.stdin.fileno(), msgspec.json.encode(levels) + b"\n")

    def tend(self, groups: Iterable[int]) -> None:
        """Start the process, also again if it was killed; raise MicronovaError if it ended before it ever worked.

        If the machine lacks memory, processes or the like, it is started later.
        """
        process = self._process
        if process is None:
            if not self._told_to_stop and time.monotonic() >= self._again_at:
                try:
                    self.start(groups)
                except Exception as error:
                    if resource_exhausted(error) is None and not self._was_ready:
                        raise MicronovaError(f"{self.what.capitalize()} cannot be started: {error}.") from error
                    log.error("%s cannot be started now, which is repeated: %s", self.what, error)
                    self._start_later()
            return
        code = process.poll()
        said = self._read()
        if code is None:
            return
        self._close()
        if code == 0:  # it was told to stop
            self._told_to_stop = True
            return
        if not self._was_ready:
            raise MicronovaError(said or f"{self.what.capitalize()} ended while it was starting.")
        if time.monotonic() - self._started > STEADY:
            self._pause = FIRST_PAUSE
        log.warning(
            "%s ended (%s) and is started again; %s",
            self.what,
            said or (f"signal {-code}" if code < 0 else f"exit code {code}"),
            self.consequence,
        )
        self._start_later()

    def _start_later(self) -> None:
        self._again_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    @property
    def attention(self) -> float:
        """In how many seconds the process has to be tended, if nothing happens before."""
        if self._process is not None or self._told_to_stop:
            return STEADY
        return max(0.0, self._again_at - time.monotonic())

    def stop(self, *, kill: bool) -> None:
        """End the process: with `kill` at once, because its cloud has died."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._close()

    def _read(self) -> str:
        """Return what the process said but that it is ready: why it ends.

        Not more than a part at a time: a process that was taken over may write without end.
        """
        assert self._process is not None and self._process.stdout is not None
        try:
            said = os.read(self._process.stdout.fileno(), MOST_SAID).decode("utf-8", "replace")
        except BlockingIOError:
            return ""
        self._was_ready = self._was_ready or said.startswith(READY)
        return said.removeprefix(READY)

    def _close(self) -> None:
        process, self._process = self._process, None
        for stream in (process.stdin, process.stdout) if process is not None else ():
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
