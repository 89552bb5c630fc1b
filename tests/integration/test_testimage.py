"""The test image, built from Debian packages and booted by QEMU alone: it behaves as a cloud's guest should."""

import asyncio
import contextlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from micronova.imageformat.inspector import check
from micronova.testimage.builder import available, build
from tests.command import ok
from tests.services.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT = 120.0  # a busy machine boots twenty times slower than an idle one
UUID = "d8e02d56-2648-49a3-bf97-6be8f1204f38"
PASSWORD = 'p"ss\\nwörd $1 %s /'


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    script = Path(__file__).parents[2] / "scripts" / "ensure-packages"
    subprocess.run([script, "qemu-system-x86", "genisoimage", "openssh-client"], check=True, timeout=280)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def image(cache: Path, tools: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert available() is None
    return build(tmp_path_factory.mktemp("image") / "test.qcow2", cache)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ssh") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


class Guest:
    """A guest that runs: what it says on its console, SSH into it, and QEMU's monitor."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, directory: Path) -> None:
        self.process = process
        self.console = ""
        self._port = port
        self._directory = directory
        self._monitor: Any = None

    async def says(self, text: str) -> str:
        """Wait until a line with this text is on the console; return the line."""
        assert self.process.stdout is not None
        seen = 0
        async with asyncio.timeout(TIMEOUT):
            while True:
                lines = self.console.splitlines(keepends=True)
                for line in lines[seen:]:
                    if text in line and line.endswith("\n"):
                        return line.strip()
                part = await self.process.stdout.read(4096)
                assert part, f"the guest ended without saying {text!r}:\n{self.console}"
                self.console += part.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        """Type on the serial console."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())

    async def ssh(self, command: str, *options: str, askpass: Path | None = None) -> str:
        """Run a command in the guest as root."""
        environment = {"SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"} if askpass else {}
        done = await asyncio.create_subprocess_exec(
            *("ssh", "-F", "none", "-p", str(self._port), "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"),
            *("-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=60", *options, "root@127.0.0.1", command),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", **environment},
        )  # fmt: skip
        async with asyncio.timeout(TIMEOUT):
            out, _ = await done.communicate()
        assert done.returncode == 0, out.decode()
        return out.decode()

    async def monitor(self, command: str, **arguments: Any) -> None:
        """Tell QEMU something."""
        if self._monitor is None:
            self._monitor = await asyncio.open_unix_connection(self._directory / "monitor")
            await self.monitor("qmp_capabilities")
        reader, writer = self._monitor
        writer.write(json.dumps({"execute": command, "arguments": arguments}).encode())
        while "return" not in (answer := json.loads(await reader.readline())):
            assert "error" not in answer, answer

    async def power_button(self) -> None:
        """Press it and see the machine end."""
        await self.monitor("system_powerdown")
        await self.says("MICRONOVA-GUEST-SHUTDOWN")
        async with asyncio.timeout(TIMEOUT):
            assert await self.process.wait() == 0


@contextlib.asynccontextmanager
async def boot(image: Path, directory: Path, network: str, *options: str) -> AsyncIterator[Guest]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *("qemu-system-x86_64", "-accel", "tcg", "-M", "pc", "-cpu", "qemu64", "-m", "256"),
        *("-display", "none", "-nodefaults", "-serial", "stdio", "-no-reboot"),
        *("-qmp", f"unix:{directory}/monitor,server=on,wait=off"),
        *("-drive", f"file={image},format=qcow2,if=virtio,snapshot=on"),
        *("-netdev", f"user,id=n0,hostfwd=tcp:127.0.0.1:{port}-:22{network}"),
        *("-device", "virtio-net-pci,netdev=n0,romfile=,mac=52:54:00:00:00:01", *options),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=1 << 20,
    )  # fmt: skip
    try:
        yield Guest(process, port, directory)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def meta_data(key: Path, **more: Any) -> bytes:
    public = key.with_suffix(".pub").read_text()
    document = {
        "uuid": UUID, "name": "guest one", "hostname": "guest-one.novalocal", "launch_index": 0,
        "public_keys": {"my key": public}, "random_seed": "c2VlZA==", "meta": {"a": 'b"]}'}, "empty": [], "none": None,
        **more,
    }  # fmt: skip
    return json.dumps(document).encode()


