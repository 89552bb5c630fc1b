"""A tour of the cloud with the real `openstack` client, unmodified, against `micronova up`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command import UpCloud
from tests.osc import OpenStackClient

pytestmark = pytest.mark.timeout(300)

SETTINGS = "[quota]\ninstances = 200\ncores = 400\nram = 1000000\n"
DEMO = "micronova-demo"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCloud]:
    """A cloud with several hosts and room for many servers."""
    cloud = UpCloud(tmp_path_factory.mktemp("tour") / "cloud", "--hosts", "4", settings=SETTINGS)
    cloud.up()
    yield cloud
    cloud.down()
    assert "Traceback" not in cloud.log


@pytest.fixture(scope="module")
def osc(cloud: UpCloud) -> Iterator[OpenStackClient]:
    """The client; all tests share its interpreter."""
    client = OpenStackClient(cloud.directory / "clouds.yaml")
    yield client
    client.close()


def test_where_everything_is(osc: OpenStackClient) -> None:
    assert osc.json("token issue")["project_id"] == osc.json("project show", "admin")["id"]
    assert {"nova", "keystone", "glance", "neutron"} <= set(osc.column("catalog list"))
    assert "/compute/v2.1" in str(osc.json("catalog show", "compute"))
    assert {"compute", "image"} <= set(osc.column("versions show", name="Service Type"))
    assert "compute" in osc.column("service list", name="Type")
    assert len(osc.json("endpoint list", "--service", "compute")) == 3
    assert osc.column("region list", name="Region") == ["RegionOne"]
    assert "Default" in osc.column("domain list")
    assert osc.json("domain show", "default")["name"] == "Default"
    assert "os-server-groups" in osc.column("extension list", "--compute", name="Alias")
    assert "security-group" in osc.column("extension list", "--network", name="Alias")


def test_people(osc: OpenStackClient) -> None:
    project = osc.json("project create", "--description", "an outing", "tour")["id"]
    osc("project set", "--tag", "fun", "tour")
    assert osc.json("project show", "tour")["tags"] == ["fun"]
    assert "tour" in osc.column("project list")
    osc("user create", "--project", "tour", "--password", "secret-1", "traveller")
    osc("user set", "--email", "t@example.org", "traveller")
    assert osc.json("user show", "traveller")["email"] == "t@example.org"
    assert "traveller" in osc.column("user list")

    assert {"admin", "manager", "member", "reader", "service"} <= set(osc.column("role list"))
    osc("role create", "guide")
    osc("role set", "--name", "pathfinder", "guide")
    assert osc.json("role show", "pathfinder")["name"] == "pathfinder"
    osc("role add", "--project", "tour", "--user", "traveller", "member")
    [given] = osc.json("role assignment list", "--project", "tour", "--names")
    assert (given["Role"], given["User"]) == ("member", "traveller@Default")

    # The new user logs in with its own password, and sees its own project only.
    auth = ("--os-username", "traveller", "--os-password", "secret-1", "--os-project-name", "tour")
    assert osc.json("token issue", *auth)["project_id"] == project
    assert osc.column("project list", *auth) == ["tour"]
    osc("role remove", "--project", "tour", "--user", "traveller", "member")
    assert "401" in osc.refused("token issue", *auth)

    osc("group create", "travellers")
    osc("group add user", "travellers", "traveller")
    assert "traveller in group travellers" in osc("group contains user", "travellers", "traveller")
    assert "travellers" in osc.column("group list")
    osc("group remove user", "travellers", "traveller")
    osc("group delete", "travellers")

    made = osc.json("application credential create", "ticket")
    assert made["Secret"]
    assert osc.column("application credential list") == ["ticket"]
    assert osc.json("application credential show", "ticket")["ID"] == made["ID"]
    osc("application credential delete", "ticket")

    osc("role delete", "pathfinder")
    osc("user delete", "traveller")
    osc("project delete", "tour")
    assert "tour" not in osc.column("project list")


def test_flavors_and_keys(osc: OpenStackClient, tmp_path: Path) -> None:
    assert {"m1.tiny", "m1.small", "m1.medium", "m1.large", "m1.xlarge"} <= set(osc.column("flavor list"))
    osc("flavor create", "--ram", "64", "--disk", "1", "--vcpus", "1", "--private", "hidden")
    osc("flavor set", "--property", "hw:cpu_policy=shared", "--project", "demo", "hidden")
    shown = osc.json("flavor show", "hidden")
    assert shown["properties"] == {"hw:cpu_policy": "shared"}
    assert len(shown["access_project_ids"]) == 1
    assert "hidden" in osc.column("flavor list", "--all", cloud=DEMO)
    osc("flavor unset", "--property", "hw:cpu_policy", "--project", "demo", "hidden")
    assert "hidden" not in osc.column("flavor list", "--all", cloud=DEMO)
    osc("flavor delete", "hidden")

    private = osc("keypair create", "mine", cloud=DEMO)
    assert "PRIVATE KEY" in private
    assert osc.column("keypair list", cloud=DEMO) == ["mine"]
    public = tmp_path / "key.pub"
    public.write_text(osc("keypair show", "--public-key", "mine", cloud=DEMO))
    osc("keypair create", "--public-key", str(public), "again", cloud=DEMO)
    fingerprints = {osc.json("keypair show", name, cloud=DEMO)["fingerprint"] for name in ("mine", "again")}
    assert len(fingerprints) == 1
    osc("keypair delete", "mine", "again", cloud=DEMO)
    assert osc.json("keypair list", cloud=DEMO) == []


def test_images(osc: OpenStackClient, tmp_path: Path) -> None:
    assert "test-image" in osc.column("image list", cloud=DEMO)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(b"\0" * 4096 + b"the end")
    made = osc.json("image create", "--file", str(disk), "--disk-format", "raw", "tour-image")
    osc("image set", "--property", "hw_disk_bus=virtio", "--tag", "t1", "tour-image")
    shown = osc.json("image show", "tour-image")
    assert (shown["id"], shown["status"], shown["size"]) == (made["id"], "active", 4103)
    assert (shown["tags"], shown["properties"]["hw_disk_bus"]) == (["t1"], "virtio")
    osc("image unset", "--property", "hw_disk_bus", "--tag", "t1", "tour-image")
    assert osc.json("image show", "tour-image")["tags"] == []
    osc("image save", "--file", str(tmp_path / "saved"), "tour-image")
    assert (tmp_path / "saved").read_bytes() == disk.read_bytes()

    # Another project sees it when it is shared with it, and has accepted.
    assert "tour-image" not in osc.column("image list", cloud=DEMO)
    demo = osc.json("project show", "demo")["id"]
    osc("image set", "--shared", "tour-image")
    osc("image add project", "tour-image", "demo")
    assert osc.column("image member list", "tour-image", name="Member ID") == [demo]
    osc("image set", "--accept", made["id"], cloud=DEMO)
    assert "tour-image" in osc.column("image list", cloud=DEMO)
    osc("image remove project", "tour-image", "demo")
    assert "tour-image" not in osc.column("image list", cloud=DEMO)
    assert "glance-direct" in osc("image import info")
    osc("image delete", "tour-image")
    assert "tour-image" not in osc.column("image list")


def test_networks(osc: OpenStackClient) -> None:
    assert osc.column("network list", "--internal", cloud=DEMO) == ["private"]
    osc("network create", "tour-net", cloud=DEMO)
    osc("network set", "--description", "scenic", "--tag", "t", "tour-net", cloud=DEMO)
    shown = osc.json("network show", "tour-net", cloud=DEMO)
    assert (shown["description"], shown["tags"], shown["status"]) == ("scenic", ["t"], "ACTIVE")
    osc("network unset", "--tag", "t", "tour-net", cloud=DEMO)

    osc("subnet create", "--network", "tour-net", "--subnet-range", "10.99.0.0/24", "tour-subnet", cloud=DEMO)
    osc("subnet set", "--dns-nameserver", "10.99.0.2", "tour-subnet", cloud=DEMO)
    shown = osc.json("subnet show", "tour-subnet", cloud=DEMO)
    assert (shown["gateway_ip"], shown["dns_nameservers"]) == ("10.99.0.1", ["10.99.0.2"])
    assert "tour-subnet" in osc.column("subnet list", cloud=DEMO)

    osc("security group create", "tour-group", cloud=DEMO)
    osc("security group set", "--description", "ssh", "tour-group", cloud=DEMO)
    rule = osc.json("security group rule create", "--protocol", "tcp", "--dst-port", "22", "tour-group", cloud=DEMO)
    assert rule["id"] in osc.column("security group rule list", "tour-group", name="ID", cloud=DEMO)
    assert osc.json("security group rule show", rule["id"], cloud=DEMO)["port_range_min"] == 22
    osc("security group rule delete", rule["id"], cloud=DEMO)
    assert len(osc.json("security group show", "tour-group", cloud=DEMO)["rules"]) == 2
    assert set(osc.column("security group list", cloud=DEMO)) == {"default", "tour-group"}

    osc("port create", "--network", "tour-net", "--security-group", "tour-group", "tour-port", cloud=DEMO)
    osc("port set", "--fixed-ip", "ip-address=10.99.0.77", "--tag", "t", "tour-port", cloud=DEMO)
    shown = osc.json("port show", "tour-port", cloud=DEMO)
    assert "10.99.0.77" in [address["ip_address"] for address in shown["fixed_ips"]]
    osc("port unset", "--tag", "t", "tour-port", cloud=DEMO)
    assert osc.column("port list", "--network", "tour-net", cloud=DEMO) == ["tour-port"]

    osc("router create", "tour-router", cloud=DEMO)
    osc("router add subnet", "tour-router", "tour-subnet", cloud=DEMO)
    assert "10.99.0.1" in osc("router show", "tour-router", cloud=DEMO)
    assert "tour-router" in osc.column("router list", cloud=DEMO)
    osc("router set", "--external-gateway", "public", "tour-router", cloud=DEMO)
    floating = osc.json("floating ip create", "--port", "tour-port", "--fixed-ip-address", "10.99.0.77", "public",
                        cloud=DEMO)  # fmt: skip
    assert osc.json("floating ip show", floating["id"], cloud=DEMO)["fixed_ip_address"] == "10.99.0.77"
    assert len(osc.json("floating ip list", cloud=DEMO)) == 1
    osc("floating ip delete", floating["id"], cloud=DEMO)
    osc("router unset", "--external-gateway", "tour-router", cloud=DEMO)
    osc("router remove subnet", "tour-router", "tour-subnet", cloud=DEMO)
    osc("router delete", "tour-router", cloud=DEMO)

    osc("subnet pool create", "--pool-prefix", "10.200.0.0/16", "tour-pool", cloud=DEMO)
    assert osc.json("subnet pool show", "tour-pool", cloud=DEMO)["prefixes"] == ["10.200.0.0/16"]
    assert "tour-pool" in osc.column("subnet pool list", cloud=DEMO)
    osc("subnet pool delete", "tour-pool", cloud=DEMO)

    assert osc.json("ip availability show", "tour-net")["used_ips"] >= 1
    assert "tour-net" in osc.column("ip availability list", name="Network Name")
    osc("network agent list")
    osc("port delete", "tour-port", cloud=DEMO)
    osc("subnet delete", "tour-subnet", cloud=DEMO)
    osc("network delete", "tour-net", cloud=DEMO)
    osc("security group delete", "tour-group", cloud=DEMO)
    assert osc.column("network list", "--internal", cloud=DEMO) == ["private"]


def test_hosts(osc: OpenStackClient) -> None:
    hosts = [f"fake-{number}" for number in range(1, 5)]
    assert sorted(osc.column("hypervisor list", name="Hypervisor Hostname")) == hosts
    assert osc.json("hypervisor show", "fake-1")["state"] == "up"
    assert osc.json("hypervisor stats show")["count"] == 4
    services = osc.json("compute service list")
    assert {service["Binary"] for service in services} == {"nova-compute", "nova-conductor", "nova-scheduler"}
    assert {service["State"] for service in services} == {"up"}
    osc("compute service set", "--disable", "--disable-reason", "tour", "fake-4", "nova-compute")
    [service] = osc.json("compute service list", "--host", "fake-4", "--long")
    assert (service["Status"], service["Disabled Reason"]) == ("disabled", "tour")
    osc("compute service set", "--enable", "fake-4", "nova-compute")
    assert "fake-1" in osc.column("host list", name="Host Name")
    osc("host show", "fake-1")

    osc("aggregate create", "--zone", "tour-zone", "tour-hosts")
    osc("aggregate add host", "tour-hosts", "fake-4")
    osc("aggregate set", "--property", "ssd=true", "tour-hosts")
    shown = osc.json("aggregate show", "tour-hosts")
    assert (shown["hosts"], shown["properties"]) == (["fake-4"], {"ssd": "true"})
    assert osc.column("aggregate list") == ["tour-hosts"]
    assert set(osc.column("availability zone list", "--compute", name="Zone Name", cloud=DEMO)) == {"nova", "tour-zone"}
    osc("aggregate unset", "--property", "ssd", "tour-hosts")
    osc("aggregate remove host", "tour-hosts", "fake-4")
    osc("aggregate delete", "tour-hosts")

    for command in ("hypervisor list", "compute service list", "aggregate list", "user list"):
        assert "403" in osc.refused(command, cloud=DEMO)


def test_limits(osc: OpenStackClient) -> None:
    limits = {row["Name"]: row["Value"] for row in osc.json("limits show", "--absolute", cloud=DEMO)}
    assert (limits["max_total_instances"], limits["total_instances_used"]) == (200, 0)
    osc("quota set", "--instances", "77", "--networks", "7", "demo")
    shown = {row["Resource"]: row["Limit"] for row in osc.json("quota show", "demo")}
    assert (shown["instances"], shown["networks"]) == (77, 7)
    assert osc.column("quota list", "--compute", name="Instances") == [77]
    osc("quota delete", "demo")
    shown = {row["Resource"]: row["Limit"] for row in osc.json("quota show", "demo")}
    assert (shown["instances"], shown["networks"]) == (200, 100)
    osc("quota show", "--default", cloud=DEMO)


def test_life_of_a_server(osc: OpenStackClient) -> None:
    """With processes of their own for what takes long, side by side."""
    create = ("--image", "test-image", "--flavor", "m1.tiny", "--wait")
    osc("keypair create", "tour-key", cloud=DEMO)
    osc("server group create", "--policy", "anti-affinity", "tour-apart", cloud=DEMO)
    osc("port create", "--network", "private", "its-port", cloud=DEMO)
    waiting = [
        osc.start("server create", *create, "--network", "private", "--key-name", "tour-key", "--property", "a=b",
                  "--tag", "t", "--server-group", "tour-apart", "one", cloud=DEMO),
        osc.start("server create", *create, "--port", "its-port", "--server-group", "tour-apart", "two", cloud=DEMO),
    ]  # fmt: skip
    for process in waiting:
        osc.finish(process, "server create")
    assert {row["Name"]: row["Status"] for row in osc.json("server list", cloud=DEMO)} == {
        "one": "ACTIVE",
        "two": "ACTIVE",
    }
    shown = osc.json("server show", "one", cloud=DEMO)
    assert (shown["status"], shown["key_name"], shown["properties"], shown["tags"]) == (
        "ACTIVE", "tour-key", {"a": "b"}, ["t"],
    )  # fmt: skip
    assert shown["addresses"]["private"]
    hosts = {osc.json("server show", name)["OS-EXT-SRV-ATTR:host"] for name in _ids(osc)}
    assert len(hosts) == 2
    [port] = osc.json("port list", "--device-id", shown["id"], "--long", cloud=DEMO)
    assert port["Status"] == "ACTIVE"
    assert len(osc.json("server group show", "tour-apart", cloud=DEMO)["members"]) == 2
    assert osc.column("server group list", cloud=DEMO) == ["tour-apart"]

    osc("server set", "--property", "c=d", "--tag", "t2", "--name", "uno", "one", cloud=DEMO)
    osc("server unset", "--property", "a", "--tag", "t", "uno", cloud=DEMO)
    shown = osc.json("server show", "uno", cloud=DEMO)
    assert (shown["properties"], shown["tags"]) == ({"c": "d"}, ["t2"])
    assert "login:" in osc("console log show", "uno", cloud=DEMO)
    assert len(osc("console log show", "--lines", "1", "uno", cloud=DEMO).strip().splitlines()) == 1
    for kind, page in (("novnc", "vnc_lite"), ("serial", "serial")):
        console = osc.json("console url show", f"--{kind}", "uno", cloud=DEMO)
        assert console["type"] == kind
        assert f"/console/{page}.html?" in console["url"]

    osc("server stop", "two", cloud=DEMO)
    soft = osc.start("server reboot", "--wait", "uno", cloud=DEMO)
    _until_status(osc, "two", "SHUTOFF")
    osc("server start", "two", cloud=DEMO)
    _until_status(osc, "two", "ACTIVE")
    hard = osc.start("server reboot", "--hard", "--wait", "two", cloud=DEMO)
    for process in (soft, hard):
        assert "Complete" in osc.finish(process, "server reboot")
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


def test_what_is_done_to_a_server(osc: OpenStackClient, cloud: UpCloud) -> None:
    """It is paused, suspended, locked and reset, and gets and loses interfaces."""
    osc("server create", "--image", "test-image", "--flavor", "m1.tiny", "--no-network", "--wait", "still", cloud=DEMO)
    for action, status in (("pause", "PAUSED"), ("unpause", "ACTIVE"), ("suspend", "SUSPENDED"), ("resume", "ACTIVE")):
        osc(f"server {action}", "still", cloud=DEMO)
        _until_status(osc, "still", status)
    osc("server lock", "--reason", "for the tour", "still", cloud=DEMO)
    shown = osc.json("server show", "still", cloud=DEMO)
    assert (shown["locked"], shown["locked_reason"]) == (True, "for the tour")
    assert "locked" in osc.refused("server stop", "still", cloud=DEMO)
    osc("server unlock", "still", cloud=DEMO)
    id = osc.json("server show", "still", cloud=DEMO)["id"]
    osc("server set", "--auto-approve", "--state", "error", id)
    _until_status(osc, "still", "ERROR")
    osc("server set", "--auto-approve", "--state", "active", id)
    _until_status(osc, "still", "ACTIVE")

    osc("port create", "--network", "private", "another", cloud=DEMO)
    osc("server add port", "still", "another", cloud=DEMO)
    osc("server add network", "still", "private", cloud=DEMO)
    osc("server add fixed ip", "still", "private", cloud=DEMO)
    assert len(osc.json("port list", "--server", "still", cloud=DEMO)) == 3
    assert len(osc.json("server show", "still", cloud=DEMO)["addresses"]["private"]) == 3
    assert "memory" in osc("server show", "--diagnostics", id)
    osc("server remove port", "still", "another", cloud=DEMO)
    _until(lambda: len(osc.json("port list", "--server", "still", cloud=DEMO)) == 2)
    assert osc.json("port show", "another", cloud=DEMO)["device_id"] == ""
    osc("server remove network", "still", "private", cloud=DEMO)
    _until(lambda: osc.json("port list", "--server", "still", cloud=DEMO) == [])
    osc("server delete", "--wait", "still", cloud=DEMO)
    osc("port delete", "another", cloud=DEMO)
    assert cloud.audit() == []


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline


def _ids(osc: OpenStackClient) -> list[str]:
    return osc.column("server list", name="ID", cloud=DEMO)


def _until_status(osc: OpenStackClient, server: str, status: str) -> None:
    deadline = time.monotonic() + 30
    while (found := osc.json("server show", server, cloud=DEMO)["status"]) != status:
        assert time.monotonic() < deadline, f"{server} is {found}"


def test_fifty_servers_at_once(osc: OpenStackClient, cloud: UpCloud) -> None:
    create = ("--image", "test-image", "--flavor", "m1.tiny", "--no-network", "--min", "50", "--max", "50", "--wait")
    osc("server create", *create, "many", cloud=DEMO)
    servers = osc.json("server list", cloud=DEMO)
    assert {server["Name"] for server in servers} == {f"many-{number}" for number in range(1, 51)}
    assert {server["Status"] for server in servers} == {"ACTIVE"}
    assert sum(row["Value"] for row in osc.json("limits show", "--absolute", cloud=DEMO)
               if row["Name"] == "total_instances_used") == 50  # fmt: skip
    assert cloud.audit() == []
    osc("server delete", *(server["ID"] for server in servers), cloud=DEMO)
    deadline = time.monotonic() + 30
    while left := osc.json("server list", cloud=DEMO):
        assert time.monotonic() < deadline, left


def test_what_users_get_wrong(osc: OpenStackClient) -> None:
    """The client's error is our message, which says what is wrong."""
    create = ("server create", "--image", "test-image", "--no-network")
    assert "No Flavor found" in osc.refused(*create, "--flavor", "m1.gigantic", "x")
    assert "Invalid key_name" in osc.refused(*create, "--flavor", "m1.tiny", "--key-name", "nobodys", "x", cloud=DEMO)
    assert "disk" in osc.refused("flavor create", "--ram", "1", "--disk", "-1", "--vcpus", "1", "x")
    assert "already" in osc.refused("flavor create", "--ram", "1", "--disk", "1", "--vcpus", "1", "m1.tiny")
    assert "Quota exceeded" in osc.refused(*create, "--flavor", "m1.tiny", "--min", "201", "--max", "201", "x")
    assert "No Server found" in osc.refused("server show", "nothing", cloud=DEMO)
    assert "401" in osc.refused("token issue", "--os-password", "wrong")


def test_nothing_is_left(osc: OpenStackClient, cloud: UpCloud, request: pytest.FixtureRequest) -> None:
    """After the tour the audit is clean, and the tour used at least 60 commands."""
    assert cloud.audit() == []
    ran = {item.name for item in request.session.items if item.path == request.path}
    if all(name in ran for name in globals() if name.startswith("test_")):
        assert len(osc.commands) >= 60, sorted(osc.commands)
