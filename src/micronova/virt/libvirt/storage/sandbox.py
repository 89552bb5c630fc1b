"""A program that runs another one confined to the files it is given, without a network, and without new privileges.

    sandbox.py [--read PATH]… [--write PATH]… -- PROGRAM ARGUMENT…

The programs that read users' images (qemu-img above all) are large, and what they read is hostile. A program that is
taken over here is confined by the kernel, without privileges of ours:

- Landlock: it opens the given files, and the code of the system, read-only. It creates, removes and renames nothing.
- seccomp: it makes no socket, no ring of io_uring and no process, changes no owner, mode, attribute or length by path
  (Landlock does not govern these), signals and schedules no other process, and reads the memory of none.

It may have threads. As it has no children, whoever kills it has killed everything.

What the kernel lacks ends this process with an error: nothing runs with less. Limits of memory, CPU time, threads and
file size are set by the caller.

It imports as little as possible, because it is started for every call.
"""

import ctypes
import os
import struct
import sys

FAILED = 126
"""The exit status if the sandbox cannot be made."""
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/mke2fs.conf", "/etc/localtime", "/dev/urandom")
NOWHERE = "/dev/null"
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2

# Landlock: linux/landlock.h. The system calls have the same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _DEVICE = 1 << 14, 1 << 15
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files that a version of Landlock knows."""
_TCP = 3  # version 4: bind and connect
_SCOPES = 3  # version 6: abstract sockets, signals

# seccomp: linux/filter.h, linux/seccomp.h, linux/audit.h.
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_FIRST, _SECOND = 16, 24  # where the arguments of a call are; their lower halves, which is what these calls read
_X32 = 0x40000000
_NEW_NAMESPACES, _THREAD = 0x7E020080, 0x00010000
# System calls by name: the numbers on x86_64 and on aarch64, which has no old ones. Both share those since 2019.
_REFUSED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "io_uring_setup": (425, 425), "truncate": (76, 45),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "fork": (57, None), "vfork": (58, None),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "chroot": (161, 51), "open_by_handle_at": (304, 265),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_PRLIMIT, _TGKILL, _FCNTL, _IOCTL, _PRCTL = (302, 261), (234, 131), (72, 25), (16, 29), (157, 167)
_SIGNAL_OWNERS = (8, 10, 15)  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX
_SOCKET_OWNERS = (0x8901, 0x8902)  # ioctl: FIOSETOWN, SIOCSPGRP
_SHARE_CORE = 62  # prctl: PR_SCHED_CORE
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""What seccomp calls the machine, and the column of its numbers."""


class Missing(Exception):
    """The sandbox cannot be made."""


def main(arguments: list[str]) -> int:
    """Confine this process and run the program; return only if that fails."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    rights: dict[str, list[str]] = {"--read": [], "--write": []}
    for option, path in zip(options[::2], options[1::2], strict=True):
        rights[option].append(path)
    try:
        confine(os.path.realpath(command[0]), rights["--read"], rights["--write"])
        os.execv(command[0], command)  # noqa: S606
    except Missing as error:
        os.write(2, f"sandbox: {error}\n".encode())
    except OSError as error:
        os.write(2, f"sandbox: {error.filename or command[0]}: {error.strerror}\n".encode())
    return FAILED


def obstacle() -> str | None:
    """Return why programs cannot be confined on this machine; None if they can."""
    try:
        _landlock_version()
        _numbers()
    except Missing as error:
        return str(error)
    return None


def confine(program: str, readable: list[str], writable: list[str]) -> None:
    """Confine this process and its children to a program and to files, for good."""
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(library, program, readable, writable)
    _restrict_calls(library)


def _landlock_version() -> int:
    library = ctypes.CDLL(None, use_errno=True)
    version: int = library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    if version < 1:
        raise Missing(
            "this kernel has no Landlock, which confines programs that read images: use Linux 5.13 or newer, with "
            "landlock in its boot parameter lsm="
        )
    return version


def _restrict_files(library: ctypes.CDLL, program: str, readable: list[str], writable: list[str]) -> None:
    version = _landlock_version()
    known = _FILE_RIGHTS[max(each for each in _FILE_RIGHTS if each <= version)]
    attributes = struct.pack("<QQQ", known, _TCP, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = library.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(rules, "Landlock")

    def allow(path: str, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
                rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE
            rule = struct.pack("<Qi", rights & known, descriptor)
            _check(library.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0), path)
        finally:
            os.close(descriptor)

    for path in (*SYSTEM, program):
        allow(path, _EXECUTE | _READ_FILE | _READ_DIR)
    for path in (*SYSTEM_FILES, *readable):
        allow(path, _READ_FILE | _READ_DIR)
    for path in (NOWHERE, *writable):
        allow(path, _READ_FILE | _WRITE_FILE | _TRUNCATE)
    _check(library.syscall(_RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def _numbers() -> tuple[int, int]:
    machine = os.uname().machine
    if machine not in _MACHINES or sys.byteorder != "little":
        raise Missing(f"system calls are confined on {' and '.join(_MACHINES)} only, and this machine is {machine}")
    return _MACHINES[machine]


def _restrict_calls(library: ctypes.CDLL) -> None:
    architecture, column = _numbers()
    steps: list[tuple[int, int, int, int]] = []

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> None:
        steps.append((code, then, otherwise, value))

    step(_LOAD, 4)  # the architecture: another one has other numbers
    step(_EQUAL, architecture, 1)
    step(_RETURN, _KILL)
    step(_LOAD, 0)  # the number
    step(_AT_LEAST, _X32, 0, 1)
    step(_RETURN, _KILL)
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            step(_EQUAL, number, 0, 1)
            step(_RETURN, _ERROR | _EPERM)
    # The flags of clone3 cannot be seen here: without it, the C library uses clone.
    step(_EQUAL, _CLONE3[column], 0, 1)
    step(_RETURN, _ERROR | _ENOSYS)
    # Threads, but no processes and no namespaces.
    step(_EQUAL, _CLONE[column], 0, 5)
    step(_LOAD, _FIRST)
    step(_BITS, _NEW_NAMESPACES, 1)
    step(_BITS, _THREAD, 1)
    step(_RETURN, _ERROR | _EPERM)
    step(_RETURN, _ALLOW)
    # Its own limits and signals to itself, as abort() sends them. Its id stays the same when the program is run.
    for call, own in ((_PRLIMIT, 0), (_TGKILL, os.getpid())):
        step(_EQUAL, call[column], 0, 4)
        step(_LOAD, _FIRST)
        step(_EQUAL, own, 1)
        step(_RETURN, _ERROR | _EPERM)
        step(_RETURN, _ALLOW)
    # A file, a socket or a core of the processor must not reach another process for it.
    for call, where, refused in (
        (_FCNTL, _SECOND, _SIGNAL_OWNERS),
        (_IOCTL, _SECOND, _SOCKET_OWNERS),
        (_PRCTL, _FIRST, (_SHARE_CORE,)),
    ):
        step(_EQUAL, call[column], 0, 2 + 2 * len(refused))
        step(_LOAD, where)
        for value in refused:
            step(_EQUAL, value, 0, 1)
            step(_RETURN, _ERROR | _EPERM)
        step(_RETURN, _ALLOW)
    step(_RETURN, _ALLOW)
    code = b"".join(struct.pack("<HBBI", *each) for each in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(steps), ctypes.addressof(buffer))
    _check(library.prctl(_SET_SECCOMP, _FILTER, program, 0, 0), "seccomp")


def _check(result: int, what: str) -> None:
    if result < 0:
        raise Missing(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
