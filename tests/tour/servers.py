"""The tour of servers: their life, what is done to them, their interfaces, images and consoles."""

import re

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO, ON_TEST_IMAGE, until, until_status


def life(osc: OpenStackClient) -> None:
    """Two servers that must be apart are created, changed, looked at, stopped, started, rebooted and deleted."""
    osc("keypair create", "tour-key", cloud=DEMO)
    osc("server group create", "--policy", "anti-affinity", "tour-apart", cloud=DEMO)
    osc("port create", "--network", "private", "its-port", cloud=DEMO)
    osc("server create", *ON_TEST_IMAGE, "--port", "its-port", "--server-group", "tour-apart", "two", cloud=DEMO)
    osc("server create", *ON_TEST_IMAGE, "--network", "private", "--key-name", "tour-key", "--property", "a=b",
        "--tag", "t", "--server-group", "tour-apart", "--wait", "one", cloud=DEMO)  # fmt: skip
    until_status(osc, "two", "ACTIVE")
    assert {row["Name"]: row["Status"] for row in osc.json("server list", cloud=DEMO)} == {
        "one": "ACTIVE",
        "two": "ACTIVE",
    }
    shown = osc.json("server show", "one", cloud=DEMO)
    assert (shown["status"], shown["key_name"], shown["properties"], shown["tags"]) == (
        "ACTIVE", "tour-key", {"a": "b"}, ["t"],
    )  # fmt: skip
    assert shown["addresses"]["private"]
    listed = osc.json("server list", "--all-projects", "--long")
    assert len({row["Host"] for row in listed if row["Name"] in ("one", "two")}) == 2
    [port] = osc.json("port list", "--device-id", shown["id"], "--long", cloud=DEMO)
    assert port["Status"] == "ACTIVE"
    assert len(osc.json("server group show", "tour-apart", cloud=DEMO)["members"]) == 2
    assert osc.column("server group list", cloud=DEMO) == ["tour-apart"]

    osc("server set", "--property", "c=d", "--tag", "t2", "--name", "uno", "one", cloud=DEMO)
    osc("server unset", "--property", "a", "--tag", "t", "uno", cloud=DEMO)
    shown = osc.json("server show", "uno", cloud=DEMO)
    assert (shown["properties"], shown["tags"]) == ({"c": "d"}, ["t2"])

    osc("server stop", "two", cloud=DEMO)
    assert "Complete" in osc("server reboot", "--wait", "uno", cloud=DEMO)
    until_status(osc, "two", "SHUTOFF")
    osc("server start", "two", cloud=DEMO)
    until_status(osc, "two", "ACTIVE")
    osc("server reboot", "--hard", "two", cloud=DEMO)
    until_status(osc, "two", "ACTIVE")
    events = osc.json("server event list", "two", cloud=DEMO)
    assert {event["Action"] for event in events} == {"create", "stop", "start", "reboot"}
    shown = osc.json("server event show", "two", events[-1]["Request ID"], cloud=DEMO)
    assert shown["action"] == "create"

    osc("server delete", "--wait", "uno", "two", cloud=DEMO)
    assert osc.json("server list", cloud=DEMO) == []
    # The port that the cloud made is gone; the one that the user made is there for the next server.
    assert osc.column("port list", "--network", "private", cloud=DEMO) == ["its-port"]
    assert osc.json("port show", "its-port", cloud=DEMO)["device_id"] == ""
    osc("port delete", "its-port", cloud=DEMO)
    osc("server group delete", "tour-apart", cloud=DEMO)
    osc("keypair delete", "tour-key", cloud=DEMO)
    assert osc.json("server group list", cloud=DEMO) == []


