"""Trunks: a guest has further ports in VLANs of its tap.

A veth pair stands for the tap of a subport: `tapSUBPORT` is on the bridge of the subport's network, where the firewall
guards it like any other tap, and `vlpSUBPORT` is the end at the trunk. Two small programs (eBPF, classifiers of tc)
move frames: one at the guest's tap removes the tag of a known VLAN and sends the frame out of `vlpSUBPORT`; one at
`vlpSUBPORT` adds the tag and sends the frame out of the tap. Frames of other VLANs stay frames of the parent port.
VLAN devices of the kernel would do the same, but not every kernel has them.
"""

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Sequence

from micronova.privileged import verbs as v
from micronova.privileged.devices import link_of
from micronova.privileged.kernel import Failed, inside, run, sysctl
from micronova.privileged.names import trunk_end_name

ALIAS = "trunk"  # of a tap that has programs
PREFERENCE = 1  # of the programs; those that limit bandwidth come later

# Numbers of the kernel's interface.
_BPF_CALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_PROG_LOAD, _SCHED_CLS = 5, 3
_VLAN_PUSH, _VLAN_POP, _REDIRECT = 18, 19, 23  # helper functions
_VLAN_PRESENT, _VLAN_TCI = 20, 24  # offsets in struct __sk_buff
_NEXT_FILTER, _DROP = -1, 2  # results of a program
_MOVE, _SET, _LOAD_WORD, _AND, _IF_EQUAL, _UNLESS_EQUAL, _GOTO, _CALL, _EXIT = (
    *(0xBF, 0xB7, 0x61, 0x57, 0x15, 0x55, 0x05, 0x85, 0x95),
)
_NEW_FILTER, _DELETE_FILTER = 44, 45  # RTM_NEWTFILTER, RTM_DELTFILTER
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_INGRESS = 0xFFFF0000
_ALL_PROTOCOLS = socket.htons(3)
_KIND, _OPTIONS, _FD, _NAME, _FLAGS = 1, 2, 6, 7, 8
_ANSWER = struct.Struct("=IHHIIi")  # header, and the error

_libc = ctypes.CDLL(None, use_errno=True)


def ensure_trunk(verb: v.EnsureTrunk, namespace: str) -> bool:
    """Make the veth pairs of a trunk's subports, and the programs that move their frames; return False without tap."""
    with inside(namespace):
        tap = link_of(verb.tap)
        if tap is None:
            return False
        ends = {each.vlan: _ensure_pair(each) for each in verb.subports}
        if not ends:
            _remove_program(tap["ifindex"])
            run(["ip", "link", "set", verb.tap, "alias", ""])
            return True
        run(["ip", "link", "set", verb.tap, "alias", ALIAS])
        for vlan, end in ends.items():
            _attach(end, push_program(vlan, tap["ifindex"]))
        run(["tc", "qdisc", "add", "dev", verb.tap, "ingress"], quiet=True)
        _attach(tap["ifindex"], pop_program(sorted(ends.items())))
    return True


def _ensure_pair(subport: v.Subport) -> int:
    """Return the index of the end at the trunk."""
    end = trunk_end_name(subport.tap)
    link = link_of(end)
    if link is None:
        if link_of(subport.tap) is not None:
            raise Failed(f"{subport.tap} is the tap of a guest, and cannot be a subport.")
        run(["ip", "link", "add", subport.tap, "type", "veth", "peer", "name", end])
        link = link_of(end)
        if link is None:
            raise Failed(f"{end} was not made.")
    if link.get("mtu") != subport.mtu or "UP" not in link.get("flags", ()):
        sysctl(f"ipv6/conf/{end}/disable_ipv6", "1")
        run(["ip", "link", "set", end, "mtu", str(subport.mtu), "up"])
    run(["tc", "qdisc", "add", "dev", end, "ingress"], quiet=True)
    return int(link["ifindex"])


# --- programs ---