def config_drive(directory: Path, files: dict[str, bytes], label: str = "config-2") -> Path:
    root = directory / "drive"
    for name, content in files.items():
        path = root / "openstack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    drive = directory / "drive.iso"
    subprocess.run(["genisoimage", "-quiet", "-J", "-r", "-V", label, "-o", drive, root], check=True)
    return drive


def test_it_is_small_and_passes_our_own_inspection(image: Path) -> None:
    info = check(image, "qcow2", max_virtual_size=64 << 20)
    assert image.stat().st_size < 20 << 20
    assert info.virtual_size == 32 << 20


def test_it_is_built_once(image: Path, cache: Path, tmp_path: Path) -> None:
    """The command takes it from the cache, where nothing else is left."""
    [kept] = cache.iterdir()
    before = kept.stat().st_mtime_ns
    assert "qcow2" in ok("image", "build-test", "--output", tmp_path / "a" / "copy", "--cache", cache)
    assert kept.stat().st_mtime_ns == before
    assert (tmp_path / "a" / "copy").read_bytes() == image.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["copy"]
    assert list(cache.iterdir()) == [kept]


async def test_a_guest_with_a_config_drive(image: Path, key: Path, tmp_path: Path) -> None:
    network_data = {
        "links": [
            {"id": "tap1", "type": "bridge", "ethernet_mac_address": "52:54:00:00:00:01", "mtu": None},
            {"id": "tap2", "type": "bridge", "ethernet_mac_address": "52:54:00:00:00:02", "mtu": 1400},
        ],
        "networks": [
            {"id": "network0", "type": "ipv4_dhcp", "link": "tap1"},
            {
                "id": "network1", "type": "ipv4", "link": "tap2", "ip_address": "192.0.2.7",
                "netmask": "255.255.255.192", "routes": [
                    {"network": "198.51.100.0", "netmask": "255.255.255.0", "gateway": "192.0.2.1"},
                ],
            },
            {"id": "network2", "type": "ipv6", "link": "tap2", "ip_address": "2001:db8::7/64", "routes": []},
        ],
        "services": [{"type": "dns", "address": "192.0.2.53"}],
    }  # fmt: skip
    files = {
        "latest/meta_data.json": meta_data(
            key, files=[{"path": "/etc/injected/file", "content_path": "/content/0000"}]
        ),
        "latest/network_data.json": json.dumps(network_data, indent=2).encode(),
        "latest/user_data": b"#!/bin/sh\necho MARK-$(cat /etc/injected/file)-$(hostname)\nexit 3\n",
        "content/0000": b"injected",
    }
    second = ("-netdev", "user,id=n1,restrict=on", "-device", "virtio-net-pci,netdev=n1,romfile=,mac=52:54:00:00:00:02")
    drive = ("-drive", f"file={config_drive(tmp_path, files)},format=raw,if=ide,media=cdrom,readonly=on")
    async with boot(image, tmp_path, "", *drive, *second) as guest:
        ready = await guest.says("MICRONOVA-GUEST-READY")
        assert ready.startswith("MICRONOVA-GUEST-READY hostname=guest-one ip=10.0.2.15 ")
        assert f"source=config-drive uuid={UUID}" in ready
        assert await guest.says("MARK-") == "MARK-injected-guest-one"
        assert await guest.says("USER-DATA") == "MICRONOVA-GUEST-USER-DATA exit=3"

        async def ssh(command: str) -> str:
            return await guest.ssh(command, "-i", str(key), "-o", "BatchMode=yes")

        assert await ssh("hostname") == "guest-one\n"
        assert "mtu 1400" in await ssh("ip link show eth1")
        assert "inet 192.0.2.7/26" in await ssh("ip address show eth1")
        assert "inet6 2001:db8::7/64" in await ssh("ip address show eth1")
        routes = await ssh("ip route")
        assert "198.51.100.0/24 via 192.0.2.1 dev eth1" in routes and "default via 10.0.2.2 dev eth0" in routes
        assert "nameserver 192.0.2.53" in await ssh("cat /etc/resolv.conf")
        assert (await ssh("grep ^root: /etc/shadow")).startswith("root:*:")  # no password, no login by one
        assert await ssh("wget -q -O - http://127.0.0.1/") == "guest-one\n"

        # What DHCP's option 121 says replaces the router.
        lease = "interface=eth1 ip=192.0.2.8 mask=26 router=192.0.2.9 dns=192.0.2.53"
        await ssh(f"{lease} staticroutes='169.254.169.254/32 192.0.2.1 203.0.113.0/24 192.0.2.2' /etc/guest/dhcp bound")
        routes = await ssh("ip route")
        assert "169.254.169.254 via 192.0.2.1 dev eth1" in routes and "203.0.113.0/24 via 192.0.2.2 dev eth1" in routes
        assert "192.0.2.9" not in routes
        # A lease that is renewed says what the name servers are from now on.
        renewed = lease.replace("dns=192.0.2.53", "dns='192.0.2.54 192.0.2.55'")
        await ssh(f"{lease} /etc/guest/dhcp bound; {renewed} /etc/guest/dhcp renew")
        known = await ssh("cat /etc/resolv.conf")
        assert "nameserver 192.0.2.54\nnameserver 192.0.2.55\n" in known
        await ssh("kill -USR1 $(cat /var/run/udhcpc.eth0.pid)")

        # What programs of the field (Tempest, for one) expect of a guest.
        assert await ssh("sudo sh -c 'id -u'") == "0\n"
        assert await ssh("curl -s http://127.0.0.1/") == "guest-one\n"
        assert await ssh("blkid -L config-2 -o device") == "/dev/sr0\n"
        titles, *disks = (await ssh("lsblk -lb --nodeps")).splitlines()
        at = titles.index("TYPE")
        assert {(line.split()[0], line[at:].strip()) for line in disks} == {("vda", "disk"), ("sr0", "rom")}

        await guest.monitor("netdev_add", type="user", id="n2")
        await guest.monitor("device_add", driver="virtio-net-pci", netdev="n2", id="nic2", romfile="")
        assert await guest.says("added=eth2") == "MICRONOVA-GUEST-DEVICE added=eth2 ip=10.0.2.15"
        await guest.monitor("device_del", id="nic2")
        await guest.says("removed=eth2")

        guest.type("echo $((6 * 7))-typed\n")
        assert "42-typed" in await guest.says("42-typed")
        await guest.power_button()


