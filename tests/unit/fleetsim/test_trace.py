"""Traces: what a file says is what is simulated, and a line that is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from micronova.fleetsim.trace import Request, read_trace, write_trace
from micronova.objects.errors import Invalid

SMALL = {"name": "small", "vcpus": 1, "ram": 2048, "disk": 20}


def a_file(path: Path, *lines: Any) -> Path:
    """Write lines, as JSON unless they are text."""
    file = path / "trace.jsonl"
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return file


def a_line(**changes: Any) -> dict[str, Any]:
    return {"at": 0, "lifetime": 60, "flavor": SMALL} | changes


def test_every_field_is_read(tmp_path: Path) -> None:
    flavor = SMALL | {"ephemeral": 5, "swap": 512, "extra_specs": {"trait:CUSTOM_SSD": "required"}}
    whole = a_line(
        at=1.5,
        flavor=flavor,
        count=3,
        id="web",
        project="shop",
        zone="az1",
        group={"id": "g", "policy": "anti-affinity", "max_server_per_host": 2},
        image={"id": "debian", "disk_format": "qcow2", "properties": {"hw_architecture": "x86_64"}},
        hints={},
    )
    first, second = read_trace(
        a_file(tmp_path, whole, "", {"at": 2, "flavor": "small", "hints": {"same_host": ["web"]}})
    )
    spec = first.spec
    assert (first.at, first.lifetime, first.count, first.id, first.line) == (1.5, 60.0, 3, "web", 1)
    assert (spec.flavor.vcpus, spec.flavor.ram, spec.flavor.disk) == (1, 2048, 20)
    assert (spec.flavor.ephemeral, spec.flavor.swap) == (5, 512)
    assert spec.flavor.extra_specs == {"trait:CUSTOM_SSD": "required"}
    assert (spec.project_id, spec.availability_zone) == ("shop", "az1")
    group = spec.server_group
    assert group is not None and spec.image is not None
    assert (group.id, group.policy, group.max_server_per_host) == ("g", "anti-affinity", 2)
    assert (spec.image.id, spec.image.disk_format) == ("debian", "qcow2")
    assert spec.image.properties == {"hw_architecture": "x86_64"}
    assert (second.lifetime, second.count, second.line) == (None, 1, 3)
    assert second.spec.flavor == spec.flavor
    assert second.spec.hints == {"same_host": ["web"]}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    requests = read_trace(
        a_file(
            tmp_path,
            a_line(count=2, id="a", group={"id": "g", "policy": "affinity"}),
            a_line(at=3, flavor="small", zone="az1", image={"properties": {"hw_vm_mode": "hvm"}}),
            a_line(at=4, flavor=SMALL | {"name": "other"}, lifetime=None, hints={"different_host": ["a"]}),
        )
    )
    copy = tmp_path / "copy.jsonl"
    write_trace(copy, requests)
    assert read_trace(copy) == requests


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "the line is not JSON in UTF-8 (Input data was truncated). A line is, for example"),
        ("[1, 2]", "the line must be an object"),
        ({"lifetime": 5, "flavor": SMALL}, "the line: 'at' is a required property. A line is, for example"),
        (a_line(at="noon"), "at must be a number from 0 to 10000000000"),
        (a_line(at=-1), "at must be a number from 0 to"),
        (a_line(lifetime=0), "lifetime must be a number above 0"),
        (a_line(count=0), "count must be a whole number from 1 to 1000"),
        (a_line(count=1001), "from 1 to 1000"),
        (a_line(flavour="m1.small"), "('flavour' was unexpected; did you mean 'flavor'?)"),
        (a_line(flavor=SMALL | {"ram": "2 GB"}), "flavor.ram must be a whole number from 1 to"),
        (a_line(flavor={"name": "x", "vcpus": 1}), "flavor: 'ram' is a required property"),
        (a_line(flavor="large"), "No line above has the flavor large. Its first line gives the flavor whole"),
        (a_line(flavor=SMALL | {"ram": 1}), "The flavor small is another one in a line above"),
        (a_line(group={"id": "g", "policy": "apart"}), 'group.policy must be one of "affinity", "anti-affinity"'),
        (a_line(group={"id": "g", "policy": "affinity"}), "The group g has another policy in a line above"),
        (a_line(id="a"), "A line above has the id a, too"),
        (a_line(hints={"same_host": ["b"]}), "The hint same_host names b, but no line above has this id"),
        (a_line(at=9), "at is 9, before that of the line above (10). Sort the lines by arrival."),
        ("x" * 70_000, "A line has at most 65536"),
        ('{"at": 0, "flavor": "\\ud800"}', "line 2"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: Any, said: str) -> None:
    first = a_line(id="a", group={"id": "g", "policy": "anti-affinity"})
    if said.startswith("at is"):
        first["at"] = 10
    file = a_file(tmp_path, first, line, a_line())
    with pytest.raises(Invalid) as caught:
        read_trace(file)
    assert caught.value.message.startswith(f"{file}, line 2: ")
    assert said in caught.value.message


def test_files_without_requests(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="has no requests"):
        read_trace(a_file(tmp_path, "", ""))
    with pytest.raises(Invalid, match="No such file"):
        read_trace(tmp_path / "missing")


def test_equal_requests_share_their_spec(tmp_path: Path) -> None:
    found: list[Request] = read_trace(a_file(tmp_path, *(a_line(at=at) for at in range(100))))
    assert len({id(each.spec) for each in found}) == 1
