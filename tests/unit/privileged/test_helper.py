"""The helper's socket: who may ask, broken messages, and what it makes of checked verbs."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.objects.errors import Unavailable
from micronova.privileged import client as privileged_client
from micronova.privileged import dnsmasq, rulesets, wire
from micronova.privileged import verbs as v
from micronova.privileged.checks import Refused
from micronova.privileged.client import HelperProcess, PrivilegedClient, PrivilegedError
from micronova.privileged.helper import Helper, Listener, serve
from micronova.privileged.names import prefix_of

PREFIX = "mn-1a2b3c4d"
NETWORK = f"{PREFIX}-n-11111111-11"
MAC = "fa:16:3e:00:00:01"


def test_a_prefix_is_a_clouds() -> None:
    assert prefix_of("1a2b3c4d-0000-4000-8000-000000000000") == PREFIX
    for bad in ("", "mn-", "mn-1a2b3c4", "../x", "mn-1a2b3c4d\n", "eth0"):
        with pytest.raises(Refused):
            Helper(bad, Path("nowhere"))


def test_a_refused_verb_is_answered_and_nothing_is_done(tmp_path: Path) -> None:
    answer, passed = Helper(PREFIX, tmp_path).do(v.DeleteNamespace(namespace="mn-ffffffff"))
    assert answer.error.startswith("refused:")
    assert passed is None


def test_broken_messages_end_or_are_refused(tmp_path: Path) -> None:
    for sent, answered in (
        (struct.pack("!I", 3) + b"\xc1\xc1\xc1", True),
        (struct.pack("!I", 1 << 31), False),
        (b"\0", False),
    ):
        ours, theirs = socket.socketpair()
        worker = threading.Thread(target=serve, args=(Helper(PREFIX, tmp_path), theirs))
        worker.start()
        with ours:
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            assert (b"refused" in ours.recv(1000)) is answered
        worker.join(5)
        assert not worker.is_alive()


@pytest.mark.skipif(os.geteuid() != 0, reason="the helper is root's")
async def test_a_client_asks_a_helper_and_connects_again(tmp_path: Path) -> None:
    helper = HelperProcess(PREFIX, tmp_path / "s", directory=tmp_path / "run")
    client = PrivilegedClient(tmp_path / "s")
    await asyncio.to_thread(helper.start)
    try:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        answer = await client.call(v.Inventory())
        assert answer.found == v.Found()
        with pytest.raises(PrivilegedError, match="refused"):
            await client.call(v.EnsureNamespace(namespace="mn-00000000"))
        many = v.Group(id="11111111-0000-4000-8000-000000000001", addresses=("2001:db8::/32",) * (wire.LIMIT // 14))
        with pytest.raises(PrivilegedError, match=r"LoadFirewall: .* more than the helper accepts"):
            await client.call(v.LoadFirewall(groups=(many,)))
        await asyncio.to_thread(helper.stop)
        await asyncio.to_thread(helper.start)
        assert (await client.call(v.Inventory())).found == v.Found()
    finally:
        await client.close()
        await asyncio.to_thread(helper.stop)
    assert not (tmp_path / "s").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the helper is root's")
async def test_a_helper_that_hangs_is_noticed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = HelperProcess(PREFIX, tmp_path / "s", directory=tmp_path / "run")
    client = PrivilegedClient(tmp_path / "s")
    monkeypatch.setattr(privileged_client, "PROBE_INTERVAL", 0.0)
    await asyncio.to_thread(helper.start)
    try:
        await client.call(v.Ping())
        for _ in range(3):
            assert not helper.hangs()
        [pid] = [child.pid for child in [helper._process] if child is not None]
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        monkeypatch.setattr(privileged_client, "ANSWER_SECONDS", 0.2)
        with pytest.raises(Unavailable, match=r"did not answer Inventory within 0.2 s"):
            await asyncio.wait_for(client.call(v.Inventory()), 20)
        monkeypatch.setattr(privileged_client, "HUNG_SECONDS", 0.0)
        async with asyncio.timeout(20):
            while not helper.hangs():
                await asyncio.sleep(0)
        await asyncio.to_thread(helper.kill)
        assert not helper.running()
        monkeypatch.undo()
        await asyncio.to_thread(helper.start)
        assert (await client.call(v.Inventory())).found == v.Found()
        assert not helper.hangs()
    finally:
        await client.close()
        await asyncio.to_thread(helper.stop)


async def test_a_helper_that_carries_out_one_verb_for_ever_hangs(tmp_path: Path) -> None:
    """Root asks by a verb that waits for the others."""
    helper = Helper(PREFIX, tmp_path)
    with helper._lock:
        ours, theirs = socket.socketpair()
        worker = threading.Thread(target=serve, args=(helper, theirs))
        worker.start()
        ours.sendall(wire.frame(v.Ping()))
        ours.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ours.recv(100)
    with ours:
        ours.settimeout(20)
        assert ours.recv(100)
    worker.join(5)


@pytest.mark.skipif(os.geteuid() != 0, reason="the helper is root's")
def test_a_helper_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, said = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ >{said}\nexec sleep 1000\n")  # in the place of Python
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(privileged_client, "_READY_TIMEOUT", 1.0)
    helper = HelperProcess(PREFIX, tmp_path / "s", directory=tmp_path / "run")
    with pytest.raises(PrivilegedError, match="did not start within 1 s"):
        helper.start()
    assert not helper.running()
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="the helper is root's")
def test_the_socket_is_its_users_and_no_other_file_changes_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, roots = tmp_path / "place", tmp_path / "root's"
    place.mkdir(mode=0o700)
    os.chown(place, 65533, 65533)
    owners = []
    bind = socket.socket.bind

    class Exchanged(socket.socket):
        """A socket whose file the user exchanges for a file of root's as soon as it is there."""

        def bind(self, address: Any) -> None:
            bind(self, address)
            acting = os.geteuid()
            os.seteuid(0)
            owners.append((place / "s").stat().st_uid)
            roots.touch()
            roots.rename(place / "s")
            os.seteuid(acting)

    monkeypatch.setattr(socket, "socket", Exchanged)
    listener = Listener(Helper(PREFIX, tmp_path), place / "s", 65533)
    listener.socket.close()
    assert os.geteuid() == 0 and owners == [65533]
    assert (place / "s").stat().st_uid == 0


