"""Runs the command-line programs of clients for the tests that start them, without the cost of their start.

The interpreter of the clients' environment runs it: it loads the clients once, and a fork of it runs each command with
the caller's descriptors, environment and directory. `program.py` is what the tests start in the place of a client.
"""

import importlib
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import ModuleType

PROGRAMS = {"openstack": "openstackclient.shell", "nova": "novaclient.shell", "glance": "glanceclient.shell"}


def main(path: str) -> None:
    """Serve until the process is ended."""
    modules = {name: importlib.import_module(module) for name, module in PROGRAMS.items()}
    importlib.import_module("openstack.connection")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _serve(connection, modules)
            connection.close()


def _serve(connection: socket.socket, modules: Mapping[str, ModuleType]) -> None:
    """Be the program; the process ends with it."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    call = json.loads(data)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(call["environment"])
    os.chdir(call["directory"])
    sys.argv = call["arguments"]
    main = modules[call["program"]].main
    try:
        # The default of a parameter holds what this process was started with.
        code = main(sys.argv[1:]) if inspect.signature(main).parameters else main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(bytes([int(code or 0) & 255]))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
