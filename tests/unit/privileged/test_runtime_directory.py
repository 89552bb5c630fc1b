"""The files of DHCP servers name the hosts of all tenants: who can read them."""

import os
import pwd
import stat
from pathlib import Path

import pytest

from micronova.privileged import dnsmasq


@pytest.mark.skipif(os.geteuid() != 0, reason="the directory is root's")
def test_only_root_and_the_servers_read_the_files_of_servers(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "mn-1a2b3c4d"
    directory.mkdir(parents=True, mode=0o755)  # as an earlier version made it
    for _ in range(2):
        dnsmasq.prepare(directory)
    found = directory.stat()
    assert stat.S_IMODE(found.st_mode) == 0o750 and found.st_uid == 0
    servers = next(user for user in ("dnsmasq", "nobody") if user in {entry.pw_name for entry in pwd.getpwall()})
    assert found.st_gid == pwd.getpwnam(servers).pw_gid
