"""Several processes with the same roles (`workers`), of which those with HTTP share a socket, and their supervisor.

The supervisor imports the code of the roles once and forks the workers, which so share the memory of the code. It forks
before any of them has an event loop, a thread, a connection or a random source; it has none of these itself.

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
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from micronova.cli.agent import HOST_ROLES
from micronova.cli.notify_systemd import beat, watchdog_timeout
from micronova.cli.reload import ends_with_its_terminal
from micronova.conf.settings import Settings
from micronova.objects.errors import resource_exhausted

log = logging.getLogger(__name__)

READY = b"r"
_FIRST_PULSE = 128  # of worker 0, as a byte; what is smaller says "ready"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a worker is started again
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
STEADY = 60.0  # seconds after which a worker that ends was no failed start


class WorkerPlace(NamedTuple):
    """The place of a process among the workers; a process without others is number 0."""

    number: int = 0
    ready_fd: int | None = None  # a pipe on which it says that it is ready


def worker_count(settings: Settings, roles: Iterable[str]) -> int:
    """Return how many workers a process has: the most that one of its roles asks for, of which each has all roles.

    The agents of a host have none.
    """
    roles = set(roles)
    if roles & set(HOST_ROLES):
        return 1
    asked = {"conductor": settings.conductor.workers, "scheduler": settings.scheduler.workers}
    return max((asked.get(role, settings.api.workers) for role in roles), default=1)


def fork_workers(count: int) -> WorkerPlace | None:
    """Run workers until SIGTERM or Ctrl-C; return in each of them its place, and in the supervisor None, at the end.

    What was imported before is shared.
    """
    ready, say_ready = os.pipe()
    for descriptor in (ready, say_ready):
        os.set_blocking(descriptor, False)
    supervisor = _Supervisor(count, ready)
    number = supervisor.run()
    if number is not None:
        return WorkerPlace(number, say_ready)
    if supervisor.failed:
        sys.exit(1)
    return None


def pulse(ready_fd: int, number: int) -> None:
    """Tell the supervisor that a worker works. It need not arrive: the supervisor may be gone or stand still."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(ready_fd, bytes([_FIRST_PULSE + number % _FIRST_PULSE]))


class _Worker:
    """A process that is started again when it ends."""

    def __init__(self) -> None:
        self.pid = 0  # 0: it does not run
        self._started = self.again_at = 0.0
        self._pause = FIRST_PAUSE
        self.heard_at: float | None = None  # its last pulse; none before the first one

    def fork(self) -> bool:
        """Fork the process; return whether this is the new one."""
        self._started = time.monotonic()
        self.heard_at = None
        self.pid = os.fork()
        return self.pid == 0

    def start_later(self) -> None:
        """Have the process started after a pause."""
        self.pid = 0
        now = time.monotonic()
        if now - self._started > STEADY:
            self._pause = FIRST_PAUSE
        self.again_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def exit_code(self) -> int | None:
        """Return the exit code if the process has ended."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


class _Supervisor:
    """Starts the workers, and starts those again that end."""

    def __init__(self, count: int, ready: int) -> None:
        self._workers = [_Worker() for _ in range(count)]
        self._ready = ready
        self._woken, self._wake = os.pipe()
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        self._worked = False  # see `_has_worked`
        self._stopping = self._reloading = False  # what a signal asked for
        self.failed = False  # a setting is wrong
        self._watched = watchdog_timeout()
        self._beat_at = 0.0  # when to speak to systemd's watchdog next

    def run(self) -> int | None:
        """Run the workers until a signal stops them; return in a worker its number, in the supervisor None."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it wakes `select`
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # Of a terminal that is gone, all processes get it.
        signal.signal(signal.SIGHUP, self._stop if ends_with_its_terminal() else self._reload)
        told = False
        while True:
            if (forked := self._tend()) is not None:
                return forked
            if self._stopping and not told:
                told = True
                self._signal(signal.SIGTERM)
            if self._reloading:
                self._reloading = False
                self._signal(signal.SIGHUP)
            if self._stopping and not any(worker.pid for worker in self._workers):
                return None
            waiting = [worker.again_at for worker in self._workers if not worker.pid and not self._stopping]
            if self._watched:
                self._watch()
                waiting.append(self._beat_at)
            pause = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            listening = [self._woken, self._ready] if self._watched else [self._woken]
            if self._woken in select.select(listening, [], [], pause)[0]:
                os.read(self._woken, 512)

    def _watch(self) -> None:
        """Tell systemd's watchdog that this process works, and end a worker that does not; it is started again."""
        self._has_worked()
        now = time.monotonic()
        if now >= self._beat_at:
            beat()
            self._beat_at = now + self._watched / 2
        for worker in self._workers:
            if worker.pid and worker.heard_at is not None and now - worker.heard_at > self._watched:
                log.error("worker process %d has not worked for %g s and is killed", worker.pid, self._watched)
                os.kill(worker.pid, signal.SIGKILL)
                worker.heard_at = None

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _reload(self, *_: Any) -> None:
        self._reloading = True

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:  # it is ours until it was waited for
                os.kill(worker.pid, number)

    def _tend(self) -> int | None:
        """Start the workers that are due; return in a new one its number."""
        for number, worker in enumerate(self._workers):
            if not worker.pid:
                if not self._stopping and time.monotonic() >= worker.again_at and self._start(worker):
                    return number
            elif (code := worker.exit_code()) is not None:
                self._ended(worker, worker.pid, code)
        return None

    def _has_worked(self) -> bool:
        """Return whether a worker was ever ready: then the settings are right."""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._ready, 4096)
            self._worked = self._worked or bool(said)
            for number, worker in enumerate(self._workers):
                if _FIRST_PULSE + number % _FIRST_PULSE in said:
                    worker.heard_at = time.monotonic()
        return self._worked

    def _start(self, worker: _Worker) -> bool:
        """Start a worker; return whether this is the new process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # the handlers are not for the new process
        try:
            if worker.fork():
                self._forget()
                return True
        except OSError as error:
            if resource_exhausted(error) is None and not self._has_worked():
                raise
            log.error("a worker process cannot be started now, which is repeated: %s", error)
            worker.start_later()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        return False

    def _forget(self) -> None:
        """Give up, in a worker, what only the supervisor needs."""
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for descriptor in (self._woken, self._wake, self._ready):
            os.close(descriptor)

    def _ended(self, worker: _Worker, pid: int, code: int) -> None:
        worker.start_later()
        if self._stopping:
            return
        if code == 1 and not self._has_worked():
            self.failed = True  # a setting is wrong; the next worker would fail as well
            self._stopping = True
        else:
            log.warning("worker process %d ended with exit code %s and is started again", pid, code)
