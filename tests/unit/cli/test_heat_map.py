"""The map of the fleet: what each cell shows and says, for few hosts and for many."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import click
import pytest

from micronova.cli.heat_map import MOST_CELLS, draw
from micronova.cli.main import main
from micronova.objects.fleet import NOT_CONSIDERED, Fleet, HostUse, State, Use

SVG = "{http://www.w3.org/2000/svg}"


def a_host(name: str, zone: int = 0, state: State = "up", memory: int = 0, **fields: Any) -> HostUse:
    """Make a host; `memory` is in percent."""
    given: dict[str, Any] = {"vcpus": Use(0, 64), "disk_gb": Use(0, 1000), "servers": 0, **fields}
    return HostUse(host=name, zone=zone, state=state, memory_mb=Use(memory * 1024, 100 * 1024), **given)


def a_fleet(*hosts: HostUse, filters: tuple[str, ...] = ()) -> Fleet:
    return Fleet(zones=("east", "west")[: 1 + max(host.zone for host in hosts)], hosts=hosts, filters=filters)


def cells(svg: str) -> dict[str, tuple[str, str]]:
    """Give the colour and the tooltip of each cell, by the name of its host."""
    found = {}
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None and title.text is not None:
            found[title.text.partition(" ")[0]] = path.get("fill") or "", title.text
    return found


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_fuller_host_is_darker_and_its_cell_has_the_numbers() -> None:
    drawn = cells(draw(a_fleet(*(a_host(f"h{percent}", memory=percent) for percent in range(0, 110, 10)))))
    colours = [drawn[f"h{percent}"][0] for percent in range(0, 100, 10)]
    brightness = [int(colour[1:3], 16) + int(colour[3:5], 16) + int(colour[5:7], 16) for colour in colours]
    assert brightness == sorted(brightness, reverse=True) and len(set(colours)) == 10
    assert drawn["h100"][0] == drawn["h90"][0], "full is not too full"
    told = draw(a_fleet(a_host("h1", memory=50, vcpus=Use(3, 64), disk_gb=Use(20, 1000), servers=1)))
    assert cells(told)["h1"][1] == "h1 (east), memory 50/100 GiB, vCPUs 3/64, disk 20/1000 GB, 1 server"


def _choices() -> Sequence[str]:
    """Return what `micronova explain --by` accepts."""
    command = main.get_command(click.Context(main), "explain")
    assert command is not None
    [option] = [each for each in command.params if each.name == "by"]
    assert isinstance(option.type, click.Choice)
    return option.type.choices


@pytest.mark.parametrize("by", _choices())
def test_what_cells_are_coloured_by(by: str) -> None:
    hosts = [
        a_host("memory", memory=95),
        a_host("vcpus", vcpus=Use(61, 64)),
        a_host("disk", disk_gb=Use(950, 1000)),
        a_host("empty"),
    ]
    drawn = cells(draw(a_fleet(*hosts), by=by))
    full = {name for name, (colour, _) in drawn.items() if colour != drawn["empty"][0]}
    assert full == ({"memory", "vcpus", "disk"} if by == "fullest" else {by})


def test_zones_states_and_counts_are_written() -> None:
    hosts = (a_host("h1", memory=40), a_host("h2", state="down"), a_host("h3", zone=1, state="disabled"))
    svg = draw(a_fleet(*hosts), title="Fleet", moment="2026-01-01")
    told = words(svg)
    assert {"Fleet", "east", "west", "down: 1", "disabled: 1"} <= set(told)
    assert "2 hosts, 20 % used on average, 1 down" in told
    assert any("3 hosts in 2 availability zones" in line and "2026-01-01" in line for line in told)
    drawn = cells(svg)
    assert "down" in drawn["h2"][1] and "disabled" in drawn["h3"][1]
    assert drawn["h2"][0] != drawn["h3"][0]


def test_a_dry_run_shows_the_filter_that_removed_each_host() -> None:
    filters = ("RetryFilter", "RamFilter", "ComputeFilter")
    hosts = (
        a_host("h1", chosen=2),
        a_host("h2"),
        a_host("h3", refused_by=1, memory=99),
        a_host("h4", refused_by=2, state="down"),
        a_host("h5", refused_by=NOT_CONSIDERED),
    )
    svg = draw(a_fleet(*hosts, filters=filters))
    drawn = cells(svg)
    assert len({colour for colour, _ in drawn.values()}) == 5
    assert drawn["h1"][1].endswith("chosen for 2 servers")
    assert drawn["h3"][1].endswith("removed by RamFilter") and drawn["h5"][1].endswith("not asked for")
    legend = {"chosen: 1", "passed all filters: 2", "removed by RamFilter: 1", "removed by ComputeFilter: 1"}
    assert legend | {"not asked for: 1"} <= set(words(svg))
    assert not [line for line in words(svg) if "RetryFilter" in line], "it removed none"


@pytest.mark.parametrize(("number", "most"), [(10_000, 2 << 20), (50_000, 4 << 20)])
def test_the_file_of_a_large_fleet_is_bounded(number: int, most: int) -> None:
    hosts = [a_host(f"compute-{at:06}.example.org", zone=at % 2, memory=at % 100) for at in range(number)]
    svg = draw(a_fleet(*sorted(hosts, key=lambda host: host.zone)))
    assert len(svg.encode()) < most
    drawn = cells(svg)
    assert len(drawn) <= min(number, MOST_CELLS)
    if number > MOST_CELLS:
        assert "3 hosts" in drawn["compute-000000.example.org"][1]
        assert any("a cell is 3 hosts" in line for line in words(svg))


def test_names_are_text() -> None:
    """Whatever hosts, zones and filters are called."""
    odd = "<h1>&\x00\x1b]]>"
    fleet = Fleet(zones=(odd,), hosts=(a_host(odd), a_host("h2", refused_by=0)), filters=(odd,))
    svg = draw(fleet, title=odd)
    assert "<h1>&??]]>" in words(svg)


def test_a_fleet_without_hosts() -> None:
    assert any("0 hosts" in line for line in words(draw(Fleet(zones=(), hosts=()))))
