"""What a stolen host says: each text, list, mapping and number of a message that a host sends has a limit."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.inspect import (
    AnyType,
    CollectionType,
    CustomType,
    DictType,
    FloatType,
    IntType,
    ListType,
    RawType,
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from micronova.compute.rpcapi import COMPUTE_INTERFACE, FAULT_RULES
from micronova.conductor.rpcapi import HOSTS, KEYS
from micronova.objects.host_limits import LONGEST_DETAILS, LONGEST_MESSAGE
from micronova.objects.orders import BootResult, HostBeat, NodeResources, Report
from micronova.objects.topology import MdevParent, MemoryPages
from micronova.rpc.contract import Method
from micronova.rpc.envelope import OutgoingReply, decode_reply, encode
from micronova.rpc.errors import ErrorBody, from_body

# Simulated hosts alone have fault rules, and only an operator asks for them.
SENT = [
    *((method, method.params) for interface in (HOSTS, KEYS) for method in interface.methods.values()),
    *((method, method.result) for method in COMPUTE_INTERFACE.methods.values() if method is not FAULT_RULES),
]
CUT = {
    (Report, "message"),
    (Report, "details"),
    (BootResult, "fault"),
    (HostBeat, "connect_error"),
    (NodeResources, "cpu_info"),
}
"""Fields whose limits are no part of their types; the tests below are about them."""
REPORT = Report(operation_id="o", epoch=1, instance_uuid="i", host="h", outcome="error")
NODE = NodeResources(
    node="n", node_uuid="u", hypervisor_type="t", hypervisor_version=1, vcpus=1, memory_mb=1, local_gb=1
)


def _unlimited(info: Type, path: str) -> Iterator[str]:
    """Return where values of this type have no limit."""
    if isinstance(info, StrType):
        if info.max_length is None:
            yield path
    elif isinstance(info, IntType | FloatType):
        least, most = info.ge if info.gt is None else info.gt, info.le if info.lt is None else info.lt
        if least is None or most is None:
            yield path
    elif isinstance(info, StructType):
        for field in info.fields:
            if (info.cls, field.name) not in CUT:
                yield from _unlimited(field.type, f"{path}.{field.name}")
    elif isinstance(info, UnionType):
        for each in info.types:
            yield from _unlimited(each, path)
    elif isinstance(info, TupleType):
        for each in info.item_types:
            yield from _unlimited(each, f"{path}[]")
    elif isinstance(info, ListType | VarTupleType | CollectionType):
        if info.max_length is None:
            yield path
        yield from _unlimited(info.item_type, f"{path}[]")
    elif isinstance(info, DictType):
        if info.max_length is None:
            yield path
        yield from _unlimited(info.key_type, f"{path}[]")
        yield from _unlimited(info.value_type, f"{path}[]")
    elif isinstance(info, AnyType | CustomType | RawType):
        yield path


@pytest.mark.parametrize(("method", "sent"), SENT, ids=[method.label for method, _ in SENT])
def test_every_text_list_and_number_of_a_host_has_a_limit(method: Method[Any, Any], sent: Any) -> None:
    assert list(_unlimited(type_info(sent), method.label)) == []


def test_texts_for_people_are_cut_and_not_refused() -> None:
    long = "x\0" * 1_000_000
    received = msgspec.msgpack.decode(_as_old_agents_do(REPORT, message=long, details=long), type=Report)
    for found in (received, Report(**{**msgspec.structs.asdict(REPORT), "message": long, "details": long})):
        assert found.message is not None and found.details is not None
        assert (len(found.message), len(found.details)) == (LONGEST_MESSAGE, LONGEST_DETAILS)
        assert "\0" not in found.message + found.details
    result = BootResult(instance_uuid="i", epoch=1)
    found_result = msgspec.msgpack.decode(_as_old_agents_do(result, fault=long), type=BootResult)
    assert len(found_result.fault) == LONGEST_MESSAGE
    beat = msgspec.msgpack.decode(_as_old_agents_do(HostBeat(host="h"), connect_error=long), type=HostBeat)
    assert len(beat.connect_error) == LONGEST_MESSAGE


def test_texts_that_are_short_enough_stay_as_they_are() -> None:
    report = msgspec.structs.replace(REPORT, message="no disk", details="line\nline\n")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report) == report
    assert (report.message, report.details) == ("no disk", "line\nline\n")


def test_a_description_of_a_node_that_is_too_long_is_refused() -> None:
    body = _as_old_agents_do(NODE, cpu_info={"model": "x" * 100_000})
    with pytest.raises(msgspec.ValidationError, match="more than 65536 bytes"):
        msgspec.msgpack.decode(body, type=NodeResources)


def test_an_error_that_a_host_answers_is_cut() -> None:
    body = ErrorBody("not_found", "x" * 1_000_000, {"y": "z" * 1_000_000})
    reply = decode_reply(encode(OutgoingReply("1", body, None)))
    assert reply.error is not None
    assert len(str(from_body(reply.error))) == LONGEST_DETAILS and reply.error.details == {}
    long = msgspec.msgpack.encode({"id": "1", "error": {"code": "c", "message": "x" * 1_000_000}})
    found = decode_reply(long)
    assert found.error is not None and len(found.error.message) == LONGEST_DETAILS


def _as_old_agents_do(message: msgspec.Struct, /, **values: Any) -> bytes:
    """Return a message with values that today's agents cut."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(message, builtin_types=(bytes,)), **values})


