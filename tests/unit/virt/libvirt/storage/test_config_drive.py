"""The config drive as a CD."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from micronova.metadata.vendordata import VendorDataSource
from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client.threads import ThreadPool
from micronova.virt.libvirt.storage.config_drive import make_config_drive
from micronova.virt.libvirt.storage.layout import Layout
from tests.unit.virt.libvirt.world import UUID, plan, vif


@pytest.mark.skipif(shutil.which("genisoimage") is None, reason="genisoimage is not installed")
async def test_the_cd_holds_it_all(tmp_path: Path) -> None:
    layout, files = Layout(tmp_path), ThreadPool("files", 1)
    layout.prepare()
    layout.guest(UUID).mkdir()
    a_plan = plan(vifs=(vif(),), hostname="server-1")
    a_plan.admin_password = "s3cret"
    await make_config_drive(a_plan, VendorDataSource(static={"a": 1}), layout, files)
    disc = layout.guest(UUID) / "disk.config"
    listed = subprocess.run(["isoinfo", "-R", "-f", "-i", disc], capture_output=True, text=True, check=True).stdout
    assert "/openstack/latest/meta_data.json" in listed.splitlines()
    assert "/ec2/2009-04-04/meta-data.json" in listed.splitlines()
    about = subprocess.run(["isoinfo", "-d", "-i", disc], capture_output=True, text=True, check=True).stdout
    assert "Volume id: config-2" in about
    inside = subprocess.run(
        ["isoinfo", "-R", "-i", disc, "-x", "/openstack/latest/meta_data.json"], capture_output=True, check=True
    ).stdout
    assert json.loads(inside)["admin_pass"] == "s3cret"
    vendor_data = subprocess.run(
        ["isoinfo", "-R", "-i", disc, "-x", "/openstack/latest/vendor_data.json"], capture_output=True, check=True
    ).stdout
    assert json.loads(vendor_data) == {"a": 1}
    assert sorted(path.name for path in layout.guest(UUID).iterdir()) == ["disk.config"]


async def test_a_vendor_data_service_that_is_away_is_waited_for(tmp_path: Path) -> None:
    layout, files = Layout(tmp_path), ThreadPool("files", 1)
    layout.prepare()
    layout.guest(UUID).mkdir()
    source = VendorDataSource(targets={"vendor": "http://127.0.0.1:9/"}, fatal=True)
    with pytest.raises(Unavailable, match="vendor data service"):
        await make_config_drive(plan(), source, layout, files)
    await source.close()
