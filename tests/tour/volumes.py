"""The tour of volumes."""

import time
from typing import Any

from tests.osc import OpenStackClient, Refused
from tests.tour.steps import DEMO, ON_TEST_IMAGE

TIMEOUT = 120.0  # seconds on a busy machine: an image of a volume has its whole size
OTHERS = frozenset(
    {"availability zone list", "extension list", "image create", "limits show", "quota delete", "quota list"}
    | {"quota set", "quota show"}
    | {"server add volume", "server create", "server image create", "server migrate", "server migrate confirm"}
    | {"server migrate revert", "server rebuild", "server remove volume", "server rescue", "server resize"}
    | {"server resize confirm", "server shelve", "server unrescue", "server unshelve", "server volume list"}
    | {"server volume set", "server volume update"}
)
"""Commands about volumes, and about servers that have some, that have no family of their own."""


def until(osc: OpenStackClient, command: str, name: str, status: str = "available", *, cloud: str = DEMO) -> Any:
    """Wait until what a command shows has a status, or is gone ("")."""
    begun = time.monotonic()
    while time.monotonic() - begun < TIMEOUT:
        try:
            shown = osc.json(command, name, cloud=cloud)
        except Refused:
            if not status:
                return None
            raise
        if shown["status"] == status:
            return shown
    raise AssertionError(f"{command} {name}: not {status or 'gone'} in {TIMEOUT:g} s")


def volumes(osc: OpenStackClient) -> None:
    """Volumes: empty, of an image, of a volume; changed, extended, summed up, deleted."""
    osc("volume create", "--size", "1", "--property", "a=b", "empty", cloud=DEMO)
    osc("volume create", "--size", "1", "--image", "test-image", "system", cloud=DEMO)
    until(osc, "volume show", "empty")
    assert until(osc, "volume show", "system")["bootable"] is True
    osc("volume create", "--source", "system", "clone", cloud=DEMO)
    clone = until(osc, "volume show", "clone")
    assert clone["size"] == 1
    assert set(osc.column("volume list", cloud=DEMO)) == {"empty", "system", "clone"}
    osc("volume set", "--name", "data", "--description", "d", "--property", "c=d", "--bootable", "empty", cloud=DEMO)
    osc("volume unset", "--property", "a", "data", cloud=DEMO)
    osc("volume set", "--size", "2", "data", cloud=DEMO)
    shown = until(osc, "volume show", "data")
    assert (shown["size"], shown["bootable"], shown["properties"]) == (2, True, {"c": "d"})
    osc("volume set", "--read-only", "data", cloud=DEMO)
    osc("volume set", "--read-write", "data", cloud=DEMO)
    osc("volume set", "--state", "error", clone["id"])
    osc("volume delete", "clone", cloud=DEMO)
    until(osc, "volume show", "clone", "")
    assert "4" not in str(osc.json("volume summary", cloud=DEMO)["Total Count"])
    assert "greater" in osc.refused("volume set", "--size", "1", "data", cloud=DEMO)


def snapshots(osc: OpenStackClient) -> None:
    """A snapshot, a volume of it, and the volume as it was."""
    osc("volume snapshot create", "--volume", "data", "--property", "k=v", "before", cloud=DEMO)
    until(osc, "volume snapshot show", "before")
    osc("volume snapshot set", "--name", "first", "--property", "l=w", "before", cloud=DEMO)
    osc("volume snapshot unset", "--property", "k", "first", cloud=DEMO)
    assert osc.json("volume snapshot show", "first", cloud=DEMO)["properties"] == {"l": "w"}
    assert osc.column("volume snapshot list", "--volume", "data", cloud=DEMO) == ["first"]
    osc("volume create", "--snapshot", "first", "copy", cloud=DEMO)
    until(osc, "volume show", "copy")
    osc("volume revert", "first", cloud=DEMO)
    until(osc, "volume show", "data")
    assert "snapshots" in osc.refused("volume delete", "data", cloud=DEMO)
    osc("volume snapshot delete", "first", cloud=DEMO)
    until(osc, "volume snapshot show", "first", "")


