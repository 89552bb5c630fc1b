"""A libvirt that runs already and is not ours: as distributions set it up, with a guest that somebody made by hand.

It has a mount namespace of its own, so that a libvirt of the machine is not touched. Its guests' taps are in the
machine's network namespace, as those of any such libvirt are.
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

from micronova.virt.libvirt.library import load
from micronova.virt.libvirt.private import PrivateLibvirtd, find_qemu_user
from tests.e2e.cloud import RealCloud

# Its tap has a name that a port of a cloud might have given it.
BY_HAND = """
<domain type='qemu'><name>by-hand</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc'>hvm</type></os>
<devices><interface type='ethernet'><mac address='52:54:00:00:00:01'/><target dev='{tap}'/></interface></devices>
</domain>
"""


class OrdinaryDaemon(PrivateLibvirtd):
    """Runs the distribution's libvirtd with what the distribution would have set: it gives files to its guests."""

    def _configuration(self) -> dict[str, str]:
        return {
            "libvirtd.conf": f'host_uuid = "{self._host_uuid}"\n'
            'unix_sock_group = "libvirt"\nunix_sock_rw_perms = "0770"\nauth_unix_rw = "none"\n'
            'log_outputs = "3:file:/var/log/libvirt/libvirtd.log"\n',
            # But for what it would leave in the machine's control groups, and for the device that is hidden from it.
            "qemu.conf": "cgroup_controllers = []\nnamespaces = []\n",
            "virtlogd.conf": "",
        }


class OrdinaryLibvirt:
    """That libvirt, its directory, and the guest made by hand. Methods block."""

    def __init__(self) -> None:
        # Guests have to reach their files under their own names, so it is not for root only.
        self.room = Path(tempfile.mkdtemp(prefix="mn-e2e-", dir="/var/tmp"))
        self.room.chmod(0o711)
        self.daemon = OrdinaryDaemon(self.room / "d", host_uuid=str(uuid4()), user=find_qemu_user())
        self.uri = self.daemon.uri
        self.foreign = str(uuid4())
        self.tap = f"tap{self.foreign[:11]}"

    def start(self) -> None:
        self.daemon.ensure()
        self._ask(lambda connection: connection.defineXML(BY_HAND.format(uuid=self.foreign, tap=self.tap)).create())

    def restart(self) -> None:
        """Let it fall over and be started again, as an init system does; guests run on."""
        before = self.daemon._owner("libvirtd")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while self.daemon._owner("libvirtd") is not None:
            time.sleep(0.02)
        self.daemon.ensure()

    def stop(self) -> None:
        self.daemon.stop()
        shutil.rmtree(self.room)

    def guests(self) -> dict[str, bool]:
        """List the guests that it knows besides that one, and whether they run."""
        found: dict[str, bool] = self._ask(
            lambda connection: {each.UUIDString(): bool(each.isActive()) for each in connection.listAllDomains()}
        )
        return {uuid: active for uuid, active in found.items() if uuid != self.foreign}

    def pools(self) -> list[str]:
        """List the storage pools that it knows."""
        return list(self._ask(lambda connection: [each.name() for each in connection.listAllStoragePools()]))

    def foreign_life(self) -> tuple[int, str]:
        """Give what would change if somebody touched the guest made by hand: its process, and its tap."""
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
    """A cloud whose guests that libvirt runs."""

    def __init__(self, libvirt: OrdinaryLibvirt, settings: str = "") -> None:
        super().__init__(f'{settings}\n[libvirt]\nconnection_uri = "{libvirt.uri}"\n', directory=libvirt.room / "c")
        self._ordinary = libvirt

    def definitions(self) -> list[str]:
        return sorted(self._ordinary.guests())
