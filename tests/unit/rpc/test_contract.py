"""Declarations that contradict themselves are refused when they are made."""

import msgspec
import pytest

from micronova.rpc.contract import Interface, Method, Target, is_compatible, parse_version, queue_name


class Params(msgspec.Struct):
    """Nothing."""


def test_methods_belong_to_one_interface() -> None:
    method = Method("build", Params)
    interface = Interface("conductor", namespace="compute_task", version="1.1", methods=[method])
    assert method.interface is interface
    assert method.label == "conductor.build"
    assert interface.methods == {"build": method}
    assert interface.target("h") == Target("conductor", "h")
    with pytest.raises(ValueError, match="declared twice"):
        Interface("other", methods=[method])
    with pytest.raises(ValueError, match="declared twice"):
        interface.method("build", Params)


def test_a_method_cannot_be_newer_than_its_interface() -> None:
    with pytest.raises(ValueError, match="newer"):
        Interface("conductor", version="1.1").method("build", Params, since="1.2")
    with pytest.raises(ValueError, match="newer"):
        Interface("conductor", version="2.0").method("build", Params, since="1.0")


@pytest.mark.parametrize("version", ["", "1", "1.x", "one.two"])
def test_versions_that_are_none(version: str) -> None:
    with pytest.raises(ValueError, match="looks like"):
        parse_version(version)


@pytest.mark.parametrize(
    ("wanted", "offered", "expected"),
    [("1.0", "1.0", True), ("1.9", "1.10", True), ("1.10", "1.9", False), ("2.0", "1.9", False), ("1.0", "2.0", False)],
)
def test_which_versions_fit(wanted: str, offered: str, expected: bool) -> None:
    assert is_compatible(wanted, offered) is expected


def test_each_namespace_and_host_has_its_queue() -> None:
    queues = [
        queue_name("conductor", ""),
        queue_name("conductor", "compute_task"),
        queue_name("conductor", "", "one.example"),
        queue_name("conductor", "compute_task", "one.example"),
    ]
    assert queues == [
        "conductor",
        "conductor:compute_task",
        "conductor.one.example",
        "conductor:compute_task.one.example",
    ]
