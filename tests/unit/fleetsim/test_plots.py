"""Plots: axes, legends and marks are where the numbers are."""

import re
from xml.etree import ElementTree

import pytest

from micronova.fleetsim.svg import COLOURS, Panel, Series, plot

NS = "{http://www.w3.org/2000/svg}"
DAY = 86400.0


def _drawn(panels: list[Panel], times: list[float]) -> ElementTree.Element:
    return ElementTree.fromstring(plot("Title & more", times, panels, "a <note>"))


def _words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NS}text")]


def test_lines_have_axes_with_units_and_a_legend() -> None:
    lines = [Series("spread", [0.0, 50.0, 100.0]), Series("pack", [10.0, 10.0, 10.0])]
    root = _drawn([Panel("Memory", "% of capacity", lines, top=100.0)], [1 * DAY, 2 * DAY, 4 * DAY])
    words = _words(root)
    assert {"Title & more", "Memory", "% of capacity", "spread", "pack", "time in days", "a <note>"} <= set(words)
    assert {"0", "20", "40", "60", "80", "100", "1", "4"} <= set(words)
    first, second = root.iter(f"{NS}polyline")
    assert first.get("stroke") != second.get("stroke")
    assert first.get("stroke-dasharray") != second.get("stroke-dasharray")
    points = [tuple(map(float, point.split(","))) for point in (first.get("points") or "").split()]
    (_, low), (_, middle), (right, high) = points
    assert low > middle > high and low - high == pytest.approx(2 * (low - middle), abs=0.2)
    assert right == pytest.approx(860 - 22)


def test_bars_are_on_top_of_each_other() -> None:
    bars = [Series("memory", [1.0, 0.0]), Series("vCPUs", [2.0, 3.0])]
    root = _drawn([Panel("Policy spread", "servers per hour", bars, stacked=True)], [3600.0, 7200.0])
    marks = [rect for rect in root.iter(f"{NS}rect") if float(rect.get("height") or 0) > 10 and rect.get("x")]
    heights = [float(rect.get("height") or 0) for rect in marks]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01) and heights[2] == pytest.approx(
        3 * heights[0], rel=0.01
    )
    lower, upper = marks[0], marks[1]
    assert float(upper.get("y") or 0) + heights[1] == pytest.approx(float(lower.get("y") or 0), abs=0.2)
    assert "time in hours" in _words(root)


@pytest.mark.parametrize(
    ("end", "steps", "unit"),
    [(90 * 60.0, "0 10 20 90", "minutes"), (20 * 3600.0, "0 3 6 18", "hours"), (47 * 3600.0, "0 6 24 42", "hours")],
)
def test_the_axis_of_time_has_round_steps(end: float, steps: str, unit: str) -> None:
    words = _words(_drawn([Panel("Memory", "%", [Series("a", [100.0])])], [end]))
    assert set(steps.split()) <= set(words)
    assert f"time in {unit}" in words


def test_nothing_to_show_is_said() -> None:
    root = _drawn([Panel("Policy spread", "servers per hour", [], stacked=True)], [60.0])
    assert "none" in _words(root)


def test_many_names_fit_into_the_width() -> None:
    lines = [Series(f"a policy with a long name {number}", [1.0]) for number in range(12)]
    root = _drawn([Panel("Memory", "%", lines)], [60.0])
    places = [
        (float(element.get("x") or 0), float(element.get("y") or 0), len(element.text or ""))
        for element in root.iter(f"{NS}text")
        if (element.text or "").startswith("a policy")
    ]
    assert len(places) == len({(x, y) for x, y, _ in places}) == 12
    assert all(x + 6.6 * length < 860 for x, _, length in places)


def test_the_colours_are_different() -> None:
    assert len(set(COLOURS)) == len(COLOURS)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in COLOURS)
