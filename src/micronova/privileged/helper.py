"""The privileged helper: a small root process that carries out the verbs of one cloud and nothing else.

It listens on a Unix socket that only one user and root may use, checks each verb, and carries out one at a time. What
it makes stays when it ends, so a restart does not disturb guests. It ends when its standard input is closed, that is,
with the process that started it.
"""

import argparse
import contextlib
import logging
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from micronova.privileged import adoption, devices, dnsmasq, firewall, firewall_check, rulesets, sockets, vlans, wire
from micronova.privileged import verbs as v
from micronova.privileged.checks import Refused, check
from micronova.privileged.kernel import Failed

log = logging.getLogger(__name__)

PREFIX = re.compile(r"\Amn-[0-9a-f]{8}\Z")
_CREDENTIALS = struct.Struct("3i")

Answer = tuple[v.Reply, socket.socket | None]


class Helper:
    """Carries out the verbs of one cloud."""

    def __init__(self, prefix: str, directory: Path, guests: Path | None = None) -> None:
        """`prefix` begins the names of the cloud; `directory` holds the files of its DHCP servers.

        `guests` is the directory of the guests' disks, if a libvirt of the machine creates their taps.
        """
        if not PREFIX.match(prefix):
            raise Refused(f"{prefix!r} is not a cloud's prefix.")
        self.prefix = prefix
        self.directory = directory
        self._guests = guests
        self._lock = threading.Lock()
        rules = firewall.FirewallLoader(prefix)
        self._verbs: dict[type[v.Verb], Callable[[Any], Answer | None]] = {
            v.EnsureNamespace: lambda verb: devices.ensure_namespace(verb, prefix),
            v.DeleteNamespace: self._delete_namespace,
            v.EnsureBridge: lambda verb: devices.ensure_bridge(verb, prefix),
            v.EnsureTap: lambda verb: (v.Reply(present=devices.ensure_tap(verb, prefix)), None),
            v.AdoptTap: self._adopt_tap,
            v.EnsureTrunk: lambda verb: (v.Reply(present=vlans.ensure_trunk(verb, prefix)), None),
            v.EnsureVeth: lambda verb: devices.ensure_veth(verb, prefix),
            v.DeleteLink: lambda verb: devices.delete_link(verb.device, prefix),
            v.SetAddresses: lambda verb: devices.set_addresses(verb),
            v.SetRoutes: lambda verb: devices.set_routes(verb),
            v.LoadFirewall: lambda verb: (v.Reply(closed=rules.load(verb)), None),
            v.CheckFirewall: lambda verb: firewall_check.check_firewall(),
            v.LoadRouter: lambda verb: devices.load_ruleset(verb.namespace, rulesets.router(verb)),
            v.StartDnsmasq: lambda verb: (v.Reply(pid=dnsmasq.start(verb, directory)), None),
            v.StartAdvertiser: lambda verb: (v.Reply(pid=dnsmasq.start(verb, directory)), None),
            v.StopDnsmasq: lambda verb: dnsmasq.stop(verb.namespace, directory),
            v.SetBandwidth: lambda verb: devices.set_bandwidth(verb, prefix),
            v.Inventory: lambda verb: (v.Reply(found=self.inventory()), None),
            v.Ping: lambda verb: None,
            v.WatchLinks: lambda verb: (v.Reply(), self._watch_links(verb)),
            v.ListenMetadata: lambda verb: (v.Reply(), sockets.listen_metadata(verb.namespace)),
            v.Connect: lambda verb: (v.Reply(), sockets.connect(verb, prefix)),
            v.Cleanup: lambda verb: self.cleanup(),
        }

    def do(self, verb: v.Verb) -> Answer:
        """Check a verb and carry it out."""
        try:
            check(verb, self.prefix)
            if isinstance(verb, v.Connect):  # it may wait for the network, so not under the lock
                return self._verbs[type(verb)](verb) or (v.Reply(), None)
            with self._lock:
                return self._verbs[type(verb)](verb) or (v.Reply(), None)
        except Refused as error:
            return v.Reply(error=f"refused: {error}"), None
        except (Failed, OSError) as error:
            return v.Reply(error=str(error) or type(error).__name__), None

    def inventory(self) -> v.Found:
        """Return the namespaces, devices and dnsmasq processes of the cloud."""
        namespaces, links = devices.inventory(self.prefix)
        processes = {
            name: pid for name in self._served() if (pid := dnsmasq.running(self.directory / name)) is not None
        }
        adopts = self._guests is not None
        return v.Found(
            namespaces=tuple(namespaces),
            dnsmasq=processes,
            links=links,
            adopts=adopts,
            outside=tuple(adoption.outside()) if adopts else (),
        )

    def cleanup(self) -> None:
        """Delete all dnsmasq processes, devices and namespaces of the cloud."""
        for name in self._served():
            dnsmasq.stop(name, self.directory)
        for name in reversed(devices.namespaces(self.prefix)):  # the one with the bridges last
            devices.delete_namespace(name)

    def _adopt_tap(self, verb: v.AdoptTap) -> Answer:
        if self._guests is None:
            raise Refused("The guests of this cloud have their taps in its own namespace.")
        return v.Reply(present=adoption.adopt_tap(verb, self.prefix, self._guests)), None

    def _watch_links(self, verb: v.WatchLinks) -> socket.socket:
        if verb.outside and self._guests is None:
            raise Refused("The guests of this cloud have their taps in its own namespace.")
        return sockets.watch_links("" if verb.outside else self.prefix)

    def _delete_namespace(self, verb: v.DeleteNamespace) -> None:
        dnsmasq.stop(verb.namespace, self.directory)
        devices.delete_namespace(verb.namespace)

    def _served(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(e.name for e in self.directory.iterdir() if e.is_dir() and e.name.startswith(f"{self.prefix}-"))


class Listener:
    """Accepts clients on a Unix socket."""

    def __init__(self, helper: Helper, path: Path, uid: int) -> None:
        self._helper = helper
        self._uid = uid
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _bind(self.socket, path, uid)
        self.socket.listen(16)

    def accept(self) -> None:
        """Accept one client; close the connection unless its user is allowed."""
        client, _ = self.socket.accept()
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in (0, self._uid):
            client.close()
            return
        threading.Thread(target=serve, args=(self._helper, client), daemon=True).start()


def _bind(listening: socket.socket, path: Path, uid: int) -> None:
    """Make the socket's file, for one user.

    A user who owns the directory could put another file in its place before root changes the owner. So that user makes
    the file. The directory may be below one that is closed to the user, so root opens it.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    before = os.umask(0o177)
    name = f"/proc/self/fd/{directory}/{path.name}"
    try:
        if os.fstat(directory).st_uid == 0:
            listening.bind(name)
            os.chown(name, uid, -1)
            return
        os.seteuid(uid)
        try:
            listening.bind(name)
        finally:
            os.seteuid(0)
    finally:
        os.umask(before)
        os.close(directory)


def serve(helper: Helper, client: socket.socket) -> None:
    """Carry out the verbs of a client until it disconnects."""
    with client:
        while (body := _receive(client)) is not None:
            try:
                answer, passed = helper.do(wire.verb(body))
            except (msgspec.MsgspecError, RecursionError) as error:
                answer, passed = v.Reply(error=f"refused: {error}"), None
            except Exception as error:
                log.exception("cannot carry out a verb")
                answer, passed = v.Reply(error=f"{type(error).__name__}: {error}"), None
            try:
                if passed is None:
                    client.sendall(wire.frame(answer))
                else:
                    with passed:
                        socket.send_fds(client, [wire.frame(answer)], [passed.fileno()])
            except OSError:
                return


def _receive(client: socket.socket) -> bytes | None:
    header = _exactly(client, wire.HEADER.size)
    if header is None:
        return None
    [length] = wire.HEADER.unpack(header)
    return _exactly(client, length) if length <= wire.LIMIT else None


def _exactly(client: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            part = client.recv(min(count - len(found), 1 << 16))
        except OSError:
            return None
        if not part:
            return None
        found += part
    return bytes(found)


def main(arguments: list[str] | None = None) -> int:
    """Run the helper until its standard input ends."""
    parser = argparse.ArgumentParser(prog="micronova-privileged", description=__doc__)
    parser.add_argument("--prefix", required=True, help="prefix of the cloud's names: mn- and eight hexadecimal digits")
    parser.add_argument("--directory", required=True, type=Path, help="directory for the files of DHCP servers")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket to listen on")
    parser.add_argument("--uid", required=True, type=int, help="user that may connect, besides root")
    parser.add_argument("--guests", type=Path, help="directory of the guests' disks, if taps have to be adopted")
    parser.add_argument("--cleanup", action="store_true", help="delete everything of the cloud and end")
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s privileged %(levelname)s %(message)s")
    dnsmasq.prepare(given.directory)
    helper = Helper(given.prefix, given.directory, given.guests)
    if given.cleanup:
        helper.cleanup()
        with contextlib.suppress(OSError):  # it has files that are not ours
            given.directory.rmdir()
        return 0
    listener = Listener(helper, given.socket, given.uid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us handles Ctrl-C and ends us
    with contextlib.suppress(BrokenPipeError):  # the process that started us was killed; the loop ends below
        os.write(sys.stdout.fileno(), b"ready\n")
    try:
        while True:
            ready, _, _ = select.select([listener.socket, sys.stdin], [], [])
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
                return 0
            if listener.socket in ready:
                listener.accept()
    finally:
        with contextlib.suppress(OSError):
            given.socket.unlink()


if __name__ == "__main__":
    sys.exit(main())
