"""A map of the fleet as an SVG: one cell per host, by availability zone, coloured by use or by what a dry run decided.

A cell has a tooltip with the numbers. The file is bounded: beyond `MOST_CELLS` hosts a cell stands for several.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from micronova.objects.explanation import counted
from micronova.objects.fleet import NOT_CONSIDERED, NOT_REFUSED, Fleet, HostUse, Use

MOST_CELLS: Final = 20_000
WIDTH, MARGIN = 1180, 24
_HEAT = ("#e6edf4", "#fdeecb", "#fddc9b", "#fdc56b", "#fca54f", "#f9803c", "#ea5a2c", "#d1361f", "#ab1a1c", "#7b0d1e")
_OVERFULL = "#3d0014"
_DOWN, _PASSED, _CHOSEN, _IGNORED = "#7d8590", "#cdebd3", "#14803c", "#ffffff"
# Colours that people with any colour vision can tell apart, from green too.
_FILTERS = ("#e69f00", "#56b4e9", "#cc79a7", "#d55e00", "#0072b2", "#f0e442", "#8c6bb1", "#a6761d")
_OTHER = "#b3b3b3"


@dataclass(frozen=True)
class _Sizes:
    """The form of cells, by how many there are."""

    width: int
    height: int
    gap: int
    named: bool = False


def _sizes(cells: int) -> _Sizes:
    if cells <= 120:
        return _Sizes(103, 34, 5, named=True)
    for most, side in ((600, 26), (2500, 15)):
        if cells <= most:
            return _Sizes(side, side, 2)
    return _Sizes(9, 9, 1)


class _Cell:
    """One host, or several neighbours."""

    def __init__(self, hosts: Sequence[HostUse]) -> None:
        self.hosts = hosts
        self.states = Counter(host.state for host in hosts)
        self.chosen = sum(host.chosen for host in hosts)
        self.verdict = Counter(host.refused_by for host in hosts).most_common(1)[0][0]

    @property
    def down(self) -> bool:
        return self.states["down"] == len(self.hosts)

    @property
    def disabled(self) -> bool:
        return not self.down and self.states["up"] == 0

    @property
    def name(self) -> str:
        first, last = self.hosts[0].host, self.hosts[-1].host
        return first if len(self.hosts) == 1 else f"{first} … {last}"


def draw(fleet: Fleet, *, by: str = "fullest", title: str = "", moment: str = "") -> str:
    """Return the SVG; a fleet of a dry run is coloured by the filters that removed hosts, others by use."""
    together = max(1, math.ceil(len(fleet.hosts) / MOST_CELLS))
    of_zone: dict[int, list[HostUse]] = {}
    for host in fleet.hosts:
        of_zone.setdefault(host.zone, []).append(host)
    zones = [(fleet.zones[number], hosts) for number, hosts in sorted(of_zone.items())]
    cells = {name: [_Cell(hosts[at : at + together]) for at in range(0, len(hosts), together)] for name, hosts in zones}
    sizes = _sizes(sum(map(len, cells.values())))
    tried = bool(fleet.filters)
    colours = _filter_colours(fleet)
    share = _share_by(by)
    body: list[str] = []
    top = _head(body, fleet, by, title, moment, together)
    top = _legend(body, fleet, colours, sizes, top)
    per_row = (WIDTH - 2 * MARGIN + sizes.gap) // (sizes.width + sizes.gap)
    for name, hosts in zones:
        body.append(f'<text class="z" x="{MARGIN}" y="{top + 15}">{_text(name)}</text>')
        told = _summary(hosts, share, tried)
        body.append(f'<text class="s" x="{WIDTH - MARGIN}" y="{top + 15}" text-anchor="end">{_text(told)}</text>')
        top += 24
        late: list[str] = []  # outlines, above all other cells
        for number, cell in enumerate(cells[name]):
            x = MARGIN + number % per_row * (sizes.width + sizes.gap)
            y = top + number // per_row * (sizes.height + sizes.gap)
            fill = _fill(cell, tried, colours, share)
            tooltip = _text(_tooltip(cell, fleet, name))
            drawn = f"M{x} {y}h{sizes.width}v{sizes.height}h-{sizes.width}Z"
            body.append(f'<path d="{drawn}" fill="{fill}"><title>{tooltip}</title></path>')
            late += _marks(cell, tried, x, y, sizes)
            if sizes.named:
                late += _label(cell, fill, share, _verdict(cell, fleet), tried, x, y)
        body += late
        top += math.ceil(len(cells[name]) / per_row) * (sizes.height + sizes.gap) + 18
    return _page(body, top, title or "Fleet")


def _page(body: Sequence[str], height: int, title: str) -> str:
    style = (
        "text{font-family:system-ui,'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#1f2328}"
        ".t{font-size:22px;font-weight:600}.s{font-size:13px;fill:#57606a}.z{font-size:15px;font-weight:600}"
        ".l{font-size:12px}.n{font-size:11px}.m{pointer-events:none}"
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}">',
            f"<title>{_text(title)}</title><style>{style}</style>",
            '<defs><pattern id="d" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0 0V6" stroke="#1f2328" stroke-width="2.2" stroke-opacity=".6"/></pattern></defs>',
            f'<path d="M0 0H{WIDTH}V{height}H0Z" fill="#fff"/>',
            *body,
            "</svg>\n",
        )
    )


def _head(body: list[str], fleet: Fleet, by: str, title: str, moment: str, together: int) -> int:
    size = f"{_hosts(len(fleet.hosts))} in {counted(len(fleet.zones), 'availability zone')}"
    words = [size, "as the scheduler knows them"]
    if not fleet.filters:
        what = {"fullest": "the fullest of memory, vCPUs and disk", "vcpus": "vCPUs"}.get(by, by)
        words.append(f"coloured by use: {what}")
    if together > 1:
        words.append(f"a cell is {together} hosts")
    if moment:
        words.append(moment)
    body.append(f'<text class="t" x="{MARGIN}" y="42">{_text(title or "Fleet")}</text>')
    body.append(f'<text class="s" x="{MARGIN}" y="64">{_text(" · ".join(words))}</text>')
    return 80


def _legend(body: list[str], fleet: Fleet, colours: dict[int, str], sizes: _Sizes, top: int) -> int:
    """Draw what the colours mean; return where it ends."""
    states = Counter(host.state for host in fleet.hosts)
    x = MARGIN
    if fleet.filters:
        entries = _verdict_entries(fleet, colours)
    else:
        x = _scale(body, top)
        entries = [(_OVERFULL, "over 100 %", "")]
    back = "#fff" if fleet.filters else _DOWN
    if states["down"]:
        entries.append((back, f"down: {states['down']:,}", "down"))
    if states["disabled"]:
        entries.append(("#fff", f"disabled: {states['disabled']:,}", "disabled"))
    for colour, words, mark in entries:
        width = 24 + round(len(words) * 6.6) + 16
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, top = MARGIN, top + 22
        body.append(_box(x, top, 16, 14, colour, 'stroke="#8c959f" stroke-width=".6"'))
        if mark == "down":
            body.append(_cross(x, top, 16, 14))
        elif mark == "disabled":
            body.append(_hatch(x, top, 16, 14, sizes))
        body.append(f'<text class="l" x="{x + 22}" y="{top + 11}">{_text(words)}</text>')
        x += width
    return top + 34


def _verdict_entries(fleet: Fleet, colours: dict[int, str]) -> list[tuple[str, str, str]]:
    """Return the parts of the legend that say what a dry run decided: colour, words, mark."""
    counts = Counter(host.refused_by for host in fleet.hosts)
    chosen = sum(1 for host in fleet.hosts if host.chosen)
    entries = [(_CHOSEN, f"chosen: {chosen:,}", "")] if chosen else []
    entries.append((_PASSED, f"passed all filters: {counts[NOT_REFUSED]:,}", ""))
    entries += [
        (colours[number], f"removed by {name}: {counts[number]:,}", "")
        for number, name in enumerate(fleet.filters)
        if counts[number]
    ]
    if counts[NOT_CONSIDERED]:
        entries.append((_IGNORED, f"not asked for: {counts[NOT_CONSIDERED]:,}", ""))
    return entries


def _scale(body: list[str], top: int) -> int:
    """Draw the colours of use as one bar; return where it ends."""
    body.append(f'<text class="l" x="{MARGIN}" y="{top + 11}">0 %</text>')
    x = MARGIN + 28
    for colour in _HEAT:
        body.append(_box(x, top, 28, 14, colour))
        x += 28
    body.append(f'<text class="l" x="{x + 6}" y="{top + 11}">100 % used</text>')
    return x + 100


def _box(x: int, y: int, width: int, height: int, fill: str, more: str = "") -> str:
    return f'<path class="m" d="M{x} {y}h{width}v{height}h-{width}Z" fill="{fill}" {more}/>'


def _cross(x: int, y: int, width: int, height: int) -> str:
    drawn = f"M{x} {y}l{width} {height}M{x + width} {y}l-{width} {height}"
    return f'<path class="m" d="{drawn}" stroke="#1f2328" stroke-width="1.4"/>'


def _hatch(x: int, y: int, width: int, height: int, sizes: _Sizes) -> str:
    """Mark a disabled host; in a small cell one line, which is seen on every colour."""
    if sizes.height > 12:
        return _box(x, y, width, height, "url(#d)")
    line = f'<path class="m" d="M{x} {y + height}l{width} -{height}" stroke='
    return f'{line}"#fff" stroke-width="4"/>{line}"#1f2328" stroke-width="1.6"/>'


def _marks(cell: _Cell, tried: bool, x: int, y: int, sizes: _Sizes) -> Iterator[str]:
    """Draw what a colour alone does not say: hosts that are down or disabled, and the chosen ones."""
    if cell.down:
        yield _cross(x, y, sizes.width, sizes.height)
    elif cell.disabled:
        yield _hatch(x, y, sizes.width, sizes.height, sizes)
    if cell.chosen:
        yield _box(x - 1, y - 1, sizes.width + 2, sizes.height + 2, "none", 'stroke="#000" stroke-width="2"')
    elif tried and cell.verdict == NOT_CONSIDERED:
        yield _box(x, y, sizes.width, sizes.height, "none", 'stroke="#c9d1d9" stroke-width=".8"')


def _label(
    cell: _Cell, fill: str, share: Callable[[HostUse], float], verdict: str, tried: bool, x: int, y: int
) -> Iterator[str]:
    """Write into a large cell what it is."""
    colour = "#fff" if fill in (*_HEAT[6:], _OVERFULL, _CHOSEN, "#0072b2", "#d55e00") else "#1f2328"
    if cell.chosen:
        below = counted(cell.chosen, "server")
    elif cell.states["up"] < len(cell.hosts):
        below = "down" if cell.down else "disabled"
    elif tried:
        below = _cut(verdict)
    else:
        below = _percent(share(cell.hosts[0]))
    back = "" if cell.states["up"] == len(cell.hosts) else ' stroke="#fff" stroke-width="3" paint-order="stroke"'
    if back:
        colour = "#1f2328"
    for words, line in ((_cut(cell.name), 14), (below, 28)):
        yield f'<text class="n m" x="{x + 6}" y="{y + line}" style="fill:{colour}"{back}>{_text(words)}</text>'


def _fill(cell: _Cell, tried: bool, colours: dict[int, str], share: Callable[[HostUse], float]) -> str:
    if tried:
        if cell.chosen:
            return _CHOSEN
        return colours.get(cell.verdict, _OTHER)
    if cell.down:
        return _DOWN
    mean = sum(map(share, cell.hosts)) / len(cell.hosts)
    return _OVERFULL if mean > 1 else _HEAT[min(int(mean * len(_HEAT)), len(_HEAT) - 1)]


def _filter_colours(fleet: Fleet) -> dict[int, str]:
    """Return a colour for each filter that removed hosts, in their order; the last ones share one."""
    removing = sorted({host.refused_by for host in fleet.hosts if host.refused_by >= 0})
    colours = {number: _FILTERS[at] if at < len(_FILTERS) else _OTHER for at, number in enumerate(removing)}
    return {**colours, NOT_REFUSED: _PASSED, NOT_CONSIDERED: _IGNORED}


def _share_by(by: str) -> Callable[[HostUse], float]:
    match by:
        case "memory":
            return lambda host: host.memory_mb.share
        case "vcpus":
            return lambda host: host.vcpus.share
        case "disk":
            return lambda host: host.disk_gb.share
        case _:
            return lambda host: max(host.memory_mb.share, host.vcpus.share, host.disk_gb.share)


def _summary(hosts: Sequence[HostUse], share: Callable[[HostUse], float], tried: bool) -> str:
    """Return a zone in words."""
    words = [_hosts(len(hosts))]
    if tried:
        words.append(f"{sum(host.refused_by == NOT_REFUSED for host in hosts):,} passed")
        words += [f"{number:,} to place" for number in [sum(host.chosen for host in hosts)] if number]
    elif hosts:
        words.append(f"{_percent(sum(map(share, hosts)) / len(hosts))} used on average")
    states = Counter(host.state for host in hosts)
    words += [f"{states[state]:,} {state}" for state in ("down", "disabled") if states[state]]
    return ", ".join(words)


def _tooltip(cell: _Cell, fleet: Fleet, zone: str) -> str:
    """Return what a person reads about a cell."""
    if len(cell.hosts) > 1:
        words = [f"{cell.name} ({zone}), {len(cell.hosts)} hosts"]
        words += [f"{number} {state}" for state, number in sorted(cell.states.items()) if state != "up"]
    else:
        [host] = cell.hosts
        words = [f"{host.host} ({zone})"]
        words += [host.state] if host.state != "up" else []
        words.append(f"memory {_gib(host.memory_mb)} GiB")
        words.append(f"vCPUs {host.vcpus.used}/{host.vcpus.capacity}")
        words.append(f"disk {host.disk_gb.used}/{host.disk_gb.capacity} GB")
        words.append(counted(host.servers, "server"))
    if cell.chosen:
        words.append(f"chosen for {counted(cell.chosen, 'server')}")
    elif cell.verdict >= 0:
        words.append(f"removed by {_verdict(cell, fleet)}")
    elif cell.verdict == NOT_CONSIDERED:
        words.append("not asked for")
    return ", ".join(words)


def _verdict(cell: _Cell, fleet: Fleet) -> str:
    """Return the filter that removed most hosts of a cell, in a dry run."""
    if cell.verdict >= 0:
        return fleet.filters[cell.verdict]
    return "passed" if cell.verdict == NOT_REFUSED else "not asked for"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _hosts(number: int) -> str:
    return f"{number:,} host{'' if number == 1 else 's'}"


def _cut(words: str) -> str:
    return words if len(words) <= 15 else f"{words[:14]}…"


def _gib(use: Use) -> str:
    return f"{use.used / 1024:.0f}/{use.capacity / 1024:.0f}"


def _text(words: str) -> str:
    """Return text for XML, without characters that no XML may have."""
    plain = words if words.isprintable() else "".join(each if each.isprintable() else "?" for each in words)
    return escape(plain, quote=False)
