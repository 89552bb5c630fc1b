"""Taps that are taken in from outside: only those that a guest of this cloud holds, in namespaces made for the test."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from micronova.privileged import verbs as v
from micronova.privileged.helper import Helper

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(os.geteuid() != 0, reason="devices are root's")]

TAP, MAC = "tap11111111-11", "fa:16:3e:00:00:01"
GUEST = "11111111-1111-4111-8111-111111111111"
# Holds a tap as QEMU does; its other arguments are there to be seen.
HOLDER = """
import fcntl, struct, subprocess, sys
name, address = sys.argv[1:3]
tun = open("/dev/net/tun", "r+b", buffering=0)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))
subprocess.run(["ip", "link", "set", "dev", name, "address", address, "up"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass
class Outside:
    """What plays the machine's namespace, beside a cloud's; everything in it is done in one thread."""

    helper: Helper
    guests: Path

    @contextmanager
    def holder(
        self, tap: str = TAP, address: str = "fe:16:3e:00:00:01", uuid: str = GUEST, disk: str = ""
    ) -> Iterator[None]:
        """Have a process that holds a tap, and looks like a guest's."""
        disk = disk or f'{{"filename":"{self.guests}/instances/{uuid}/disk"}}'
        command = [sys.executable, "-c", HOLDER, tap, address, "-uuid", uuid, "-blockdev", disk]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
            process.stdin.close()

    def adopt(self, guest: str = GUEST, mac: str = MAC) -> v.Reply:
        return self.helper.do(v.AdoptTap(tap=TAP, mac=mac, guest=guest))[0]

    def inside(self) -> str:
        return ip("-n", self.helper.prefix, "-o", "link")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that may leave the machine's namespace without anybody else."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ctypes.CDLL(None, use_errno=True).unshare, 0x40000000).result() == 0  # CLONE_NEWNET
        yield pool


@pytest.fixture
def outside(thread: ThreadPoolExecutor, tmp_path: Path) -> Iterator[Outside]:
    prefix = f"mn-{uuid4().hex[:8]}"
    ip("netns", "add", prefix)
    try:
        yield Outside(Helper(prefix, tmp_path, tmp_path / "guests"), tmp_path / "guests")
    finally:
        ip("netns", "delete", prefix)


def test_the_tap_of_a_guest_of_this_cloud_is_taken_in_and_stays_the_guests(
    outside: Outside, thread: ThreadPoolExecutor
) -> None:
    def act() -> None:
        assert outside.adopt() == v.Reply(present=False)
        with outside.holder():
            found = outside.helper.inventory()
            assert (found.adopts, found.outside, found.links) == (True, (TAP,), {})
            assert outside.adopt() == v.Reply(present=True)
            found = outside.helper.inventory()
            assert found.outside == () and TAP in found.links
        assert TAP not in outside.inside(), "it goes with its guest"

    thread.submit(act).result()


def test_nothing_else_is_touched(outside: Outside, thread: ThreadPoolExecutor) -> None:
    def act() -> None:
        other = "22222222-2222-4222-8222-222222222222"
        with outside.holder(uuid=other):
            assert not outside.adopt().present, "it is held by another guest"
        with outside.holder(disk=f'{{"filename":"/srv/instances/{GUEST}/disk"}}'):
            assert not outside.adopt().present, "a guest of another cloud holds it"
        with outside.holder(tap="tap22222222-22"):
            assert not outside.adopt().present, "the guest holds another tap"
        with outside.holder():
            assert outside.adopt(mac="fa:16:3e:00:00:02").error.startswith("refused:")
            ip("link", "add", "bridge", "type", "bridge")
            ip("link", "set", TAP, "master", "bridge")
            assert "bridge" in outside.adopt().error, "somebody else has wired it"
            ip("link", "delete", "bridge")
            assert TAP not in outside.inside()
            ip("-n", outside.helper.prefix, "tuntap", "add", "dev", TAP, "mode", "tap")
            assert "already" in outside.adopt().error
        ip("tuntap", "add", "dev", TAP, "mode", "tap")
        assert outside.helper.inventory().outside == (), "it belongs to nobody who runs"
        assert not outside.adopt().present
        assert ip("-o", "link", "show", "dev", TAP)

    thread.submit(act).result()


def test_a_cloud_whose_taps_are_its_own_takes_none_in(tmp_path: Path) -> None:
    helper = Helper("mn-1a2b3c4d", tmp_path)
    for verb in (v.AdoptTap(tap=TAP, mac=MAC, guest=GUEST), v.WatchLinks(outside=True)):
        assert helper.do(verb)[0].error.startswith("refused:")
    assert not helper.inventory().adopts
