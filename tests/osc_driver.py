"""Runs the real `openstack` command many times in one interpreter, for starting it costs more than most commands do.

It is run by the interpreter of the client's own environment. Each line of input is the arguments of one call as a
JSON list; each line of output is its exit code and what it wrote.
"""

import contextlib
import io
import json
import logging
import sys

from openstackclient import shell  # type: ignore[import-not-found]


def run(arguments: list[str]) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = shell.main(arguments)
        except SystemExit as end:
            code = end.code
    logging.getLogger().handlers.clear()  # each call adds one that writes to its own stderr
    return {"code": code or 0, "out": out.getvalue(), "err": err.getvalue()}


answers = sys.stdout
for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), file=answers, flush=True)
