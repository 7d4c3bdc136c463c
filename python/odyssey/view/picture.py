"""Pictures of a page as inline SVG: axes, lines, boxes and marks.

Colours are variables of the page's style.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Ticks = Sequence[tuple[float, str]]  # places on an axis, and what stands there
TEXT_HEIGHT = 11  # pixels of a letter's height
# pixels of a letter's width, at most on average: what stands beside an axis has room for all of
# them
LETTER_WIDTH = 7


def span(values: Any, margin: float = 0.0) -> tuple[float, float]:
    """Least and largest of those values that are finite, a share `margin` further apart; never
    the same twice.
    """
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = abs(low) / 10 or 0.5
        return low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, integers: bool = False, limit: int = 6) -> Ticks:
    """Round numbers from low to high, at most `limit`; `integers`: no fractions."""
    power = 10.0 ** math.floor(math.log10((high - low) / limit))
    step = next(n * power for n in (1, 2, 5, 10, 20) if (high - low) / (n * power) < limit)
    step = max(step, 1.0) if integers else step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    places = [
        i * step for i in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)
    ]
    plain = digits < 6 and max(abs(low), abs(high)) < 1e9
    return [(place, f"{place + 0.0:,.{digits}f}" if plain else f"{place:.6g}") for place in places]


def mark(kind: str, x: float, y: float, colour: str, tooltip: str = "") -> str:
    """A small shape around (x, y) in pixels: "dot", "bar", "cross" or "square"; `tooltip` when it
    is pointed at.
    """
    shape = {
        "dot": '<circle r="4" {fill}/>',
        "bar": '<path d="M0-9V9" {line}/>',
        "cross": '<path d="M-5-5L5 5M-5 5L5-5" {line}/>',
        "square": '<path d="M-4-4H4V4H-4Z" {fill}/>',
    }[kind].format(
        fill=f'style="fill:var(--{colour})"',
        line=f'style="stroke:var(--{colour});stroke-width:2.5"',
    )
    title = f"<title>{html.escape(tooltip)}</title>" if tooltip else ""
    return f'<g transform="translate({x:.1f} {y:.1f})">{title}{shape}</g>'


def key(kind: str, colour: str) -> str:
    """A mark as it stands in a legend."""
    return f'<svg class="mark" viewBox="-10 -10 20 20">{mark(kind, 0, 0, colour)}</svg>'


class Picture:
    """Axes that lines, boxes and marks are drawn in, in the numbers of the axes; str() gives the
    SVG.

    x, y: (left, right) and (bottom, top). x_ticks, y_ticks: None: round numbers. label: stands
    below the x axis.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        size: tuple[float, float] = (390, 220),
        x_ticks: Ticks | None = None,
        y_ticks: Ticks | None = None,
        label: str = "",
    ) -> None:
        self._x = x
        self._y = y
        (self._width, self._height) = size
        below = ticks(*x) if x_ticks is None else x_ticks
        beside = ticks(*y) if y_ticks is None else y_ticks
        self._left = 12 + LETTER_WIDTH * max((len(text) for _, text in beside), default=0)
        self._right = self._width - max(
            8, LETTER_WIDTH * max((len(text) for _, text in below), default=0) / 2
        )
        self._bottom = self._height - 8 - (TEXT_HEIGHT + 6) * (bool(below) + bool(label))
        self._parts: list[str] = []
        for value, text in beside:
            height = self._pixels(x[0], value)[1]
            self._parts += [self._grid(self._left, height, self._right, height)] * (y_ticks is None)
            self._parts.append(self._text(self._left - 6, height + 4, text, "end"))
        for value, text in below:
            place = self._pixels(value, y[0])[0]
            self._parts += [self._grid(place, 8, place, self._bottom)] * (
                x_ticks is None or y_ticks is not None
            )
            self._parts.append(self._text(place, self._bottom + TEXT_HEIGHT + 5, text))
        self._parts.append(self._grid(self._left, self._bottom, self._right, self._bottom))
        self._parts.append(self._text((self._left + self._right) / 2, self._height - 5, label))

    def _pixels(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        (left, right) = self._x
        (bottom, top) = self._y
        across = (x - left) / (right - left)
        up = (y - bottom) / (top - bottom)
        return self._left + across * (self._right - self._left), self._bottom - up * (
            self._bottom - 8
        )

    def _grid(self, x: float, y: float, to_x: float, to_y: float) -> str:
        return f'<path class="grid-line" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'

    def _text(self, x: float, y: float, text: str, anchor: str = "middle") -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
            if text
            else ""
        )

    def line(self, x: Any, y: Any, colour: str, dots: bool = False) -> None:
        """Draws a line through points, with gaps where y is not finite; dots: each point is
        marked.
        """
        stretch: list[str] = []
        for a, b in [*zip(x, y, strict=True), (0.0, math.nan)]:
            if math.isfinite(b):
                point = self._pixels(a, b)
                stretch.append(f"{point[0]:.1f} {point[1]:.1f}")
                self._parts += [mark("dot", *point, colour, f"{b:.6g}")] * dots
            elif stretch:
                style = f"fill:none;stroke:var(--{colour});stroke-width:1.7;stroke-linejoin:round"
                self._parts.append(f'<path d="M{"L".join(stretch)}" style="{style}"/>')
                stretch = []

    def box(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        colour: str,
        opacity: float = 1,
        text: str = "",
    ) -> None:
        """Fills a box, with a text in its middle."""
        (a, c), (b, d) = zip(self._pixels(x[0], y[0]), self._pixels(x[1], y[1]), strict=True)
        sides = (
            f'x="{min(a, c):.1f}" y="{min(b, d):.1f}" width="{max(abs(a - c), 1):.1f}" '
            f'height="{abs(b - d):.1f}"'
        )
        self._parts.append(f'<rect {sides} style="fill:var(--{colour});fill-opacity:{opacity}"/>')
        self._parts.append(self._text((a + c) / 2, (b + d) / 2 + 4, text))

    def mark(self, kind: str, x: float, y: float, colour: str, tooltip: str = "") -> None:
        self._parts.append(mark(kind, *self._pixels(x, y), colour, tooltip))

    def __str__(self) -> str:
        return f'<svg viewBox="0 0 {self._width:g} {self._height:g}">{"".join(self._parts)}</svg>'
