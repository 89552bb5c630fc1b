"""Several processes of HTTP roles on one socket (`api.workers`), and the process that supervises them.

A worker that ends is started again, after pauses that grow while it ends soon. Only if none has ever been ready, exit
code 1 means that a setting is wrong: then all are stopped. Once one has been ready, the others must not suffer from
what keeps a new one from starting. SIGHUP is passed on to all. If systemd watches the service (WatchdogSec=), a worker
whose event loop hangs is killed and started again, and the others go on.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from micronova.cli.notify_systemd import beat, watchdog_timeout
from micronova.cli.own_command import own_command
from micronova.cli.reload import ends_with_its_terminal
from micronova.cli.service_user import hand_over, service_user
from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings
from micronova.http.sockets import listen
from micronova.objects.errors import resource_exhausted

log = logging.getLogger(__name__)

READY = b"r"
_FIRST_PULSE = 128  # of worker 0, as a byte; what is smaller says "ready"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a worker is started again
STEADY = 60.0  # seconds after which a worker that ends was no failed start


def run_workers(settings: Settings, roles: tuple[str, ...], config: Path | None, place: StateDirectory) -> None:
    """Run the workers until SIGTERM or Ctrl-C."""
    sock = listen(settings.api.listen, settings.api.port)
    # Before the workers start: several of them at once would make different keys.
    user = service_user(settings.default.user)
    if user is None:
        place.create()
        place.keys()
    else:
        hand_over(place, user)
    ready, say_ready = os.pipe()
    for descriptor in (ready, say_ready):
        os.set_blocking(descriptor, False)
    command = own_command(
        "run",
        *roles,
        "--fd",
        str(sock.fileno()),
        "--ready-fd",
        str(say_ready),
        "--dir",
        str(place.path),
        *(["--config", str(config)] if config else []),
    )
    workers = [
        _Worker([*command, "--worker", str(number)], (sock.fileno(), say_ready))
        for number in range(settings.api.workers)
    ]
    if not _Supervisor(workers, ready).run():
        sys.exit(1)


def pulse(ready_fd: int, number: int) -> None:
    """Tell the supervisor that a worker works. It need not arrive: the supervisor may be gone or stand still."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(ready_fd, bytes([_FIRST_PULSE + number % _FIRST_PULSE]))


class _Worker:
    """A process that is started again when it ends."""

    def __init__(self, command: list[str], descriptors: tuple[int, ...]) -> None:
        self._command = command
        self._descriptors = descriptors
        self.process: subprocess.Popen[bytes] | None = None
        self._started = self.again_at = 0.0
        self._pause = FIRST_PAUSE
        self.heard_at: float | None = None  # its last pulse; none before the first one

    def start(self) -> None:
        """Start the process."""
        self._started = time.monotonic()
        self.heard_at = None
        self.process = subprocess.Popen(self._command, pass_fds=self._descriptors)

    def start_later(self) -> None:
        """Have the process started after a pause."""
        self.process = None
        now = time.monotonic()
        if now - self._started > STEADY:
            self._pause = FIRST_PAUSE
        self.again_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class _Supervisor:
    """Starts the workers, and starts those again that end."""

    def __init__(self, workers: list[_Worker], ready: int) -> None:
        self._workers = workers
        self._ready = ready
        self._worked = False  # see `_has_worked`
        self._stopping = self._failed = False
        self._watched = watchdog_timeout()
        self._beat_at = 0.0  # when to speak to systemd's watchdog next

    def run(self) -> bool:
        """Run the workers until a signal stops them; return False if a setting is wrong."""
        woken, wake = os.pipe()
        for descriptor in (woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # Of a terminal that is gone, all processes get it.
        signal.signal(signal.SIGHUP, self._stop if ends_with_its_terminal() else self._reload)
        while True:
            self._tend()
            if self._stopping and all(worker.process is None for worker in self._workers):
                return not self._failed
            waiting = [worker.again_at for worker in self._workers if worker.process is None and not self._stopping]
            if self._watched:
                self._watch()
                waiting.append(self._beat_at)
            pause = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            found = select.select([woken, self._ready] if self._watched else [woken], [], [], pause)[0]
            if woken in found:
                os.read(woken, 512)

    def _watch(self) -> None:
        """Tell systemd's watchdog that this process works, and end a worker that does not; it is started again."""
        self._has_worked()
        now = time.monotonic()
        if now >= self._beat_at:
            beat()
            self._beat_at = now + self._watched / 2
        for worker in self._workers:
            if worker.process is not None and worker.heard_at is not None and now - worker.heard_at > self._watched:
                log.error("worker process %d has not worked for %g s and is killed", worker.process.pid, self._watched)
                worker.process.kill()
                worker.heard_at = None

    def _stop(self, *_: Any) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.process is not None:
                worker.process.terminate()

    def _reload(self, *_: Any) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.send_signal(signal.SIGHUP)

    def _tend(self) -> None:
        for worker in self._workers:
            if worker.process is None:
                if not self._stopping and time.monotonic() >= worker.again_at:
                    self._start(worker)
            elif (code := worker.process.poll()) is not None:
                self._ended(worker, worker.process.pid, code)

    def _has_worked(self) -> bool:
        """Return whether a worker was ever ready: then the settings are right."""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._ready, 4096)
            self._worked = self._worked or bool(said)
            for number, worker in enumerate(self._workers):
                if _FIRST_PULSE + number % _FIRST_PULSE in said:
                    worker.heard_at = time.monotonic()
        return self._worked

    def _start(self, worker: _Worker) -> None:
        try:
            worker.start()
        except OSError as error:
            if resource_exhausted(error) is None and not self._has_worked():
                raise
            log.error("a worker process cannot be started now, which is repeated: %s", error)
            worker.start_later()
        if self._stopping and worker.process is not None:  # the signal came while it was started
            worker.process.terminate()

    def _ended(self, worker: _Worker, pid: int, code: int) -> None:
        worker.start_later()
        if self._stopping:
            return
        if code == 1 and not self._has_worked():
            self._failed = True  # a setting is wrong; the next worker would fail as well
            self._stop()
        else:
            log.warning("worker process %d ended with exit code %s and is started again", pid, code)
