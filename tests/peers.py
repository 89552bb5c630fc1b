"""Virtual environments with software of other projects that tests talk to; none of it is a dependency of Micronova.

`peer("osc", "python-openstackclient==10.5.0")` returns the directory of a virtual environment with just that
package. It is created once and kept in a cache; another version gets another environment. `MICRONOVA_TEST_PEERS` may
name a directory with prepared environments (`$MICRONOVA_TEST_PEERS/osc`).
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
    """Return the environment with these requirements; create it if it is not in the cache."""
    given = os.environ.get("MICRONOVA_TEST_PEERS")
    if given and (ready := Path(given) / name / "bin" / "python").exists():
        return ready.parent.parent
    wanted = "\n".join((sys.version, *sorted(requirements)))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "micronova-tests"
    directory = cache / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{name}.lock"):
        if not (directory / "complete").exists():
            _install(directory, requirements)
    return directory


def _install(directory: Path, requirements: tuple[str, ...]) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # an earlier run may have been stopped half-way
    _run(sys.executable, "-m", "venv", str(directory))
    _run(str(directory / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *requirements)
    (directory / "complete").touch()


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout.decode(errors='replace')}")


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock between processes: tests run in parallel."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
