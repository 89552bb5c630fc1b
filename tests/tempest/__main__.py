"""Tempest, unmodified, against a cloud of ours: `python -m tests.tempest --suite compute`, or `make tempest`.

Suites without a login into guests run on the fake driver with three hosts. `scenario` has Tempest's scenarios and those
tests of compute that log in. It runs on real guests, inside the cloud's network namespace, from which floating IPs are
reached. Each failure and each skip is listed with its reason.
"""

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests import stestr
from tests.command import ok
from tests.peers import peer
from tests.services.process import free_port
from tests.tempest import configuration

REQUIREMENT = "tempest==47.0.0"
HOSTS = 3
SUITES = {
    "compute": r"^tempest\.(api\.compute|serial_tests\.api)\.",
    "network": r"^tempest\.api\.network\.",
    "image": r"^tempest\.api\.image\.",
    "identity": r"^tempest\.api\.identity\.",
    "volume": r"^tempest\.api\.volume\.",
    "scenario": (
        r"^tempest\.(scenario\.|api\.compute\.(admin\.test_create_server|servers\.test_"
        r"(attach_interfaces|create_server|device_tagging|server_actions|server_personality|server_rescue))\.)"
    ),
}
"""The ids of the tests. Those of compute in `scenario` log in to guests, if they may."""
ALONE = r"ServerActionsTestJSON\.test_change_server_password"
"""Runs after the other tests of `scenario`. It takes the floating IP of its class for a server of its own, and deletes
this server: later tests of the class, which use the address to log in to the class's server, would reach none."""
SETTINGS = """
[quota]
instances = 1000
cores = 2000
ram = 4000000
[volume]
quota_volumes = 1000
quota_snapshots = 1000
quota_gigabytes = 10000
[spice]
spice_direct_proxy_base_url = "http://127.0.0.1:13002/nova"
[[fake.rules]]
operation = "snapshot"
kind = "delay"
name = "ImagesTestJSON"
delay = 3.0
"""
# Tempest itself is the proxy of spice-direct, and looks only at the token of the URL. A test of images wants to see one
# that is still made of its server, which takes a simulated host no time.
# Some tests of images upload data without a format.
SETTINGS_FOR_IMAGES = """
[image_format]
require_image_format_match = false
"""


def main() -> int:
    """Run a suite; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), default="compute")
    parser.add_argument("--only", metavar="REGEX", help="run only the tests of the suite whose id matches")
    parser.add_argument("--processes", type=int, default=2, help="tests that run at once (default: 2)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="write results.json, tempest.log and micronova.log here"
    )
    arguments = parser.parse_args()
    environment = peer("tempest", REQUIREMENT)
    [packages] = environment.glob("lib/python*/site-packages")
    real_guests = arguments.suite == "scenario"
    folder = Path(tempfile.mkdtemp(prefix="mn-tempest-"))
    try:
        any_format = arguments.suite == "image"
        settings = SETTINGS + (SETTINGS_FOR_IMAGES if any_format else "")
        with _cloud(folder, settings, real_guests=real_guests) as (clouds, inside):
            hosts = 1 if real_guests else HOSTS
            configuration.write(folder, clouds, hosts=hosts, real_guests=real_guests, any_format=any_format)
            (folder / ".stestr.conf").write_text(
                f"[DEFAULT]\ntest_path={packages}/tempest/test_discover\ntop_dir={packages}\n"
                "group_regex=([^\\.]*\\.)*\n"  # the tests of a class run one after the other
            )
            results = [
                result
                for selection in _selections(arguments.suite, arguments.only)
                for result in stestr.run(
                    environment, folder, "tempest", selection,
                    variables={"TEMPEST_CONFIG_DIR": str(folder / "etc")}, processes=arguments.processes, inside=inside,
                )
            ]  # fmt: skip
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / "results.json").write_text(json.dumps(results, indent=1))
            shutil.copy(folder / "tempest.log", arguments.keep)
            shutil.copy(folder / "cloud" / "micronova.log", arguments.keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return stestr.report(results, package="tempest")


def _selections(suite: str, only: str | None) -> list[str]:
    """Return which tests run, one selection after the other."""
    tests = f"(?={SUITES[suite]}).*({only})" if only else SUITES[suite]
    return [f"^(?!.*{ALONE}){tests}", f"^(?=.*{ALONE}){tests}"] if suite == "scenario" else [tests]


@contextlib.contextmanager
def _cloud(folder: Path, text: str, *, real_guests: bool) -> Iterator[tuple[Path, list[str]]]:
    """Start a cloud; return its clouds.yaml, and the command that runs a program where floating IPs are reached."""
    directory, settings, port = folder / "cloud", folder / "settings.toml", free_port()
    settings.write_text(text)
    options = ["--driver", "libvirt"] if real_guests else ["--driver", "fake", "--hosts", str(HOSTS)]
    ok("up", "--dir", directory, "--config", settings, "--port", str(port), "--detach", *options)
    try:
        if not real_guests:
            yield directory / "clouds.yaml", []
            return
        from micronova.privileged.names import prefix_of

        namespace = prefix_of(json.loads((directory / "keys.json").read_text())["cloud_id"])
        with _api_inside(namespace, port):
            yield directory / "clouds.yaml", ["ip", "netns", "exec", namespace]
    finally:
        ok("down", "--dir", directory)


@contextlib.contextmanager
def _api_inside(namespace: str, port: int) -> Iterator[None]:
    """Let programs in a network namespace reach the API at the same address as outside of it."""
    here, there = socket.socketpair()
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
        "socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b'x'], [s.fileno()])"
    )
    subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", script, str(port), str(there.fileno())],
        pass_fds=[there.fileno()], check=True,
    )  # fmt: skip
    _, [descriptor], _, _ = socket.recv_fds(here, 1, 1)
    with here, there, socket.socket(fileno=descriptor) as listener:
        threading.Thread(target=_serve, args=(listener, port), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, port: int) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the run has ended
            return
        api = socket.create_connection(("127.0.0.1", port))
        for one, other in ((connection, api), (api, connection)):
            threading.Thread(target=_copy, args=(one, other), daemon=True).start()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
