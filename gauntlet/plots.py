"""Small plots as SVG text for the report: no scripts, no fonts, no files. Colours are classes of a style."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A range on screen; logarithmic where asked for."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixels."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value)  # fmt: skip
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Decades, or five round steps."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            found = [10.0**power for power in range(first, last + 1)]
            return found if len(found) > 1 else [self.low, self.high]
        step = _round((self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, first + 6) if step * n <= self.high * (1 + 1e-9)]


def _round(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def number(value: float) -> str:
    """Three digits, without an exponent where that is short."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass
class Plot:
    """A frame with two axes; `draw` what lies in it, then `svg`."""

    x: Axis
    y: Axis
    x_label: str
    y_label: str
    parts: list[str] = field(default_factory=list)
    key: list[tuple[str, str]] = field(default_factory=list)

    def line(self, points: Sequence[Point], kind: str, name: str = "") -> None:
        """Through the points, in the colour of class `kind`."""
        path = " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        if name:
            self.key.append((kind, name))

    def dot(self, point: Point, kind: str, title: str, radius: float = 4) -> None:
        """A mark; its title shows under the pointer."""
        x, y = self.x.at(point[0]), self.y.at(point[1])
        self.parts.append(
            f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">'
            f"<title>{html.escape(title)}</title></circle>"
        )

    def svg(self, title: str) -> str:
        """The whole picture."""
        return frame(title, [*self._axes(), *self.parts, *self._key()])

    def _axes(self) -> Iterable[str]:
        floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value in self.x.ticks():
            at = self.x.at(value)
            yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{floor}"/>'
            yield text("tick", at, floor + 14, number(value), "middle")
        for value in self.y.ticks():
            at = self.y.at(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield text("tick", LEFT - 6, at + 4, number(value), "end")
        yield text("label", (LEFT + right) / 2, HEIGHT - 8, self.x_label, "middle")
        turned = f'transform="translate(13 {(TOP + floor) / 2}) rotate(-90)"'
        yield f'<text class="label" {turned} text-anchor="middle">{html.escape(self.y_label)}</text>'

    def _key(self) -> Iterable[str]:
        """Names of the lines, at the lower right, where the lines of a distribution leave room."""
        for at, (kind, name) in enumerate(reversed(self.key)):
            yield text(f"key {kind}", WIDTH - RIGHT - 8, HEIGHT - BOTTOM - 10 - 15 * at, name, "end")


def text(kind: str, x: float, y: float, words: str, anchor: str) -> str:
    """A text element."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def frame(title: str, parts: Iterable[str], height: int = HEIGHT) -> str:
    """An SVG of the common width that screen readers can name."""
    inner = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title, quote=True)}">'
        f"{inner}</svg>"
    )


def plot(x: Sequence[float], y: Sequence[float], labels: tuple[str, str], log: tuple[bool, bool]) -> Plot:
    """A frame that holds these values with a little room."""
    across = _axis(x, LEFT, WIDTH - RIGHT, log[0])
    up = _axis(y, HEIGHT - BOTTOM, TOP, log[1])
    return Plot(across, up, *labels)


def _axis(values: Sequence[float], start: float, end: float, log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.25, high * 1.25, start, end, True)
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return Axis(low - room if low else 0.0, high + room, start, end)


def distributions(rows: Mapping[str, tuple[str, Sequence[float]]], medians: Sequence[float]) -> str:
    """Cumulative distributions: name -> (colour, quantiles in ms at equal steps). `medians`: of the
    processes, as dots."""
    values = [v for _, quantiles in rows.values() for v in quantiles if v > 0]
    if not values:
        return ""
    log = max(values) > 8 * min(values)
    picture = plot([min(values), max(values)], [0.0, 100.0], ("ms per call", "% of calls"), (log, False))
    picture.y = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    for name, (kind, quantiles) in rows.items():
        step = 100 / (len(quantiles) - 1)
        picture.line([(v, step * at) for at, v in enumerate(quantiles) if v > 0], kind, name)
    for median in medians:
        picture.dot((median, 50.0), "own", f"median of a process: {number(median)} ms", 3)
    return picture.svg("distribution of latencies")


def roofline(points: Sequence[tuple[str, float, float, bool]], bandwidth: float, peak: float) -> str:
    """Operations per second over operations per byte, under the measured ceilings. `points`: (name,
    operations per byte, operations per second, whether it is the one that is shown)."""
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    ridge = peak / bandwidth
    across = [min(*xs, ridge) / 2, max(*xs, ridge) * 2]
    roof = [(x, min(x * bandwidth, peak)) for x in (across[0], ridge, across[1])]
    highest, lowest = max(*ys, peak), min(*ys, roof[0][1])
    picture = plot(across, [lowest, highest], ("operations per byte", "operations per second"), (True, True))
    picture.line(roof, "roof")
    for name, x, y, chosen in sorted(points, key=lambda p: p[3]):
        title = f"{name}: {number(x)} per byte, {number(y)} per second"
        picture.dot((x, y), "own" if chosen else "other", title, 5 if chosen else 3.5)
    return picture.svg("roofline")


BAR, NAMES_END, BARS_END = 22, 130, WIDTH - 14
"""Height of a row, where bars begin, where they may end."""


def bars(rows: Sequence[tuple[str, float, str, str]], unit: str, mark: float | None = None) -> str:
    """Horizontal bars: (name, value, text, colour). `mark`: a value to compare with, as a dashed line."""
    if not rows:
        return ""
    height = BAR * len(rows) + 34
    most = max(*(value for _, value, _, _ in rows), mark or 0.0) or 1.0
    axis = Axis(0.0, most * 1.15, NAMES_END, BARS_END)
    parts = [part for at, row in enumerate(rows) for part in _bar(row, 8 + BAR * at, axis)]
    if mark is not None:
        x = axis.at(mark)
        parts.append(f'<line class="line bound" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 24}"/>')
    parts.append(text("label", (NAMES_END + WIDTH) / 2, height - 8, unit, "middle"))
    return frame(unit, parts, height)


def _bar(row: tuple[str, float, str, str], y: float, axis: Axis) -> Iterable[str]:
    """Its text stands inside where there is no room beside."""
    name, value, told, kind = row
    end = axis.at(value)
    yield text("tick", NAMES_END - 6, y + 12, name, "end")
    shape = f'x="{NAMES_END}" y="{y}" width="{max(end - NAMES_END, 1):.1f}" height="16" rx="2"'
    yield f'<rect class="bar {kind}" {shape}/>'
    inside = end > WIDTH - 110
    yield text("value inside" if inside else "value", end - 5 if inside else end + 5, y + 12, told,
               "end" if inside else "start")  # fmt: skip


def history(points: Sequence[tuple[str, float, float, float]]) -> str:
    """Median with its interval over verdicts in order of time: (what, ms, low, high)."""
    if len(points) < 2:
        return ""
    lows, highs = [p[2] for p in points], [p[3] for p in points]
    places = [float(n) for n in range(1, len(points) + 1)]
    picture = plot([0.5, len(points) + 0.5], [0.0, *lows, *highs], ("verdict", "ms"), (False, False))
    picture.x = Axis(0.5, len(points) + 0.5, LEFT, WIDTH - RIGHT)
    for place, (what, median, low, high) in zip(places, points, strict=True):
        picture.line([(place, low), (place, high)], "own")
        picture.dot((place, median), "own", f"{what}: {number(median)} ms")
    return picture.svg("median over verdicts")