def consoles(osc: OpenStackClient) -> None:
    """The console's text, its addresses, and to which host an address leads."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "screen", cloud=DEMO)
    assert "login:" in osc("console log show", "screen", cloud=DEMO)
    assert len(osc("console log show", "--lines", "1", "screen", cloud=DEMO).strip().splitlines()) == 1
    token = ""
    for kind, page in (("novnc", "vnc_lite"), ("serial", "serial")):
        console = osc.json("console url show", f"--{kind}", "screen", cloud=DEMO)
        assert console["type"] == kind
        assert f"/console/{page}.html?" in console["url"]
        [token] = re.findall(r"token(?:=|%3D)([\w-]+)", console["url"])
    shown = osc.json("console connection show", token)
    server = osc.json("server show", "screen", cloud=DEMO)["id"]
    assert shown["instance_uuid"] == server
    shown = osc.json("usage show", "--project", "demo")
    assert server in [used["instance_id"] for used in shown["Servers"]]
    assert shown["RAM MB-Hours"] > 0
    assert shown["Project"] in osc.column("usage list", name="Project")
    assert osc.json("server volume list", "screen", cloud=DEMO) == []
    osc("server delete", "screen", cloud=DEMO)


def states(osc: OpenStackClient) -> None:
    """A server is paused, suspended, rescued, locked, reset, and rebuilt."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "still", cloud=DEMO)
    for command, status in (
        (("server pause",), "PAUSED"), (("server unpause",), "ACTIVE"),
        (("server suspend",), "SUSPENDED"), (("server resume",), "ACTIVE"),
        (("server rescue", "--password", "first-aid"), "RESCUE"), (("server dump create",), "RESCUE"),
        (("server unrescue",), "ACTIVE"), (("server set", "--password", "second"), "ACTIVE"),
    ):  # fmt: skip
        osc(*command, "still", cloud=DEMO)
        until_status(osc, "still", status)
    osc("server lock", "--reason", "for the tour", "still", cloud=DEMO)
    shown = osc.json("server show", "still", cloud=DEMO)
    assert (shown["locked"], shown["locked_reason"]) == (True, "for the tour")
    assert "locked" in osc.refused("server stop", "still", cloud=DEMO)
    osc("server unlock", "still", cloud=DEMO)
    osc("server set", "--auto-approve", "--state", "error", shown["id"])
    until_status(osc, "still", "ERROR")
    osc("server set", "--auto-approve", "--state", "active", shown["id"])
    until_status(osc, "still", "ACTIVE")
    osc("server shelve", "--offload", "still", cloud=DEMO)
    until_status(osc, "still", "SHELVED_OFFLOADED")
    osc("server unshelve", "still", cloud=DEMO)
    until_status(osc, "still", "ACTIVE")
    osc("server rebuild", "--property", "again=yes", "--description", "as new", "still", cloud=DEMO)
    shown = until_status(osc, "still", "ACTIVE")
    assert (shown["description"], shown["properties"]) == ("as new", {"again": "yes"})
    assert "rebuild" in osc.column("server event list", "still", name="Action", cloud=DEMO)
    assert "memory" in osc("server show", "--diagnostics", shown["id"])
    osc("server delete", "still", cloud=DEMO)


def images_of_servers(osc: OpenStackClient) -> None:
    """An image and daily backups of a server."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "model", cloud=DEMO)
    server = osc.json("server show", "model", cloud=DEMO)["id"]
    osc("server image create", "--name", "of-model", "--property", "of=tour", "--wait", "model", cloud=DEMO)
    for name in ("monday", "tuesday"):
        osc("server backup create", "--name", name, "--type", "daily", "--rotate", "1", "model", cloud=DEMO)
        until_status(osc, "model", "ACTIVE")
    made = osc.column("image list", "--private", cloud=DEMO)
    assert sorted(made) == ["of-model", "tuesday"]
    image = osc.json("image show", "of-model", cloud=DEMO)
    assert (image["status"], image["properties"]["instance_uuid"], image["properties"]["of"]) == (
        "active", server, "tour",
    )  # fmt: skip
    osc("image delete", *made, cloud=DEMO)
    osc("server delete", "model", cloud=DEMO)


def interfaces(osc: OpenStackClient) -> None:
    """Ports, addresses, floating IPs and security groups of a server come and go."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "plugged", cloud=DEMO)
    osc("port create", "--network", "private", "another", cloud=DEMO)
    osc("server add port", "plugged", "another", cloud=DEMO)
    osc("server add network", "plugged", "private", cloud=DEMO)
    osc("server add fixed ip", "plugged", "private", cloud=DEMO)
    assert len(osc.json("port list", "--server", "plugged", cloud=DEMO)) == 3
    addresses = osc.json("server show", "plugged", cloud=DEMO)["addresses"]["private"]
    assert len(addresses) == 3

    floating = osc.json("floating ip create", "public", cloud=DEMO)["floating_ip_address"]
    osc("server add floating ip", "plugged", floating, cloud=DEMO)
    assert floating in osc("server show", "plugged", cloud=DEMO)
    osc("server remove floating ip", "plugged", floating, cloud=DEMO)
    assert osc.json("floating ip show", floating, cloud=DEMO)["port_id"] is None
    osc("floating ip delete", floating, cloud=DEMO)

    osc("security group create", "tour-guard", cloud=DEMO)
    osc("server add security group", "plugged", "tour-guard", cloud=DEMO)
    assert "tour-guard" in str(osc.json("server show", "plugged", cloud=DEMO)["security_groups"])
    osc("server remove security group", "plugged", "tour-guard", cloud=DEMO)
    assert "tour-guard" not in str(osc.json("server show", "plugged", cloud=DEMO)["security_groups"])
    osc("security group delete", "tour-guard", cloud=DEMO)

    fixed = osc.json("port show", "another", cloud=DEMO)["fixed_ips"][0]["ip_address"]
    # A user may not choose addresses of a network that is not its own.
    address = next(other for other in addresses if other != fixed)
    remove = ("server remove fixed ip", "--os-compute-api-version", "2.43")
    assert "403" in osc.refused(*remove, "plugged", address, cloud=DEMO)
    osc(*remove, osc.json("server show", "plugged", cloud=DEMO)["id"], address)
    until(lambda: len(osc.json("server show", "plugged", cloud=DEMO)["addresses"]["private"]) == 2)
    osc("server remove port", "plugged", "another", cloud=DEMO)
    until(lambda: osc.json("port show", "another", cloud=DEMO)["device_id"] == "")
    osc("server remove network", "plugged", "private", cloud=DEMO)
    until(lambda: osc.json("port list", "--server", "plugged", cloud=DEMO) == [])
    osc("port delete", "another", cloud=DEMO)
    osc("server delete", "--wait", "plugged", cloud=DEMO)


