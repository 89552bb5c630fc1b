"""The tour of images."""

from pathlib import Path

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO


def images(osc: OpenStackClient, directory: Path) -> None:
    """An image is uploaded, changed, shared, switched off and on, and downloaded."""
    assert "test-image" in osc.column("image list", cloud=DEMO)
    disk = directory / "disk.raw"
    disk.write_bytes(b"\0" * 4096 + b"the end")
    made = osc.json("image create", "--file", str(disk), "--disk-format", "raw", "tour-image")
    osc("image set", "--property", "hw_disk_bus=virtio", "--tag", "t1", "tour-image")
    shown = osc.json("image show", "tour-image")
    assert (shown["id"], shown["status"], shown["size"]) == (made["id"], "active", 4103)
    assert (shown["tags"], shown["properties"]["hw_disk_bus"]) == (["t1"], "virtio")
    osc("image unset", "--property", "hw_disk_bus", "--tag", "t1", "tour-image")
    assert osc.json("image show", "tour-image")["tags"] == []
    osc("image save", "--file", str(directory / "saved"), "tour-image")
    assert (directory / "saved").read_bytes() == disk.read_bytes()
    osc("image set", "--deactivate", "tour-image")
    assert osc.json("image show", "tour-image")["status"] == "deactivated"
    osc("image set", "--activate", "tour-image")

    # Another project sees it when it is shared with it, and has accepted.
    assert "tour-image" not in osc.column("image list", cloud=DEMO)
    demo = osc.json("project show", "demo")["id"]
    osc("image set", "--shared", "tour-image")
    osc("image add project", "tour-image", "demo")
    assert osc.column("image member list", "tour-image", name="Member ID") == [demo]
    assert osc.json("image member get", "tour-image", demo)["status"] == "pending"
    osc("image set", "--accept", made["id"], cloud=DEMO)
    assert osc.json("image member get", "tour-image", demo)["status"] == "accepted"
    assert "tour-image" in osc.column("image list", cloud=DEMO)
    osc("image remove project", "tour-image", "demo")
    assert "tour-image" not in osc.column("image list", cloud=DEMO)
    osc("image delete", "tour-image")
    assert "tour-image" not in osc.column("image list")


def imports(osc: OpenStackClient, directory: Path) -> None:
    """An image in two steps: its data are staged, then imported."""
    assert "glance-direct" in osc("image import info")
    assert len(osc.json("image stores list")) == 1
    disk = directory / "staged.raw"
    disk.write_bytes(b"\0" * 512)
    osc("image create", "--disk-format", "raw", "--container-format", "bare", "staged", cloud=DEMO)
    assert osc.json("image show", "staged", cloud=DEMO)["status"] == "queued"
    osc("image stage", "--file", str(disk), "staged", cloud=DEMO)
    assert osc.json("image show", "staged", cloud=DEMO)["status"] == "uploading"
    osc("image import", "--method", "glance-direct", "--wait", "staged", cloud=DEMO)
    shown = osc.json("image show", "staged", cloud=DEMO)
    assert (shown["status"], shown["size"]) == ("active", 512)
    osc("image delete", "staged", cloud=DEMO)


def metadata_definitions(osc: OpenStackClient) -> None:
    """A namespace that describes properties of images, with objects, properties and resource types."""
    osc("image metadef namespace create", "--display-name", "Of the tour", "Tour::Things")
    osc(
        "image metadef namespace set",
        "--display-name",
        "Of the tour",
        "--description",
        "what tours have",
        "--public",
        "Tour::Things",
    )
    shown = osc.json("image metadef namespace show", "Tour::Things")
    assert (shown["display_name"], shown["description"]) == ("Of the tour", "what tours have")
    assert "Tour::Things" in osc.column("image metadef namespace list", name="namespace", cloud=DEMO)

    osc("image metadef object create", "--namespace", "Tour::Things", "guide")
    osc("image metadef object update", "--name", "leader", "Tour::Things", "guide")
    assert osc.column("image metadef object list", "Tour::Things", name="name") == ["leader"]
    assert osc.json("image metadef object show", "Tour::Things", "leader")["name"] == "leader"
    osc("image metadef object delete", "Tour::Things", "leader")
    assert osc.json("image metadef object list", "Tour::Things") == []

    osc("image metadef property create", "--name", "stars", "--title", "Stars", "--type", "integer",
        "--schema", '{"minimum": 1}', "Tour::Things")  # fmt: skip
    osc("image metadef property set", "--title", "Number of stars", "Tour::Things", "stars")
    assert osc.json("image metadef property show", "Tour::Things", "stars")["title"] == "Number of stars"
    assert osc.column("image metadef property list", "Tour::Things", name="name") == ["stars"]
    osc("image metadef property delete", "Tour::Things", "stars")
    assert osc.json("image metadef property list", "Tour::Things") == []

    assert "OS::Nova::Server" in osc.column("image metadef resource type list")
    osc("image metadef resource type association create", "Tour::Things", "OS::Nova::Server")
    associated = osc.json("image metadef resource type association list", "Tour::Things")
    assert [row["Name"] for row in associated] == ["OS::Nova::Server"]
    osc("image metadef resource type association delete", "Tour::Things", "OS::Nova::Server")
    osc("image metadef namespace delete", "Tour::Things")
    assert "Tour::Things" not in osc.column("image metadef namespace list", name="namespace")


def tasks(osc: OpenStackClient) -> None:
    """What the image service has imported, for administrators."""
    listed = osc.json("image task list")
    assert "api_image_import" in {row["Type"] for row in listed}
    assert osc.json("image task show", listed[0]["ID"])["status"] == listed[0]["Status"]
