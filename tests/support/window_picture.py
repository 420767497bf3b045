"""Draws the curves of ``support.window_simulation`` as an SVG, always the same one.

From the folder ``tests``: ``python -m support.window_picture ../docs/contributing/read-ahead.svg``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.window_simulation import KINDS, MIB, Line, Reader, figures_of, simulate

from fetcher.limits import FetchSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECONDS = 30.0
STEP_S = 0.15
THROUGHPUT_S = 1.0
LINE = Line()
TITLES = {
    "fast": "fast: reads on at once",
    "slow": "slow: 5 MiB/s",
    "stalling": "stalling: 100 MiB/s for 2 s, then 8 s nothing",
    "bursty": "bursty: 48 MiB every 3 s",
    "seeking": "seeking: 1 to 16 MiB, then elsewhere",
}
WIDTH, HEIGHT, GAP, TOP, LEFT = 400, 110, 64, 96, 56
FONT = 'font-family="sans-serif" font-size="12" fill="#1b1f24"'
FAINT, WINDOW, UNREAD, SPEED = "#d0d4d9", "#0b5cad", "#f0a35e", "#2e7d4f"


def picture() -> str:
    """The SVG."""
    rows = [
        _row(simulate(kind, FetchSettings().window, LINE, seconds=SECONDS), index)
        for index, kind in enumerate(KINDS)
    ]
    width = LEFT + 2 * WIDTH + GAP + 24
    height = TOP + len(rows) * (HEIGHT + GAP)
    size = f'width="{width}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} {FONT}>',
        f'<rect {size} fill="#ffffff"/>',
        _text(LEFT, 26, "The read-ahead window of five readers", size=17),
        _text(LEFT, 46, "Simulated: 20 ms a request, 200 MiB/s; unread data expires after 5 s."),
        _key(LEFT, "window, MiB", WINDOW),
        _key(LEFT + 110, "here and unread, MiB", UNREAD),
        _key(LEFT + WIDTH + GAP, "delivered, MiB/s", SPEED),
    ]
    return "\n".join([*head, *rows, "</svg>", ""])


def _row(reader: Reader, index: int) -> str:
    top = TOP + index * (HEIGHT + GAP)
    windows = _sampled(reader, lambda row: row[1] / MIB)
    unread = _sampled(reader, lambda row: row[2] / MIB)
    speeds = _speeds(reader)
    most = _rounded([*windows, *unread])
    fastest = _rounded(speeds)
    figures = figures_of(reader, LINE, SECONDS)
    said = (
        f"{figures.share:.0%} of what is possible, {figures.over_fetch:.2f} bytes fetched for one"
    )
    parts = [
        _text(LEFT, top - 8, TITLES[reader.name]),
        _text(LEFT + WIDTH + GAP, top - 8, said),
        *_frame(LEFT, top, most),
        _line(LEFT, top, unread, most, UNREAD, is_area=True),
        _line(LEFT, top, windows, most, WINDOW),
        *_frame(LEFT + WIDTH + GAP, top, fastest),
        _line(LEFT + WIDTH + GAP, top, speeds, fastest, SPEED),
    ]
    return "\n".join(parts)


def _rounded(points: Sequence[tuple[float, float]]) -> int:
    """The end of an axis that holds them all."""
    most = max(y for _, y in points)
    return next(end for end in (8, 40, 80, 120, 160, 240, 320, 1000) if most <= end)


def _sampled(
    reader: Reader, value: Callable[[tuple[float, int, int, int]], float]
) -> list[tuple[float, float]]:
    """(seconds, value) at even steps: what it was then."""
    points, at, last = [], 0, 0.0
    for step in range(int(SECONDS / STEP_S) + 1):
        while at < len(reader.curve) and reader.curve[at][0] <= step * STEP_S:
            last = value(reader.curve[at])
            at += 1
        points.append((step * STEP_S, last))
    return points


def _speeds(reader: Reader) -> list[tuple[float, float]]:
    """(seconds, MiB/s) in steps of a second."""
    bins = [0.0] * int(SECONDS / THROUGHPUT_S)
    before = 0
    for at_s, _, _, delivered in reader.curve:
        bins[min(int(at_s / THROUGHPUT_S), len(bins) - 1)] += delivered - before
        before = delivered
    points = []
    for number, size in enumerate(bins):
        speed = size / MIB / THROUGHPUT_S
        points += [(number * THROUGHPUT_S, speed), ((number + 1) * THROUGHPUT_S, speed)]
    return points


def _line(
    left: int,
    top: int,
    points: Sequence[tuple[float, float]],
    most: float,
    colour: str,
    *,
    is_area: bool = False,
) -> str:
    """A line of the points, or the area under it; points within a straight line are left out."""
    kept = [
        point
        for index, point in enumerate(points)
        if index in {0, len(points) - 1}
        or not points[index - 1][1] == point[1] == points[index + 1][1]
    ]
    if is_area:
        kept = [(kept[0][0], 0.0), *kept, (kept[-1][0], 0.0)]
    places = " ".join(
        f"{left + x / SECONDS * WIDTH:.1f},{top + HEIGHT - min(y / most, 1.0) * HEIGHT:.1f}"
        for x, y in kept
    )
    style = f'fill="{colour}" stroke="none"' if is_area else f'fill="none" stroke="{colour}"'
    return f'<polyline {style} stroke-width="1.5" points="{places}"/>'


def _frame(left: int, top: int, most: int) -> list[str]:
    """Grid and numbers of one panel."""
    found = []
    for part in range(5):
        y = top + HEIGHT - part * HEIGHT // 4
        found.append(f'<path d="M{left} {y}H{left + WIDTH}" stroke="{FAINT}"/>')
        found.append(_text(left - 6, y + 4, str(most * part // 4), anchor="end"))
    for seconds in range(0, int(SECONDS) + 1, 5):
        x = left + int(seconds / SECONDS * WIDTH)
        found.append(_text(x, top + HEIGHT + 16, f"{seconds} s", anchor="middle"))
    return found


def _key(left: int, words: str, colour: str) -> str:
    mark = f'<rect x="{left}" y="58" width="12" height="10" fill="{colour}"/>'
    return mark + _text(left + 18, 67, words)


def _text(x: int, y: int, words: str, *, size: int = 12, anchor: str = "start") -> str:
    extra = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" font-size="{size}"{extra}>{words}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), "utf-8")
