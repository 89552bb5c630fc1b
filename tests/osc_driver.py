"""Runs the real `openstack` command many times without its start, which costs more than most commands do.

It is run by the interpreter of the client's own environment: it loads the client once, and a fork of it runs each
command, so that no command sees what another one left in memory. Each line of input is the arguments of one call as
a JSON list; each line of output is its exit code and what it wrote.
"""

import contextlib
import io
import json
import os
import pty
import sys
import tempfile
from collections.abc import Iterator

import openstack.connection  # type: ignore[import-not-found]  # noqa: F401
from openstackclient import shell  # type: ignore[import-not-found]


def run(arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, terminal() as user:
        child = os.fork()
        if child == 0:
            os.dup2(user, 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _end(arguments)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "out": out.read(), "err": err.read()}


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """Open a terminal whose user answers every question with the end of the input."""
    master, slave = pty.openpty()
    os.write(master, b"\x04")
    try:
        yield slave
    finally:
        os.close(slave)
        os.close(master)


def _end(arguments: list[str]) -> None:
    """Be the command, as its own entry point would; the process ends with it."""
    try:
        code = shell.main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    shell.main(["help", "server", "list"])  # asks no service, and loads every plug-in
for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)