def project_cleanup(osc: OpenStackClient) -> None:
    """All that a project has is removed by one command."""
    osc("project create", "untidy")
    osc("user create", "--project", "untidy", "--password", "secret-1", "owner")
    for role in ("member", "reader"):
        osc("role add", "--project", "untidy", "--user", "owner", role)
    auth = ("--os-username", "owner", "--os-password", "secret-1", "--os-project-name", "untidy")
    osc("network create", "clutter", *auth)
    osc("subnet create", "--network", "clutter", "--subnet-range", "10.98.0.0/24", "clutter", *auth)
    osc("server create", *ON_TEST_IMAGE, "--network", "clutter", "--wait", "forgotten", *auth)
    assert "forgotten" in osc("project cleanup", "--dry-run", "--auth-project", *auth)
    assert osc.column("server list", *auth) == ["forgotten"]
    osc("project cleanup", "--auto-approve", "--auth-project", *auth)
    assert osc.json("server list", *auth) == []
    assert "clutter" not in osc.column("network list", *auth)
    osc("user delete", "owner")
    osc("project delete", "untidy")


def fifty_at_once(osc: OpenStackClient) -> None:
    """Fifty servers by one command."""
    create = (*ON_TEST_IMAGE, "--no-network", "--min", "50", "--max", "50", "--wait")
    osc("server create", *create, "many", cloud=DEMO)
    servers = osc.json("server list", "--name", "many", cloud=DEMO)
    assert {server["Name"] for server in servers} == {f"many-{number}" for number in range(1, 51)}
    assert {server["Status"] for server in servers} == {"ACTIVE"}
    limits = {row["Name"]: row["Value"] for row in osc.json("limits show", "--absolute", cloud=DEMO)}
    assert limits["total_instances_used"] >= 50
    osc("server delete", *(server["ID"] for server in servers), cloud=DEMO)
    until(lambda: osc.json("server list", "--name", "many", cloud=DEMO) == [])


def mistakes(osc: OpenStackClient) -> None:
    """The client's error is our message, which says what is wrong."""
    create = ("server create", "--image", "test-image", "--no-network")
    assert "No Flavor found" in osc.refused(*create, "--flavor", "m1.gigantic", "x")
    assert "Invalid key_name" in osc.refused(*create, "--flavor", "m1.tiny", "--key-name", "nobodys", "x", cloud=DEMO)
    assert "disk" in osc.refused("flavor create", "--ram", "1", "--disk", "-1", "--vcpus", "1", "x")
    assert "already" in osc.refused("flavor create", "--ram", "1", "--disk", "1", "--vcpus", "1", "m1.tiny")
    assert "Quota exceeded" in osc.refused(*create, "--flavor", "m1.tiny", "--min", "201", "--max", "201", "x")
    assert "No Server found" in osc.refused("server show", "nothing", cloud=DEMO)
    assert "401" in osc.refused("token issue", "--os-password", "wrong")
