"""Charts as numbers: where each bar, line and mark stands. Pure; the templates draw them as SVG.

Coordinates are texts, ready for attributes. Every chart has at most as many shapes as it is wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH: Final = 1000
"""Of a chart, in its own units."""
NARROW: Final = 2.0
"""What is narrower is drawn so wide, so that one gap of a million messages is seen."""


@dataclass(frozen=True, slots=True)
class MapSpan:
    """Queue offsets ``[start, end)`` of one kind."""

    start: int
    end: int
    kind: str  # ``sealed``, ``open``, ``gap``, ``archived``, ``packed`` or ``quarantined``


@dataclass(frozen=True, slots=True)
class ChartBar:
    """A rectangle."""

    x: str
    width: str
    kind: str
    title: str
    y: str = "0"
    height: str = "1"


@dataclass(slots=True)
class _BarRun:
    """Neighbours of one kind that are drawn as one."""

    x: float
    end_x: float
    span: MapSpan
    count: int = 1

    @property
    def bar(self) -> ChartBar:
        width = max(self.end_x - self.x, NARROW)
        many = f"{self.count:,} times " if self.count > 1 else ""
        title = f"{many}{self.span.kind}: [{self.span.start:,}, {self.span.end:,})"
        return ChartBar(_number(min(self.x, WIDTH - width)), _number(width), self.span.kind, title)


def segment_bars(spans: Iterable[MapSpan], low: int, high: int) -> list[ChartBar]:
    """A row of a segment map: neighbours of one kind that are too narrow to be told apart are one bar."""
    scale = WIDTH / max(high - low, 1)
    runs: list[_BarRun] = []
    for span in sorted(spans, key=lambda one: one.start):
        x, end_x = ((min(max(at, low), high) - low) * scale for at in (span.start, span.end))
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.span.kind, last.span.end) == (span.kind, span.start)
            and end_x - last.x < NARROW
        ):
            last.span, last.end_x = MapSpan(last.span.start, span.end, span.kind), end_x
            last.count += 1
        else:
            runs.append(_BarRun(x, end_x, span))
    return [one.bar for one in _few(runs)]


_COMMON: Final = ("sealed", "archived", "packed")


def _few(runs: list[_BarRun]) -> list[_BarRun]:
    """Of more than the chart is wide one at each place: what is rare before what is common."""
    if len(runs) <= WIDTH:
        return runs
    chosen: dict[int, _BarRun] = {}
    for one in runs:
        place = int(one.x)
        if place not in chosen or one.span.kind not in _COMMON:
            chosen[place] = one
    return [chosen[place] for place in sorted(chosen)]


def histogram(rows: Sequence[tuple[str, int]], height: int = 120) -> list[ChartBar]:
    """A bar for each row, side by side."""
    most, width = max((count for _, count in rows), default=0) or 1, WIDTH / max(len(rows), 1)
    bars = []
    for number, (name, count) in enumerate(rows):
        tall = max(height * count / most, 1.0 if count else 0.0)
        bars.append(
            ChartBar(
                _number(number * width),
                _number(max(width * 0.85, 0.5)),
                "count",
                f"{name}: {count:,}",
                _number(height - tall),
                _number(tall),
            )
        )
    return bars


def line(points: Sequence[tuple[int, float]], height: int = 120) -> str:
    """The points of a polyline, from the first time to the last."""
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    most, span = max(value for _, value in points) or 1, max(last - first, 1)
    return " ".join(
        f"{_number((at - first) / span * WIDTH)},{_number(height - value / most * (height - 4))}"
        for at, value in points
    )


def thinned(points: Sequence[tuple[int, float]], most: int = 240) -> list[tuple[int, float]]:
    """So many points at most: of neighbours the highest, since that is what one looks for."""
    step = -(-len(points) // most)
    if step <= 1:
        return list(points)
    return [
        max(points[at : at + step], key=lambda one: one[1]) for at in range(0, len(points), step)
    ]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
