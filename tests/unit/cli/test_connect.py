"""What `micronova connect` says when it cannot reach a guest."""

from pathlib import Path

import pytest

from micronova.cli.connect import connect, explain
from micronova.objects.errors import MicronovaError


def test_a_name_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(MicronovaError, match="nohost is no IP address"):
        connect("nohost", 22, tmp_path)


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
