"""An existing libvirt, configured as by a distribution, with a guest that was made by hand.

It has its own mount namespace, so that the machine's libvirt is not affected. Its guests' taps are in the machine's
network namespace.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from micronova.virt.libvirt.client.library import load
from micronova.virt.libvirt.daemon.private import PrivateLibvirtd
from micronova.virt.libvirt.daemon.qemu_user import find_qemu_user
from tests.e2e.cloud import RealCloud

# Its tap has a name that a port of a cloud might have given it.
BY_HAND = """
<domain type='qemu'><name>by-hand</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os>
<devices><interface type='ethernet'><mac address='52:54:00:00:00:01'/><target dev='{tap}'/></interface></devices>
</domain>
"""


class DistributionLibvirtd(PrivateLibvirtd):
    """Runs libvirtd with a distribution's settings, by which it changes the owner of guests' files."""

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "run").chmod(0o755)  # as a distribution's

    def _configuration(self) -> dict[str, str]:
        return {
            "libvirtd.conf": f'host_uuid = "{self._host_uuid}"\n'
            'unix_sock_group = "libvirt"\nunix_sock_rw_perms = "0770"\nauth_unix_rw = "none"\n'
            'log_outputs = "3:file:/var/log/libvirt/libvirtd.log"\n',
            # Without control groups, which it would not clean up, and without namespaces, because /dev/kvm is hidden.
            "qemu.conf": "cgroup_controllers = []\nnamespaces = []\n",
            "virtlogd.conf": "",
        }


class DistributionLibvirt:
    """The libvirt, its directory, and the guest made by hand. Methods block."""

    def __init__(self) -> None:
        # Guests must be able to traverse it.
        self.folder = Path(tempfile.mkdtemp(prefix="mn-e2e-", dir="/var/tmp"))
        self.folder.chmod(0o711)
        self.daemon = DistributionLibvirtd(self.folder / "d", host_uuid=str(uuid4()), user=find_qemu_user())
        self.uri = self.daemon.uri
        self.foreign = str(uuid4())
        self.tap = f"tap{self.foreign[:11]}"

    def start(self) -> None:
        self.daemon.ensure()
        self._ask(lambda connection: connection.defineXML(BY_HAND.format(uuid=self.foreign, tap=self.tap)).create())

    def restart(self) -> None:
        """Kill libvirtd and start it again; guests continue to run."""
        before = self.daemon._owner("libvirtd")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while self.daemon._owner("libvirtd") is not None:
            time.sleep(0.02)
        self.daemon.ensure()

    def stop(self) -> None:
        self.daemon.stop()
        shutil.rmtree(self.folder)

    def guests(self) -> dict[str, bool]:
        """Return its other guests, and whether they run."""
        found: dict[str, bool] = self._ask(
            lambda connection: {each.UUIDString(): bool(each.isActive()) for each in connection.listAllDomains()}
        )
        return {uuid: active for uuid, active in found.items() if uuid != self.foreign}

    def pools(self) -> list[str]:
        """Return its storage pools."""
        return list(self._ask(lambda connection: [each.name() for each in connection.listAllStoragePools()]))

    def foreign_life(self) -> tuple[int, str]:
        """Return the id and the tap's index of the guest made by hand, which change if it is restarted or changed."""
        number: int = self._ask(lambda connection: connection.lookupByUUIDString(self.foreign).ID())
        shown = subprocess.run(["ip", "-o", "link", "show", "dev", self.tap], check=True, capture_output=True)
        return number, shown.stdout.partition(b":")[0].decode()

    def _ask(self, question: Any) -> Any:
        connection = load().open(self.uri)
        try:
            return question(connection)
        finally:
            connection.close()


class GuestCloud(RealCloud):
    """A cloud with guests on the existing libvirt."""

    def __init__(self, libvirt: DistributionLibvirt, settings: str = "") -> None:
        super().__init__(
            f'{settings}\n[libvirt]\nconnection_uri = "{libvirt.uri}"\n',
            directory=libvirt.folder / "c",
            libvirt=libvirt.folder / "c-guests",
        )
        self._libvirt = libvirt

    def definitions(self) -> list[str]:
        return sorted(self._libvirt.guests())