async def test_a_client_follows_no_link_to_the_socket_of_another_helper(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen(1)
        (tmp_path / "s").symlink_to(tmp_path / "other")
        client = PrivilegedClient(tmp_path / "s")
        with pytest.raises(Unavailable, match="does not answer"):
            await asyncio.wait_for(client.call(v.Inventory()), 10)


def test_a_firewall_lets_nothing_in_that_no_rule_names() -> None:
    filtered = v.FilteredPort(tap="tap11111111-11", zone=7, pairs=(v.Pair(mac=MAC, prefix="10.0.0.3/32"),))
    text = rulesets.firewall(v.LoadFirewall(filtered=(filtered,)))
    inside = text.partition("chain in1 {")[2].partition("}\nchain")[0]
    assert inside.strip().endswith("drop;")
    assert f"{MAC} . 10.0.0.3/32" in text
    assert '"tap11111111-11" : jump antispoof1' in text
    assert "delete table inet micronova" in text


def test_a_guest_is_no_router_and_no_dhcp_server_in_the_family_that_reassembles_fragments_either() -> None:
    """The bridge family sees each fragment; extension headers move the type or the ports out of the first one."""
    every = tuple(v.FilterRule(ingress=ingress, version=version) for ingress in (True, False) for version in (4, 6))
    for stateful in (True, False):
        filtered = v.FilteredPort(tap="tap11111111-11", zone=7, stateful=stateful, rules=every)
        inet = rulesets.firewall(v.LoadFirewall(filtered=(filtered,))).partition("table inet micronova {")[2]
        sent = inet.partition("chain out1 {")[2].strip().splitlines()
        assert sent[:3] == [  # before any rule that lets it pass
            "icmpv6 type { nd-router-advert, nd-redirect } drop;",
            "meta nfproto ipv4 udp sport 67 udp dport 68 drop;",
            "meta nfproto ipv6 udp sport 547 udp dport 546 drop;",
        ]


def test_dnsmasq_is_told_of_changes_by_files_and_not_by_its_command_line(tmp_path: Path) -> None:
    subnet = v.DhcpSubnet(
        cidr="10.0.0.0/24", gateway="10.0.0.1", dns=("10.0.0.2",),
        routes=(v.DhcpRoute(destination="169.254.169.254/32", via="10.0.0.2"),),
    )  # fmt: skip
    empty = v.StartDnsmasq(namespace=NETWORK, device="dev11111111-11", mtu=1450, domain="a.b.", subnets=(subnet,))
    host = v.DhcpHost(mac=MAC, addresses=("10.0.0.3", "fd00::3"), name="web", options=(v.DhcpOption(name="42"),))
    full = v.StartDnsmasq(
        namespace=NETWORK, device="dev11111111-11", mtu=1450, domain="a.b.", subnets=(subnet,), hosts=(host,)
    )
    assert dnsmasq.command(empty, tmp_path) == dnsmasq.command(full, tmp_path)
    files = dnsmasq.files(full)
    assert files["hosts"].splitlines() == [
        f"{MAC},set:pfa163e000001,web,10.0.0.3", f"{MAC},set:pfa163e000001,web,[fd00::3]"
    ]  # fmt: skip
    assert "tag:s0,option:classless-static-route,169.254.169.254/32,10.0.0.2,0.0.0.0/0,10.0.0.1" in files["options"]
    assert "option:mtu,1450" in files["options"]
    assert files["names"].splitlines()[0] == "10.0.0.3 web web.a.b"


@pytest.mark.skipif(os.geteuid() != 0, reason="the helper is root's")
async def test_only_the_named_user_may_ask(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="mn-", dir="/tmp"))
    place.chmod(0o755)
    os.chown(place, 65533, -1)
    helper = HelperProcess(PREFIX, place / "s", uid=65533, directory=tmp_path / "run")
    await asyncio.to_thread(helper.start)
    try:
        (place / "s").chmod(0o666)  # even if the file's mode would let them in
        ask = (
            "import socket,struct,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "m=b'\\x81\\xa4verb\\xa9inventory'; s.sendall(struct.pack('!I',len(m))+m); print(len(s.recv(100)))"
        )
        for uid, answered in ((65533, True), (65532, False)):
            child = await asyncio.create_subprocess_exec(
                "/usr/bin/env", "python3", "-c", ask, str(place / "s"), user=uid, group=uid, cwd="/",
                env={"PATH": "/usr/bin:/bin"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await child.communicate()
            assert (out.strip() not in (b"", b"0")) is answered, (uid, out)
    finally:
        await asyncio.to_thread(helper.stop)
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes sockets for others")
def test_the_socket_in_a_directory_of_roots_is_one_users(tmp_path: Path) -> None:
    listener = Listener(Helper(PREFIX, tmp_path), tmp_path / "s", 65533)
    listener.socket.close()
    found = (tmp_path / "s").stat()
    assert found.st_uid == 65533 and stat.S_IMODE(found.st_mode) == 0o600


def test_an_inventory_of_another_version_names_the_running_dnsmasq() -> None:
    written = b'{"servers": {"mn-1a2b3c4d-n-1": 7}}'
    found = msgspec.json.decode(written, type=v.Found)
    assert found.dnsmasq == {"mn-1a2b3c4d-n-1": 7}
    assert msgspec.json.decode(msgspec.json.encode(found))["servers"] == {"mn-1a2b3c4d-n-1": 7}
