"""Starts a daemon and takes care of the processes that it leaves behind. Runs as a program of its own.

A daemon lets go of its children: they become children of the machine's first process, which should bury them. In a
container, or on a small system, that process may take seconds to do so, or never do it, and libvirt waits for each
guest to be really gone. So this one adopts them instead. It ends when the last of them has.

Kept free of imports: it stays in memory for as long as there are guests.
"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Start the command; return how it ended, once it has, and stay in the background for what it started."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        told = os.read(reading, 16)
        return int(told) if told else 1
    os.close(reading)
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    starter = os.fork()
    if not starter:
        os.close(writing)
        try:
            os.execvp(command[0], command)  # noqa: S606
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    _, status = os.waitpid(starter, 0)
    # Whoever started us reads our output until everybody has closed it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.write(writing, str(os.waitstatus_to_exitcode(status) & 0xFF).encode())
    os.close(writing)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)
        except InterruptedError:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