def pop_program(ends: Sequence[tuple[int, int]]) -> bytes:
    """Return the program at a guest's tap; `ends` are VLANs and the indices of the devices that get their frames."""
    table = b""
    for number, (vlan, end) in enumerate(ends):
        following = 3 * (len(ends) - 1 - number)
        table += _code(_UNLESS_EQUAL, 7, offset=2, value=vlan) + _code(_SET, 8, value=end)
        table += _code(_GOTO, offset=following + 2)
    return b"".join(
        [
            _code(_MOVE, 6, 1),  # the first argument is the packet
            _code(_LOAD_WORD, 2, 6, _VLAN_PRESENT),
            _code(_LOAD_WORD, 7, 6, _VLAN_TCI),
            _code(_AND, 7, value=0xFFF),
            _code(_IF_EQUAL, 2, offset=len(table) // 8, value=0),
            table,
            _result(_NEXT_FILTER),
            _code(_MOVE, 1, 6),
            _code(_CALL, value=_VLAN_POP),
            _code(_IF_EQUAL, 0, offset=2, value=0),
            _result(_DROP),
            _code(_MOVE, 1, 8),
            _redirect(),
        ]
    )


def push_program(vlan: int, tap: int) -> bytes:
    """Return the program at the end of a subport's pair; `tap` is the index of the guest's tap."""
    return b"".join(
        [
            _code(_SET, 2, value=socket.htons(0x8100)),
            _code(_SET, 3, value=vlan),
            _code(_CALL, value=_VLAN_PUSH),
            _code(_IF_EQUAL, 0, offset=2, value=0),
            _result(_DROP),
            _code(_SET, 1, value=tap),
            _redirect(),
        ]
    )


def _result(value: int) -> bytes:
    return _code(_SET, 0, value=value) + _code(_EXIT)


def _redirect() -> bytes:
    """Send the packet out of the device whose index is in register 1."""
    return _code(_SET, 2, value=0) + _code(_CALL, value=_REDIRECT) + _code(_EXIT)


def _code(operation: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    registers = target | source << 4 if _little() else target << 4 | source
    return struct.pack("=BBhi", operation, registers, offset, value)


def _little() -> bool:
    return socket.htons(1) != 1


def load(program: bytes) -> int:
    """Load a program into the kernel and return its descriptor."""
    number = _BPF_CALLS.get(platform.machine())
    if number is None:
        raise Failed(f"Trunks are not supported on machines of the architecture {platform.machine()}.")
    code, licence = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"none")
    # No log is asked for: the kernel refuses a valid program if its log does not fit.
    request = struct.pack(
        "=IIQQ", _SCHED_CLS, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence)
    ).ljust(128, b"\0")
    descriptor = int(_libc.syscall(number, _PROG_LOAD, ctypes.c_char_p(request), len(request)))
    if descriptor < 0:
        reason = os.strerror(ctypes.get_errno())
        raise Failed(f"A trunk needs a kernel that loads eBPF programs: {reason}.")
    return descriptor


# --- classifiers, by netlink ---


def _attach(index: int, program: bytes) -> None:
    """Let a program decide about the frames that a device receives; it replaces the former one."""
    descriptor = load(program)
    try:
        options = _attribute(_FD, struct.pack("=I", descriptor)) + _attribute(_NAME, b"micronova\0")
        options += _attribute(_FLAGS, struct.pack("=I", 1))  # its result decides
        error = _filter(_NEW_FILTER, index, _attribute(_KIND, b"bpf\0") + _attribute(_OPTIONS, options), _CREATE)
    finally:
        os.close(descriptor)
    if error:
        raise Failed(f"A trunk needs the kernel's classifier cls_bpf: {os.strerror(error)}.")


def _remove_program(index: int) -> None:
    _filter(_DELETE_FILTER, index, _attribute(_KIND, b"bpf\0"))  # an error says that there is none


def _filter(kind: int, index: int, attributes: bytes, flags: int = 0) -> int:
    """Send a request about the program of a device; return the number of the error, or 0."""
    about = struct.pack("=BxHiIII", 0, 0, index, 1, _INGRESS, PREFERENCE << 16 | _ALL_PROTOCOLS)
    body = about + attributes
    header = struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _ACK | flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(5)
        sock.bind((0, 0))
        sock.send(header + body)
        *_, error = _ANSWER.unpack_from(sock.recv(1 << 16))
    return int(-error)


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)