@pytest.mark.parametrize(
    "more",
    [
        {"capabilities": {f"{number:0250}": "x" * 250 for number in range(200)}},
        {"supported": [["x" * 250] * 3] * 200},
    ],
)
def test_descriptions_of_nodes_have_a_limit_in_bytes(more: dict[str, Any]) -> None:
    message = msgspec.msgpack.encode({**msgspec.structs.asdict(NODE), **more})
    with pytest.raises(msgspec.ValidationError, match="has more than 65536 bytes"):
        msgspec.msgpack.decode(message, type=NodeResources)


@pytest.mark.parametrize("field", ["name", "mdev_type", "resource_class"])
def test_names_of_devices_have_no_newline_at_their_end(field: str) -> None:
    good = {"name": "pci_0000_84_00_0", "mdev_type": "nvidia-35", "total": 1, "resource_class": "CUSTOM_X"}
    msgspec.convert(good, MdevParent)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, field: f"{good[field]}\n"}, MdevParent)


@pytest.mark.parametrize(
    "more",
    [
        {"vcpus": 2**31},
        {"memory_mb": 2**63},
        {"running_vms": -1},
        {"hypervisor_version": 2**64 - 1},
        {"reserved": {"VCPU": 2**40}},
        {"cpu_info": {"topology": {"cores": 2**64 - 1}}},
        {"cpu_info": {"frequency": float("nan")}},
        {"topology": {"cells": [{"id": 0, "memory_mb": 2**63}]}},
        {"topology": {"cells": [{"id": 0, "memory_mb": 1, "shared": [2**40]}]}},
        {"topology": {"cpu_allocation_ratio": float("inf")}},
    ],
    ids=str,
)
def test_numbers_that_no_column_holds_are_refused(more: dict[str, Any]) -> None:
    """Schedulers could not read the host, or the database would refuse all hosts of the same transaction."""
    message = msgspec.msgpack.encode({**msgspec.structs.asdict(NODE), **more})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=NodeResources)


def test_data_without_a_type_is_not_deep() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(msgspec.ValidationError, match="more than 32 levels"):
        msgspec.msgpack.decode(_as_old_agents_do(NODE, cpu_info=deep), type=NodeResources)


PAGES = [
    pytest.param([[3]], id="no power of two"),
    pytest.param([[2]], id="too small"),
    pytest.param([[1 << 40]], id="too large"),
    pytest.param([[4 << number for number in range(9)]], id="too many in a cell"),
    pytest.param([[4 << number] for number in range(9)], id="too many in a node"),
]


@pytest.mark.parametrize("sizes", PAGES)
def test_sizes_of_memory_pages_are_few(sizes: list[list[int]]) -> None:
    """Schedulers have a column for each."""
    cells = [
        {"id": number, "memory_mb": 1, "pages": [{"size_kib": size, "total": 1} for size in each]}
        for number, each in enumerate(sizes)
    ]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(_as_old_agents_do(NODE, topology={"cells": cells}), type=NodeResources)


def test_more_memory_than_a_cell_has_is_refused() -> None:
    pages = {"size_kib": 1 << 24, "total": 1 << 40}
    with pytest.raises(msgspec.ValidationError, match="KiB together"):
        msgspec.convert(pages, MemoryPages)


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb", "a\x9bb", "a\0b"])
def test_names_have_no_control_characters(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(_as_old_agents_do(NODE, node=name), type=NodeResources)


def test_texts_for_people_have_no_control_characters() -> None:
    """Operators see them in terminals, which obey such characters."""
    hostile = "a\x1b]0;title\x07b\x9b2Jc\u202ed\r\x7f é\u00a0\t日\nnext"
    report = msgspec.msgpack.decode(_as_old_agents_do(REPORT, message=hostile, details=hostile), type=Report)
    assert report.details == "a�]0;title�b�2Jc�d�� é\u00a0\t日\nnext"
    assert report.message == report.details.replace("\n", " ")  # a line of its own would look like one of the program
    reply = decode_reply(msgspec.msgpack.encode({"id": "1", "error": {"code": "c", "message": "a\x1b[2J"}}))
    assert reply.error is not None and reply.error.message == "a�[2J"
    result = msgspec.msgpack.decode(
        _as_old_agents_do(BootResult(instance_uuid="i", epoch=1), fault="a\x1b[2J"), type=BootResult
    )
    assert result.fault == "a�[2J"


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), -1.0, 0.0])
def test_ratios_are_numbers_that_can_be_stored(ratio: float) -> None:
    """One that is not would keep every scheduler from reading the host."""
    message = msgspec.msgpack.encode({**msgspec.structs.asdict(NODE), "allocation_ratios": {"VCPU": ratio}})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=NodeResources)


@pytest.mark.parametrize(
    ("nodes", "devices", "kinds"),
    [
        pytest.param(1, 513, 1, id="of a node"),
        pytest.param(3, 400, 1, id="of a host"),
        pytest.param(1, 17, 17, id="of many types"),
        pytest.param(17, 1, 17, id="of many types on many nodes"),
    ],
)
@pytest.mark.parametrize("name", ["mdev_type", "resource_class"])
def test_devices_with_mediated_devices_are_few(nodes: int, devices: int, kinds: int, name: str) -> None:
    """Each is a resource provider, with an inventory and a trait."""
    beat = {
        "host": "h",
        "nodes": [
            {
                **msgspec.structs.asdict(NODE),
                "topology": {
                    "mdevs": [
                        {"name": f"d{d}", "total": 1, "mdev_type": "t", name: f"CUSTOM_{(n + d) % kinds}"}
                        for d in range(devices)
                    ]
                },
            }
            for n in range(nodes)
        ],
    }
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=HostBeat)
