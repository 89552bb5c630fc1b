"""The tour of hosts: hypervisors, services, aggregates and zones."""

import re

from tests.command import UpCloud
from tests.osc import OpenStackClient
from tests.tour.steps import DEMO, until


def hosts(osc: OpenStackClient) -> None:
    """What there is, and whether it is up."""
    names = [f"fake-{number}" for number in range(1, 5)]
    assert sorted(osc.column("hypervisor list", name="Hypervisor Hostname")) == names
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
    assert osc.json("host show", "fake-1")[0]["Project"] == "(total)"
    for command in ("hypervisor list", "compute service list", "aggregate list", "user list"):
        assert "403" in osc.refused(command, cloud=DEMO)


def aggregates(osc: OpenStackClient, cloud: UpCloud) -> None:
    """Hosts as a group with properties, which is a zone for users."""
    osc("aggregate create", "--zone", "tour-zone", "tour-hosts")
    osc("aggregate add host", "tour-hosts", "fake-4")
    osc("aggregate set", "--property", "ssd=true", "tour-hosts")
    shown = osc.json("aggregate show", "tour-hosts")
    assert (shown["hosts"], shown["properties"]) == (["fake-4"], {"ssd": "true"})
    assert osc.column("aggregate list") == ["tour-hosts"]
    assert set(osc.column("availability zone list", "--compute", name="Zone Name", cloud=DEMO)) == {"nova", "tour-zone"}
    osc("aggregate cache image", "tour-hosts", "test-image")
    # A server of another part of the tour may have had the image on this host.
    done = re.compile("on the 1 hosts of aggregate tour-hosts: 1 (cached|existing)")
    until(lambda: done.search(cloud.log) is not None)
    osc("aggregate unset", "--property", "ssd", "tour-hosts")
    assert osc.json("aggregate show", "tour-hosts")["properties"] == {}
    osc("aggregate remove host", "tour-hosts", "fake-4")
    osc("aggregate delete", "tour-hosts")
    assert osc.json("aggregate list") == []


def maintenance(osc: OpenStackClient) -> None:
    """A host takes no servers, and one leaves for good."""
    osc("host set", "--disable", "fake-3")
    [service] = osc.json("compute service list", "--host", "fake-3", "--long")
    assert service["Status"] == "disabled"
    osc("host set", "--enable", "fake-3")
    osc("compute service set", "--down", "fake-3", "nova-compute")
    [service] = osc.json("compute service list", "--host", "fake-3", "--long")
    assert (service["State"], service["Forced Down"]) == ("down", True)
    osc("compute service set", "--up", "fake-3", "nova-compute")
