"""The tour of moves: resize, cold and live migration, evacuation."""

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO, ON_TEST_IMAGE, until, until_status


def resizes(osc: OpenStackClient) -> None:
    """A server gets another flavor, and its owner takes it or not."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "growing", cloud=DEMO)
    osc("server resize", "--flavor", "m1.small", "growing", cloud=DEMO)
    shown = until_status(osc, "growing", "VERIFY_RESIZE")
    assert shown["flavor"]["name"] == "m1.small"
    osc("server resize revert", "growing", cloud=DEMO)
    shown = until_status(osc, "growing", "ACTIVE")
    assert shown["flavor"]["name"] == "m1.tiny"
    osc("server resize", "--flavor", "m1.small", "growing", cloud=DEMO)
    until_status(osc, "growing", "VERIFY_RESIZE")
    osc("server resize confirm", "growing", cloud=DEMO)
    shown = until_status(osc, "growing", "ACTIVE")
    assert shown["flavor"]["name"] == "m1.small"
    osc("server delete", "growing", cloud=DEMO)


def migrations(osc: OpenStackClient) -> None:
    """An administrator moves a server to another host, in each of the ways that the client has."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "moving", cloud=DEMO)
    server = osc.json("server show", "moving", cloud=DEMO)["id"]
    home = _host(osc, server)
    for answer, moved in (
        ("server migrate revert", False), ("server migration revert", False),
        ("server migrate confirm", True), ("server migration confirm", True),
    ):  # fmt: skip
        osc("server migrate", server)
        until_status(osc, "moving", "VERIFY_RESIZE")
        there = _host(osc, server)
        assert there != home
        osc(answer, server)
        until_status(osc, "moving", "ACTIVE")
        assert _host(osc, server) == (there if moved else home)
        home = there if moved else home
    listed = osc.json("server migration list", "--server", server)
    assert sorted(row["Status"] for row in listed) == ["confirmed", "confirmed", "reverted", "reverted"]
    assert {row["Type"] for row in listed} == {"migration"}

    osc("server migrate", "--live-migration", "--wait", server)
    assert _host(osc, server) != home
    osc("server delete", "--wait", "moving", cloud=DEMO)


def live_migrations_under_way(osc: OpenStackClient) -> None:
    """A live migration that takes long is shown, aborted, and another one completed by force."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--property", "tour=slow", "--wait", "busy", cloud=DEMO)
    server = osc.json("server show", "busy", cloud=DEMO)["id"]
    home = _host(osc, server)
    osc("server migrate", "--live-migration", server)
    migration = _running(osc, server)
    shown = osc.json("server migration show", server, migration)
    assert (shown["Status"], shown["Source Compute"], shown["Server UUID"]) == ("running", home, server)
    osc("server migration abort", server, migration)
    until_status(osc, "busy", "ACTIVE")
    assert _host(osc, server) == home
    osc("server migrate", "--live-migration", server)
    osc("server migration force complete", server, _running(osc, server))
    until(lambda: _host(osc, server) != home)
    until_status(osc, "busy", "ACTIVE")
    osc("server delete", "--wait", "busy", cloud=DEMO)


def evacuation(osc: OpenStackClient) -> None:
    """A server of a host that is lost is built on another one."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "stranded", cloud=DEMO)
    server = osc.json("server show", "stranded", cloud=DEMO)["id"]
    lost = _host(osc, server)
    osc("compute service set", "--down", lost, "nova-compute")
    osc("server evacuate", server)
    until_status(osc, "stranded", "SHUTOFF")  # since 2.95 its owner starts it
    until(lambda: _host(osc, server) != lost)
    osc("compute service set", "--up", lost, "nova-compute")
    until(lambda: osc.json("server migration list", "--server", server)[0]["Status"] == "completed")
    osc("server delete", "--wait", "stranded", cloud=DEMO)


def _host(osc: OpenStackClient, server: str) -> str:
    return str(osc.json("server show", server)["OS-EXT-SRV-ATTR:host"])


def _running(osc: OpenStackClient, server: str) -> str:
    found: list[dict[str, object]] = []

    def runs() -> bool:
        nonlocal found
        found = osc.json("server migration list", "--server", server, "--status", "running")
        return bool(found)

    until(runs)
    return str(found[0]["UUID"])
