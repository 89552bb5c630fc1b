"""The rights of a host's broker user."""

from micronova.rpc.amqp.permissions import for_host


def test_a_hosts_rights_are_for_its_own_names_only() -> None:
    rights = for_host("one", "one.example")
    assert rights.configure.startswith("^(micronova\\.compute")
    assert "amq\\.default" in rights.write
    assert "amq\\.default" not in rights.read
