"""What `micronova connect` says when it cannot reach a guest."""

from micronova.cli.connect import explain


def test_silence_hints_at_security_groups() -> None:
    said = explain("10.1.0.5", 22, "timed out")
    assert "10.1.0.5 port 22 cannot be reached" in said
    assert "openstack security group rule create --protocol tcp --dst-port 22" in said


def test_other_reasons_are_told_apart() -> None:
    assert "no program listens" in explain("10.1.0.5", 22, "[Errno 111] Connection refused")
    assert "no running server has this address, or its guest is still booting" in explain(
        "10.1.0.5", 22, "[Errno 113] No route to host"
    )
    assert explain("10.1.0.5", 22, "odd") == "10.1.0.5 port 22 cannot be reached: odd."
