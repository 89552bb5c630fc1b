"""The tour of a cloud that keeps deleted servers for a while."""

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO, ON_TEST_IMAGE, until, until_status


def restore(osc: OpenStackClient) -> None:
    """A server is deleted, restored, and deleted for good."""
    osc("server create", *ON_TEST_IMAGE, "--no-network", "--wait", "missed", cloud=DEMO)
    server = osc.json("server show", "missed", cloud=DEMO)["id"]
    osc("server delete", server, cloud=DEMO)
    until(lambda: osc.json("server show", server)["status"] == "SOFT_DELETED")
    assert osc.json("server list", cloud=DEMO) == []
    osc("server restore", server, cloud=DEMO)
    until_status(osc, server, "ACTIVE")
    osc("server delete", "--force", server)
    until(
        lambda: osc.json("server list", "--deleted", "--all-projects", "--name", "missed", "--status", "DELETED") != []
    )