class Metadata(http.server.BaseHTTPRequestHandler):
    documents: dict[str, bytes]

    def do_GET(self) -> None:
        content = self.documents.get(self.path)
        self.send_response(200 if content is not None else 404)
        self.send_header("content-length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def metadata_service(**documents: bytes) -> Iterator[int]:
    served = {f"/openstack/latest/{name}": content for name, content in documents.items()}
    handler = type("Handler", (Metadata,), {"documents": served})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


RELAY = """
import os, socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def copy():
    while data := os.read(0, 65536):
        there.sendall(data)
threading.Thread(target=copy, daemon=True).start()
while data := there.recv(65536):
    os.write(1, data)
"""


async def test_a_guest_with_the_metadata_service(image: Path, key: Path, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    askpass = tmp_path / "askpass"
    askpass.write_text(f"#!{sys.executable}\nprint({PASSWORD!r})\n")
    askpass.chmod(0o700)
    documents = {
        "meta_data.json": meta_data(key, admin_pass=PASSWORD),
        "user_data": b"#cloud-config\npackages: [x]\n",
    }
    with metadata_service(**documents) as port:
        service = f"guestfwd=tcp:169.254.169.254:80-cmd:{sys.executable} {relay} {port}"
        network = f",net=169.254.0.0/16,dhcpstart=169.254.10.2,{service}"
        async with boot(image, tmp_path, network) as guest:
            ready = await guest.says("MICRONOVA-GUEST-READY")
            assert f"hostname=guest-one ip=169.254.10.2 ip6= source=metadata uuid={UUID}" in ready
            assert "skipped" in await guest.says("USER-DATA")
            by_password = ("-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password")
            assert await guest.ssh("id -u", *by_password, askpass=askpass) == "0\n"
            await guest.power_button()