def backups(osc: OpenStackClient) -> None:
    """A backup, restored after its volume is gone."""
    osc("volume backup create", "--name", "safe", "copy", cloud=DEMO)
    until(osc, "volume backup show", "safe")
    osc("volume backup set", "--name", "safer", "--description", "d", "safe", cloud=DEMO)
    osc("volume delete", "copy", cloud=DEMO)
    until(osc, "volume show", "copy", "")
    assert osc.column("volume backup list", cloud=DEMO) == ["safer"]
    osc("volume backup restore", "safer", "restored", cloud=DEMO)
    until(osc, "volume show", "restored")
    until(osc, "volume backup show", "safer")
    newest = ("--os-volume-api-version", "3.71")
    osc("volume backup set", "--property", "k=v", "safer", *newest, cloud=DEMO)
    shown = osc.json("volume backup show", "safer", *newest, cloud=DEMO)
    assert shown["metadata"] == {"k": "v"}
    osc("volume backup unset", "--property", "k", "safer", *newest, cloud=DEMO)  # this client unsets all other keys
    assert osc.json("volume backup record export", shown["id"])  # this client sends imports to a wrong path
    osc("volume backup delete", "safer", cloud=DEMO)
    until(osc, "volume backup show", "safer", "")


def transfers(osc: OpenStackClient) -> None:
    """A volume goes to another project."""
    made = osc.json("volume transfer request create", "--name", "gift", "restored", cloud=DEMO)
    assert osc.column("volume transfer request list", cloud=DEMO) == ["gift"]
    assert osc.json("volume transfer request show", "gift", cloud=DEMO)["name"] == "gift"
    osc("volume transfer request accept", "--auth-key", made["auth_key"], made["id"])
    assert "restored" not in osc.column("volume list", cloud=DEMO)
    osc("volume delete", "restored")
    kept = osc.json("volume transfer request create", "--name", "kept", "data", cloud=DEMO)
    osc("volume transfer request delete", kept["id"], cloud=DEMO)


def types(osc: OpenStackClient) -> None:
    """Volume types with properties, projects and QoS specs."""
    osc("volume type create", "--private", "--property", "multiattach=<is> True", "shared")
    assert "shared" not in osc.column("volume type list", cloud=DEMO)
    osc("volume type set", "--project", "demo", "--description", "d", "shared")
    assert "shared" in osc.column("volume type list", cloud=DEMO)
    osc("volume type set", "--property", "capabilities:storage_protocol=nbd", "shared")
    osc("volume type unset", "--property", "capabilities:storage_protocol", "shared")
    assert osc.json("volume type show", "shared")["properties"] == {"multiattach": "<is> True"}
    osc("volume set", "--type", "shared", "data", cloud=DEMO)
    assert osc.json("volume show", "data", cloud=DEMO)["type"] == "shared"
    osc("volume qos create", "--consumer", "front-end", "--property", "total_iops_sec=10", "gold")
    osc("volume qos set", "--property", "read_iops_sec=5", "gold")
    osc("volume qos unset", "--property", "read_iops_sec", "gold")
    osc("volume qos associate", "gold", "shared")
    assert osc.json("volume qos show", "gold")["associations"] == ["shared"]
    osc("volume qos disassociate", "--volume-type", "shared", "gold")
    assert osc.column("volume qos list") == ["gold"]
    osc("volume qos delete", "gold")
    osc("volume delete", "data", cloud=DEMO)
    until(osc, "volume show", "data", "")
    osc("volume type unset", "--project", "demo", "shared")
    osc("volume type delete", "shared")
    options = ("--encryption-provider", "luks", "--encryption-control-location", "front-end")
    osc("volume type create", *options, "--encryption-cipher", "aes-xts-plain64", "sealed")
    assert "luks" in str(osc.json("volume type show", "--encryption-type", "sealed")["encryption"])
    osc("volume type set", "--encryption-key-size", "512", "sealed")
    osc("volume create", "--size", "1", "--type", "sealed", "secret", cloud=DEMO)
    until(osc, "volume show", "secret", "available")
    assert osc.json("volume show", "secret", cloud=DEMO)["encrypted"] is True
    assert "volumes have this type" in osc.refused("volume type unset", "--encryption-type", "sealed")
    osc("volume delete", "secret", cloud=DEMO)
    until(osc, "volume show", "secret", "")
    osc("volume type unset", "--encryption-type", "sealed")
    osc("volume type delete", "sealed")


