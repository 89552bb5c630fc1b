"""A compute host with a private libvirtd in its own network namespace, on which tests start and stop agents."""

import asyncio
import base64
import hashlib
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

from micronova.objects.clock import SystemClock
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF
from micronova.objects.orders import InstanceSpec
from micronova.objects.volume import AttachedVolume
from micronova.virt.driver import GuestPlan, Lifecycle
from micronova.virt.libvirt.driver import LibvirtDriver
from micronova.virt.libvirt.setup import create, teardown
from micronova.virt.loader import DriverSetup
from tests.e2e.guests import whole_lines

TIMEOUT = 90.0
"""Seconds that a guest may take for anything on a busy machine."""
FOLDERS = ("instances", "sockets", "console", "log/qemu", "qemu/save", "qemu/nvram", "etc/qemu", "run/qemu")
FLAVOR = Flavor(id="1", name="tiny", ram=128, vcpus=1, disk=1)
MARK = "user-data-was-here"
USER_DATA = base64.b64encode(f"#!/bin/sh\necho {MARK} $(hostname) >/dev/console\n".encode()).decode()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


class ImageServer:
    """Serves one image, as the image service does for a ticket."""

    def __init__(self, file: Path) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(file.parent)))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        data = file.read_bytes()
        self.ticket = f"http://127.0.0.1:{self._server.server_address[1]}/{file.name}"
        self.image = ImageMeta(
            id=str(uuid4()), disk_format="qcow2", size=len(data), checksum=hashlib.md5(data).hexdigest()
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Events:
    """Records the events that a driver reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Lifecycle]] = []
        self.lost: list[str] = []
        self._new = asyncio.Event()

    def lifecycle(self, uuid: str, event: Lifecycle) -> None:
        self.seen.append((uuid, event))
        self._new.set()

    def connection_failed(self, message: str) -> None:
        self.lost.append(message)

    def of(self, uuid: str) -> list[Lifecycle]:
        return [event for seen, event in self.seen if seen == uuid]

    async def wait(self, uuid: str, event: Lifecycle, count: int = 1) -> None:
        """Return when the guest has had so many such events."""
        async with asyncio.timeout(TIMEOUT):
            while self.of(uuid).count(event) < count:
                self._new.clear()
                await self._new.wait()


class Host:
    """The host: its directory, its libvirtd, its namespace, and a bridge."""

    def __init__(self, state_dir: Path, namespace: str, images: ImageServer) -> None:
        self.state_dir = state_dir
        self.namespace = namespace
        self.images = images
        self.bridge = "brqe2e"

    def ip(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(["ip", "-n", self.namespace, *command], check=check, capture_output=True, text=True)
        return done.stdout

    def start(self) -> None:
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        self.ip("link", "set", "lo", "up")
        self.ip("link", "add", self.bridge, "type", "bridge")
        self.ip("link", "set", self.bridge, "up")

    def stop(self) -> None:
        teardown(self.state_dir)
        subprocess.run(["ip", "netns", "delete", self.namespace], check=True)

    def setup(self, cloud: str = "cloud-1", **options: Any) -> DriverSetup:
        return DriverSetup(
            host="host-1",
            cloud_id=cloud,
            clock=SystemClock(),
            random=Random(1),
            state_dir=self.state_dir,
            options={"network_namespace": self.namespace, **options},
        )

    @asynccontextmanager
    async def agent(
        self,
        cloud: str = "cloud-1",
        *,
        mdev_types: tuple[str, ...] = (),
        volume_access: Path | None = None,
        **options: Any,
    ) -> AsyncIterator[tuple[LibvirtDriver, Events]]:
        """Run an agent's driver."""
        setup = replace(self.setup(cloud, **options), mdev_types=mdev_types, volume_access=volume_access)
        (driver,) = create(setup).values()
        events = Events()
        await driver.init_host(events)
        try:
            yield driver, events
        finally:
            await driver.close()

    def plan(
        self,
        *,
        epoch: int = 1,
        vifs: tuple[VIF, ...] = (),
        plugged: Callable[[], Awaitable[None]] | None = None,
        volumes: tuple[AttachedVolume, ...] = (),
        **changes: Any,
    ) -> GuestPlan:
        known: dict[str, Any] = {
            "uuid": str(uuid4()),
            "project_id": "p",
            "user_id": "u",
            "name": "guest",
            "hostname": "guest-1",
            "flavor": FLAVOR,
            "image": self.images.image,
        }

        async def nothing() -> None: ...

        return GuestPlan(
            instance=InstanceSpec(**{**known, **changes}),
            epoch=epoch,
            plugged=plugged or nothing,
            network_info=vifs,
            volumes=volumes,
            image_url=self.images.ticket,
            admin_password="s3cret",
        )

    @property
    def root(self) -> Path:
        return self.state_dir / "libvirt"

    def taps(self) -> list[str]:
        return [line.split(":")[1].strip() for line in self.ip("-o", "link").splitlines() if ": tap" in line]

    def qemus(self, uuid: str = "") -> list[int]:
        """Return the processes of all guests of this host, or of one guest."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                    wanted = b"qemu-system" in command and uuid.encode() in command
                    if wanted and _same_namespace(int(entry.name), self.namespace):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def leftovers(self) -> list[str]:
        """Return what is left of guests: processes, devices, files, definitions."""
        found = [f"process {pid}" for pid in self.qemus()]
        found += [f"device {tap}" for tap in self.taps()]
        for folder in FOLDERS:
            base = self.root / folder
            if base.is_dir():
                found += [
                    str(path)
                    for path in base.rglob("*")
                    if not path.is_dir() and path.name not in ("autostarted", "driver.pid")
                ]
        found += [str(path) for path in (self.root / "base").glob(".*")]
        return found


def _same_namespace(pid: int, namespace: str) -> bool:
    return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{namespace}").st_ino


async def console(driver: LibvirtDriver, uuid: str, text: str, count: int = 1) -> str:
    """Return the console log once the text is in it so many times."""
    seen = ""
    try:
        async with asyncio.timeout(TIMEOUT):
            while True:
                seen = whole_lines(await driver.get_console_output(uuid, None))
                if seen.count(text) >= count:
                    return seen
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"{text!r} did not appear {count} times:\n{seen[-2000:]}") from None
