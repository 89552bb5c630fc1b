"""The config drive: a CD labelled config-2 with the guest's metadata."""

import os
import shutil
from pathlib import Path
from typing import Final

from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt import tools
from micronova.virt.libvirt.disks import CONFIG_DRIVE
from micronova.virt.libvirt.documents import documents
from micronova.virt.libvirt.layout import Layout
from micronova.virt.libvirt.pool import Pool

LABEL: Final = "config-2"
SEED_BYTES: Final = 512


async def make_config_drive(plan: GuestPlan, layout: Layout, files: Pool) -> None:
    """Make the CD in the guest's directory."""
    folder = layout.guest(plan.instance.uuid)
    contents = documents(
        plan.instance,
        plan.network_info,
        admin_password=plan.admin_password,
        injected_files=plan.injected_files,
        seed=os.urandom(SEED_BYTES),
    )
    source = folder / ".config"
    try:
        await files.run(_write, source, contents)
        await tools.make_iso(source, folder / CONFIG_DRIVE, LABEL)
        await files.run(layout.grant, folder / CONFIG_DRIVE, 0o640 if layout.private else 0o600)
    finally:
        # Passwords are in there.
        shutil.rmtree(source, ignore_errors=True)


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(mode=0o700)
    for path, content in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
