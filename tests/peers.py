"""Throw-away environments for other people's software that tests talk to: never a dependency of ours.

`peer("osc", "python-openstackclient==10.5.0")` returns a directory that is a virtual environment with just that. It
is made once and kept in a cache; another version is another environment. `MICRONOVA_TEST_PEERS` may name a directory
that has ready-made ones by name (`$MICRONOVA_TEST_PEERS/osc`).
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def peer(name: str, *requirements: str) -> Path:
    """Return the environment that has the requirements; install it when no run before us did."""
    given = os.environ.get("MICRONOVA_TEST_PEERS")
    if given and (ready := Path(given) / name / "bin" / "python").exists():
        return ready.parent.parent
    wanted = "\n".join((sys.version, *sorted(requirements)))
    room = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "micronova-tests"
    place = room / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    room.mkdir(parents=True, exist_ok=True)
    with _alone(room / f"{name}.lock"):
        if not (place / "complete").exists():
            _install(place, requirements)
    return place


def _install(place: Path, requirements: tuple[str, ...]) -> None:
    shutil.rmtree(place, ignore_errors=True)  # of a run that was stopped half-way
    _run(sys.executable, "-m", "venv", str(place))
    _run(str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *requirements)
    (place / "complete").touch()


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout.decode(errors='replace')}")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process at a time do this: test runs are parallel."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
