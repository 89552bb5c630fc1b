"""The agent need not be root: root starts the private libvirtd, and the agent works as a user of its own.

Nor need it be root, or root's, to use an existing libvirt.
"""

import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from micronova.conf.libvirt import LibvirtSettings
from micronova.virt.libvirt.setup import private_libvirtd, teardown
from tests.e2e.existing_libvirt import DistributionLibvirt
from tests.e2e.host import FOLDERS, Host

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

USER, GROUP = pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("nobody").pw_gid  # libvirt wants one that has a name


def test_an_agent_that_is_not_root(host: Host) -> None:
    directory = Path(tempfile.mkdtemp(prefix="mn-e2e-"))
    os.chown(directory, USER, GROUP)
    settings = LibvirtSettings(network_namespace=host.namespace)
    daemon = private_libvirtd(directory, "cloud-1", "host-1", settings, client=(USER, GROUP))
    try:
        daemon.ensure()
        mode = daemon.socket.stat()
        assert stat.S_IMODE(mode.st_mode) == 0o770 and mode.st_gid == GROUP
        _act(host, GROUP, directory)
        left = [path.name for name in FOLDERS for path in (directory / "libvirt" / name).rglob("*") if path.is_file()]
        assert set(left) <= {"driver.pid", "autostarted"}
    finally:
        teardown(directory)
        shutil.rmtree(directory)


def test_a_user_of_an_existing_libvirt(host: Host) -> None:
    libvirt = DistributionLibvirt()
    directory = libvirt.folder / "u"
    directory.mkdir(mode=0o711)
    os.chown(directory, USER, GROUP)
    try:
        libvirt.start()
        _act(host, grp.getgrnam("libvirt").gr_gid, directory, libvirt.uri)
        assert libvirt.guests() == {} and libvirt.pools() == []
    finally:
        libvirt.stop()


def _act(host: Host, other_group: int, directory: Path, *uri: str) -> None:
    image = msgspec.json.encode(host.images.image).decode()
    arguments = [USER, GROUP, other_group, directory, host.namespace, host.images.ticket, image, *uri]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.unprivileged_agent", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
