"""Small plots as SVG: panels below each other with one axis of time, as lines or as stacked bars.

The colours are those of Okabe and Ito, which people with any kind of colour blindness can tell apart. Lines also differ
in their dashes, so that a plot can be read without colours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, TypeAlias

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "6 2 1 2")
_WIDTH, _LEFT, _RIGHT = 860, 80, 22
_HEAD, _LEGEND, _PANEL, _GAP, _FOOT = 34, 20, 150, 46, 44
_INK, _GREY, _GRID = "#222222", "#555555", "#dddddd"
_FONT: Final = "font-family='Helvetica, Arial, sans-serif'"
_LETTER: Final = 6.6  # pixels that a letter of the legend takes at most, on average

HOUR, DAY = 3600.0, 86400.0

_Scale: TypeAlias = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers over time. Of equal names in several panels the legend shows one."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str  # of the values, beside the axis
    series: Sequence[Series]
    top: float | None = None  # the upper end of the axis; None: a round number above the largest value
    stacked: bool = False  # bars on top of each other, each from the time before to its time


def plot(title: str, times: Sequence[float], panels: Sequence[Panel], note: str = "") -> str:
    """Return a figure; `times` are seconds, one for each value of each series."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    rows = _legend_rows(names)
    top = _HEAD + _LEGEND * len(rows) + 26
    height = top + len(panels) * (_PANEL + _GAP) - _GAP + _FOOT + (18 if note else 0)
    end = max(times) or 1.0
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' "
        f"role='img' aria-label='{escape(title, quote=True)}' {_FONT} font-size='12' fill='{_INK}'>",
        f"<rect width='{_WIDTH}' height='{height}' fill='white'/>",
        _text(_LEFT, 22, title, "font-size='15' font-weight='bold'"),
        *_legend(rows, names, any(panel.stacked for panel in panels)),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, times, end, top + number * (_PANEL + _GAP), names, number == len(panels) - 1)
    if note:
        parts.append(_text(_LEFT, height - 8, note, f"font-size='11' fill='{_GREY}'"))
    return "\n".join([*parts, "</svg>", ""])


def _legend_rows(names: Sequence[str]) -> list[list[tuple[str, float]]]:
    """Return names with their positions, in as many rows as they need."""
    rows: list[list[tuple[str, float]]] = [[]]
    x = float(_LEFT)
    for name in names:
        width = 40 + len(name) * _LETTER + 14
        if rows[-1] and x + width > _WIDTH - _RIGHT:
            rows.append([])
            x = float(_LEFT)
        rows[-1].append((name, x))
        x += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[str, float]]], names: Sequence[str], stacked: bool) -> list[str]:
    parts = []
    for row, entries in enumerate(rows):
        y = _HEAD + _LEGEND * row + 12
        for name, x in entries:
            index = names.index(name)
            if stacked:
                parts.append(f"<rect x='{x:.1f}' y='{y - 9}' width='14' height='10' fill='{_colour(index)}'/>")
            else:
                parts.append(f"<path d='M{x:.1f} {y - 4}h30' {_stroke(index)}/>")
            parts.append(_text(x + (20 if stacked else 36), y, name))
    return parts


def _panel(panel: Panel, times: Sequence[float], end: float, top: float, names: Sequence[str], last: bool) -> list[str]:
    steps = _ticks(_upper(panel))
    upper, bottom = steps[-1], top + _PANEL

    def x(time: float) -> float:
        return _LEFT + time / end * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return bottom - min(value, upper) / upper * _PANEL

    parts = [_text(_LEFT, top - 8, panel.title, "font-weight='bold'")]
    for step in steps:
        parts.append(f"<path d='M{_LEFT} {y(step):.1f}H{_WIDTH - _RIGHT}' stroke='{_GRID}'/>")
        parts.append(_text(_LEFT - 6, y(step) + 4, _number(step), "text-anchor='end'"))
    middle = (top + bottom) / 2
    turned = f"text-anchor='middle' fill='{_GREY}' transform='rotate(-90 16 {middle:.0f})'"
    parts.append(_text(16, middle, panel.unit, turned))
    parts.append(f"<path d='M{_LEFT} {top}V{bottom}H{_WIDTH - _RIGHT}' fill='none' stroke='{_GREY}'/>")
    parts += _bars(panel, times, names, x, y) if panel.stacked else _lines(panel, times, names, x, y)
    parts += _time_axis(end, bottom, x, last)
    return parts


def _time_axis(end: float, bottom: float, x: _Scale, last: bool) -> list[str]:
    unit, name = (DAY, "days") if end >= 2 * DAY else (HOUR, "hours") if end >= 2 * HOUR else (60.0, "minutes")
    parts = []
    for step in _hours(end / HOUR) if unit == HOUR else _ticks(end / unit, 10):
        at = x(step * unit)
        if at > _WIDTH - _RIGHT + 0.5:
            break
        parts.append(f"<path d='M{at:.1f} {bottom}v4' stroke='{_GREY}'/>")
        if last:
            parts.append(_text(at, bottom + 17, _number(step), "text-anchor='middle'"))
    if last:
        parts.append(
            _text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, f"time in {name}", f"text-anchor='middle' fill='{_GREY}'")
        )
    return parts


def _lines(panel: Panel, times: Sequence[float], names: Sequence[str], x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for series in panel.series:
        points = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, series.values, strict=True))
        parts.append(f"<polyline points='{points}' {_stroke(names.index(series.name))}/>")
    return parts


def _bars(panel: Panel, times: Sequence[float], names: Sequence[str], x: _Scale, y: _Scale) -> list[str]:
    parts = []
    below = [0.0] * len(times)
    for series in panel.series:
        colour = _colour(names.index(series.name))
        for position, value in enumerate(series.values):
            if value:
                left = x(times[position - 1] if position else 0.0)
                low, high = y(below[position]), y(below[position] + value)
                width = max(0.8, x(times[position]) - left)
                parts.append(
                    f"<rect x='{left:.1f}' y='{high:.1f}' width='{width:.1f}' height='{low - high:.1f}' "
                    f"fill='{colour}'/>"
                )
                below[position] += value
    if not parts:
        parts.append(_text(_LEFT + 10, y(0) - 10, "none", f"fill='{_GREY}'"))
    return parts


def _upper(panel: Panel) -> float:
    if panel.top is not None:
        return panel.top
    if panel.stacked:
        return max((sum(values) for values in zip(*(each.values for each in panel.series), strict=True)), default=0.0)
    return max((max(each.values) for each in panel.series), default=0.0)


def _ticks(upper: float, most: int = 5) -> list[float]:
    """Return at most so many round steps from 0, the last one not below `upper`."""
    if upper <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(upper / most))
    factor = next(each for each in (1, 2, 5, 10, 20) if math.ceil(upper / (size * each) - 1e-9) <= most)
    step = size * factor
    return [number * step for number in range(math.ceil(upper / step - 1e-9) + 1)]


def _hours(end: float) -> list[float]:
    """Return steps that divide a day; `end` is below two days."""
    step = next(each for each in (1, 2, 3, 6) if end / each <= 9)
    return [float(hour) for hour in range(0, int(end) + 1, step)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _stroke(index: int) -> str:
    dash = _DASHES[index % len(_DASHES)]
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return f"fill='none' stroke='{_colour(index)}' stroke-width='2' stroke-linejoin='round'{dashes}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>"