def attachments(osc: OpenStackClient) -> None:
    """Attachments, as compute makes them."""
    newest = ("--os-volume-api-version", "3.71")
    volume = osc.json("volume create", "--size", "1", "used", cloud=DEMO)["id"]
    until(osc, "volume show", volume)
    server = osc.json("server create", *ON_TEST_IMAGE, "--nic", "none", "--wait", "user-of-volume", cloud=DEMO)["id"]
    made = osc.json("volume attachment create", volume, "--server", server, *newest)["ID"]
    assert osc.json("volume show", volume, cloud=DEMO)["status"] == "reserved"
    assert osc.column("volume attachment list", *newest, name="ID", cloud=DEMO) == [made]
    osc("volume attachment set", "--host", "fake-1", "--mountpoint", "/dev/vdb", made, *newest)
    osc("volume attachment complete", made, *newest)
    shown = osc.json("volume attachment show", made, *newest, cloud=DEMO)
    assert (shown["Status"], shown["Instance ID"]) == ("attached", server)
    assert osc.json("volume show", volume, cloud=DEMO)["status"] == "in-use"
    assert server in osc.refused("volume attachment delete", made, *newest, cloud=DEMO)
    osc("volume attachment delete", made, *newest)
    assert osc.json("volume show", volume, cloud=DEMO)["status"] == "available"
    osc("volume delete", volume, cloud=DEMO)
    until(osc, "volume show", volume, "")
    osc("server delete", "--wait", server, cloud=DEMO)


def servers_with_volumes(osc: OpenStackClient) -> None:
    """Servers use volumes: added, listed, changed, removed, and booted from."""
    osc("volume create", "--size", "1", "disk", cloud=DEMO)
    until(osc, "volume show", "disk")
    osc("server create", "--wait", *ON_TEST_IMAGE, "--nic", "none", "user", cloud=DEMO)
    osc("server add volume", "--tag", "t", "--disable-delete-on-termination", "user", "disk", cloud=DEMO)
    until(osc, "volume show", "disk", "in-use")
    [row] = osc.json("server volume list", "user", cloud=DEMO)
    assert (row["Device"], row["Tag"], row["Delete On Termination?"]) == ("/dev/vdb", "t", False)
    osc("server volume set", "--delete-on-termination", "user", "disk", cloud=DEMO)
    assert osc.json("server volume list", "user", cloud=DEMO)[0]["Delete On Termination?"] is True
    assert osc.json("server show", "user", cloud=DEMO)["volumes_attached"][0]["delete_on_termination"] is True
    assert "in-use" in osc.refused("volume delete", "disk", cloud=DEMO)
    osc("server remove volume", "user", "disk", cloud=DEMO)
    until(osc, "volume show", "disk")
    osc("server delete", "--wait", "user", cloud=DEMO)
    tiny = ("--flavor", "m1.tiny", "--nic", "none", "--wait")
    osc("server create", *tiny, "--image", "test-image", "--boot-from-volume", "1", "made", cloud=DEMO)
    osc("server create", *tiny, "--volume", "system", "booted", cloud=DEMO)
    blank = "source_type=blank,destination_type=volume,volume_size=1,delete_on_termination=true"
    osc("server create", *tiny, "--image", "test-image", "--block-device", blank, "with-blank", cloud=DEMO)
    assert len(osc.json("server volume list", "with-blank", cloud=DEMO)) == 1
    for name in ("made", "booted"):
        assert osc.json("server volume list", name, cloud=DEMO)[0]["Device"] == "/dev/vda"
    of_made = osc.json("server volume list", "made", cloud=DEMO)[0]["Volume ID"]
    osc("server delete", "--wait", "made", "booted", "with-blank", cloud=DEMO)
    until(osc, "volume show", "system")
    until(osc, "volume show", of_made)
    osc("volume snapshot create", "--volume", "system", "golden", cloud=DEMO)
    until(osc, "volume snapshot show", "golden")
    osc("server create", *tiny, "--snapshot", "golden", "copied", cloud=DEMO)
    copied = osc.json("server volume list", "copied", cloud=DEMO)[0]["Volume ID"]
    osc("server delete", "--wait", "copied", cloud=DEMO)
    until(osc, "volume show", copied)
    osc("volume snapshot delete", "golden", cloud=DEMO)
    until(osc, "volume snapshot show", "golden", "")
    for volume in (of_made, copied, "disk"):
        osc("volume delete", volume, cloud=DEMO)
        until(osc, "volume show", volume, "")


