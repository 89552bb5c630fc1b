"""The config drive: a CD with the label config-2 that has the guest's metadata."""

import os
import shutil
from pathlib import Path
from typing import Final

from micronova.metadata import drive
from micronova.metadata.facts import Facts
from micronova.metadata.openstack import SEED_BYTES
from micronova.metadata.vendordata import VendorDataSource
from micronova.virt.driver import GuestPlan
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage import tools
from micronova.virt.libvirt.storage.disks import CONFIG_DRIVE
from micronova.virt.libvirt.storage.layout import Layout

LABEL: Final = "config-2"


async def make_config_drive(
    plan: GuestPlan, source: VendorDataSource, layout: Layout, files: ThreadPool, name: str = CONFIG_DRIVE
) -> None:
    """Write the config drive into the guest's directory; raise Unavailable if there are no vendor data now."""
    vendor_data = await source.about(plan.instance)
    folder = layout.guest(plan.instance.uuid)
    facts = Facts(
        instance=plan.instance,
        vifs=plan.network_info,
        block_devices=plan.block_devices,
        admin_password=plan.admin_password,
        injected_files=plan.injected_files,
    )
    contents = drive.files(facts, vendor_data, os.urandom(SEED_BYTES))
    scratch = folder / ".config"
    try:
        await files.run(_write, scratch, contents)
        await tools.make_iso(scratch, folder / name, LABEL)
    finally:
        # It has passwords.
        shutil.rmtree(scratch, ignore_errors=True)


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # an agent that died may have left it
    folder.mkdir(mode=0o700)
    for path, content in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
