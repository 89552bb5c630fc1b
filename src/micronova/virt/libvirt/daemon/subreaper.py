"""A program that starts a daemon and reaps the processes that the daemon orphans (a child subreaper).

A daemon's orphans become children of the machine's init process, which should reap them. In a container, or on a small
system, init may take seconds to do so, or never do it, and libvirt waits until each guest's process is gone. So this
process adopts them instead. It ends when the last of them has ended.

It imports as little as possible, because it stays in memory as long as there are guests.
"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command and return its exit status; a child stays in the background to reap what it started."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        status_text = os.read(reading, 16)
        return int(status_text) if status_text else 1
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
    os.chdir("/")  # the command's directory may be removed while this process waits
    _, status = os.waitpid(starter, 0)
    # The caller reads our output until every process has closed it.
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