def servers_on_volumes(osc: OpenStackClient) -> None:
    """A server on a volume is copied, put aside, repaired, enlarged and moved, and has the same volume."""
    osc("image create", "--volume", "system", "of-volume", cloud=DEMO)
    until(osc, "volume show", "system")
    rescuing = ("--property", "hw_rescue_device=disk", "--property", "hw_rescue_bus=virtio")
    osc("image set", *rescuing, "of-volume", cloud=DEMO)
    assert osc.json("image show", "of-volume", cloud=DEMO)["status"] == "active"
    options = ("--flavor", "m1.tiny", "--nic", "none", "--wait", "--volume", "system")
    server = osc.json("server create", *options, "rooted", cloud=DEMO)["id"]
    [volume] = osc.column("server volume list", server, name="Volume ID", cloud=DEMO)
    osc("server volume update", "--delete-on-termination", server, volume, cloud=DEMO)
    assert osc.json("server volume list", server, cloud=DEMO)[0]["Delete On Termination?"] is True
    osc("server volume update", "--preserve-on-termination", server, volume, cloud=DEMO)
    osc("server image create", "--name", "of-server", "--wait", server, cloud=DEMO)
    [snapshot] = osc.json("volume snapshot list", "--volume", "system", cloud=DEMO)
    until(osc, "volume snapshot show", snapshot["ID"])
    osc("server shelve", "--wait", server, cloud=DEMO)
    until(osc, "volume show", volume, "reserved")
    osc("server unshelve", "--wait", server, cloud=DEMO)
    until(osc, "volume show", volume, "in-use")
    osc("server rebuild", "--image", "of-volume", "--reimage-boot-volume", "--wait", server, cloud=DEMO)
    osc("server rescue", "--image", "of-volume", server, cloud=DEMO)
    until(osc, "server show", server, "RESCUE")
    osc("server unrescue", server, cloud=DEMO)
    until(osc, "server show", server, "ACTIVE")
    osc("server resize", "--flavor", "m1.small", "--wait", server, cloud=DEMO)
    osc("server resize confirm", server, cloud=DEMO)
    until(osc, "server show", server, "ACTIVE")
    for ending, moved in (("confirm", True), ("revert", False)):
        before = osc.json("server show", server)["OS-EXT-SRV-ATTR:host"]
        osc("server migrate", "--wait", server)
        osc(f"server migrate {ending}", server)
        until(osc, "server show", server, "ACTIVE")
        after = osc.json("server show", server)["OS-EXT-SRV-ATTR:host"]
        assert (before != after) is moved
    assert osc.json("server volume list", server, cloud=DEMO)[0]["Volume ID"] == volume
    osc("server delete", "--wait", server, cloud=DEMO)
    until(osc, "volume show", volume)
    osc("image delete", "of-server", "of-volume", cloud=DEMO)
    osc("volume snapshot delete", snapshot["ID"], cloud=DEMO)
    until(osc, "volume snapshot show", snapshot["ID"], "")


def operators(osc: OpenStackClient) -> None:
    """Services, pools and quotas."""
    services = osc.json("volume service list")
    assert {each["Binary"] for each in services} == {"cinder-backup", "cinder-scheduler", "cinder-volume"}
    host = next(each["Host"] for each in services if each["Binary"] == "cinder-volume")
    osc("volume service set", "--disable", "--disable-reason", "new disks", host, "cinder-volume")
    osc("volume create", "--size", "1", "nowhere", cloud=DEMO)
    failed = until(osc, "volume show", "nowhere", "error")
    told = osc.json("volume message list", "--os-volume-api-version", "3.71", cloud=DEMO)
    [message] = [each["ID"] for each in told if each["Resource UUID"] == failed["id"]]
    newest = ("--os-volume-api-version", "3.71")
    assert message in osc("volume message show", message, *newest, cloud=DEMO)  # this client shows nothing else
    osc("volume message delete", message, *newest, cloud=DEMO)
    assert message not in osc.column("volume message list", *newest, name="ID", cloud=DEMO)
    osc("volume service set", "--enable", host, "cinder-volume")
    osc("volume delete", "nowhere", cloud=DEMO)
    osc("volume host set", "--disable", host)
    assert "frozen" in osc.refused("volume create", "--size", "1", "never", cloud=DEMO)
    osc("volume host set", "--enable", host)
    assert osc.column("volume backend pool list") == [f"{host}#files"]
    osc("volume backend capability show", host)
    filters = osc.json("block storage resource filter list", *newest)
    assert "volume" in [each["Resource"] for each in filters]
    assert "status" in osc.json("block storage resource filter show", "volume", *newest)["Filters"]
    assert "Hosts" in osc.column("extension list", "--volume")
    assert osc.column("availability zone list", "--volume", name="Zone Name", cloud=DEMO) == ["nova"]
    osc("quota set", "--volumes", "20", "demo")
    limits = {each["Resource"]: each["Limit"] for each in osc.json("quota show", "--volume", "demo")}
    assert limits["volumes"] == 20
    assert 20 in osc.column("quota list", "--volume", name="Volumes")
    osc("quota delete", "--volume", "demo")
    assert "volume" in osc("limits show", "--absolute", cloud=DEMO)
    osc("volume delete", "system", cloud=DEMO)
    until(osc, "volume show", "system", "")
    assert osc.json("volume list", "--all-projects") == []
