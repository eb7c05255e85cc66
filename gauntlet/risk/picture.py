"""The reliability plot: the share that failed against the score, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

SIZE, LEFT, BOTTOM, TOP, RIGHT = 380, 60, 52, 64, 40
TICKS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
BLUE, GREY = "#1b6ca8", "#888"


def reliability(bins: Sequence[Mapping[str, Any]], title: str) -> str:
    """`bins`: `gauntlet.risk.evaluate.Bin` as plain data. On the diagonal the score is the share that
    fails. Both axes are square roots, since most scores are small; beside every point failures of
    outcomes."""
    largest = max([0.1, *(b["predicted"] for b in bins), *(b["observed"]["high"] for b in bins)])
    most = next(tick for tick in (*TICKS, largest) if tick >= largest)

    def x(value: float) -> float:
        return LEFT + SIZE * (value / most) ** 0.5

    def y(value: float) -> float:
        return TOP + SIZE * (1 - (value / most) ** 0.5)

    parts = [_axes(title, [tick for tick in TICKS if tick <= most], x, y)]
    parts += [_point(found, x(found["predicted"]), y) for found in bins]
    width, height = LEFT + SIZE + RIGHT, TOP + SIZE + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _axes(
    title: str, ticks: Sequence[float], x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    middle, turn = TOP + SIZE / 2, f'text-anchor="middle" transform="rotate(-90 16 {TOP + SIZE / 2})"'
    parts = [
        f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="{GREY}"/>',
        f'<path d="M{LEFT} {TOP + SIZE} l{SIZE} -{SIZE}" stroke="{GREY}" stroke-dasharray="4 4"/>',
        f'<text x="{LEFT + SIZE / 2}" y="{TOP + SIZE + 38}" text-anchor="middle">mean score</text>',
        f'<text x="16" y="{middle}" {turn}>share that failed, 95 % interval</text>',
    ]
    for tick in ticks:
        parts.append(f'<text x="{x(tick):.1f}" y="{TOP + SIZE + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return "".join(parts)


def _point(found: Mapping[str, Any], x: float, y: Callable[[float], float]) -> str:
    low, high, middle = (y(found["observed"][name]) for name in ("low", "high", "value"))
    count = f"{found['failures']}/{found['outcomes']}"
    told = f"{found['failures']} of {found['outcomes']} failed, {found['artifacts']} artifacts"
    return (
        f'<path d="M{x:.1f} {low:.1f} V{high:.1f}" stroke="{BLUE}"/>'
        f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{BLUE}"><title>{escape(told)}</title></circle>'
        f'<text transform="translate({x + 4:.1f} {high - 4:.1f}) rotate(-60)" fill="#444">{count}</text>'
    )
