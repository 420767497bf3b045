"""Draws charts of an archive: python plots.py ARCHIVE_URL [--out DIR] [--topics GLOB,...]

Messages and bytes over time, sizes of bodies, and latency (stored minus born), a PNG file each. DuckDB does the counting;
matplotlib draws what it counted: pip install 'tieredmq[charts]'.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.duck import ask
from tiered.errors import TieredStoreError

STEPS_MS = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000)
STEPS_MAX = 60
TOPICS_SHOWN = 6
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
PERCENTILES = (50, 90, 95, 99, 99.9, 100)


def table(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def all_of(topics: list[str], columns: str) -> str:
    """Rows of several topics under one another; the name of each is in ``name``."""
    parts = [
        f"SELECT '{t.replace(chr(39), chr(39) * 2)}' AS name, {columns} FROM {table(t)}"
        for t in topics
    ]
    return " UNION ALL ".join(parts)


def step_ms(span_ms: int) -> int:
    """The shortest step by which a span has no more than STEPS_MAX of them."""
    return next((s for s in STEPS_MS if span_ms <= s * STEPS_MAX), STEPS_MS[-1])


def measure(store: Any, wanted: list[str]) -> dict[str, Any]:
    """Everything that the charts show."""

    def rows(question: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(store, question).rows.to_pylist()
        return found

    names = [row["name"] for row in rows("SHOW TABLES")]
    topics = [n for n in names if any(fnmatchcase(n, glob) for glob in wanted)]
    if not topics:
        raise SystemExit(f"no such topic; there are {', '.join(names) or 'none'}")
    every = all_of(topics, "epoch_ms(store_ts) AS ms")
    (span,) = rows(f"SELECT min(ms) AS low, max(ms) AS high FROM ({every})")
    step = step_ms(span["high"] - span["low"] + 1)
    columns = (
        "epoch_ms(store_ts) AS ms, octet_length(body) AS size,"
        " epoch_ms(store_ts) - epoch_ms(born_ts) AS latency"
    )
    every = all_of(topics, columns)
    low = span["low"] // step * step
    found: dict[str, Any] = {"topics": {}, "low_ms": low, "step_ms": step}
    found["steps"] = (span["high"] - low) // step + 1
    rate = rows(
        f"SELECT name, (ms - {low}) // {step} AS step, count(*) AS messages,"
        f" sum(size)::BIGINT AS size FROM ({every}) GROUP BY ALL"
    )
    cases = " ".join(f"WHEN size <= {size} THEN {number}" for number, size in enumerate(SIZES))
    bins = rows(
        f"SELECT name, CASE {cases} ELSE {len(SIZES)} END AS bin, count(*) AS messages"
        f" FROM ({every}) GROUP BY ALL"
    )
    shares = [p / 100 for p in PERCENTILES]
    latency = rows(
        f"SELECT name, count(*) AS messages, quantile_disc(latency, {shares}) AS latency"
        f" FROM ({every}) GROUP BY ALL"
    )
    for row in latency:
        found["topics"][row["name"]] = {
            "messages": row["messages"],
            "latency_ms": row["latency"],
            "rate": [0] * found["steps"],
            "bytes": [0] * found["steps"],
            "sizes": [0] * (len(SIZES) + 1),
        }
    for row in rate:
        one = found["topics"][row["name"]]
        one["rate"][row["step"]] = row["messages"]
        one["bytes"][row["step"]] = row["size"]
    for row in bins:
        found["topics"][row["name"]]["sizes"][row["bin"]] = row["messages"]
    return found


def draw(found: dict[str, Any], out: Path) -> list[Path]:
    """The charts, a file each."""
    busiest = sorted(found["topics"].items(), key=lambda item: (-item[1]["messages"], item[0]))
    shown, rest = busiest[:TOPICS_SHOWN], busiest[TOPICS_SHOWN:]
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name, title, paint in (
        ("rate", "Messages", _rate("rate", "messages")),
        ("bytes", "Bytes of bodies", _rate("bytes", "bytes")),
        ("sizes", "Sizes of bodies", _sizes),
        ("latency", "From born to stored", _latency),
    ):
        figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
        paint(axes, found, shown)
        axes.set_title(title + (f" ({len(rest)} more topics not shown)" if rest else ""))
        axes.spines[["top", "right"]].set_visible(False)
        # Beside the axes: to look for the best place in them takes seconds where there is much to draw.
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
        files.append(out / f"{name}.png")
        figure.savefig(files[-1], dpi=90, metadata={"Software": None})
        plt.close(figure)
    return files


def step_text(ms: int) -> str:
    for unit, size in (("day", 86_400_000), ("hour", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= size:
            return unit if ms == size else f"{ms // size} {unit}"
    return f"{ms} ms"


def _rate(what: str, unit: str) -> Any:
    def paint(axes: Any, found: dict[str, Any], shown: list[Any]) -> None:
        step, low = found["step_ms"], found["low_ms"]
        scale, word = (1, "ms") if step < 1_000 else (1_000, "s")
        if step >= 600_000:
            scale, word = 3_600_000, "hours"
        starts = [number * step / scale for number in range(found["steps"])]
        below = [0] * found["steps"]
        for name, one in shown:
            axes.bar(starts, one[what], step / scale, bottom=below, label=name, align="edge")
            below = [a + b for a, b in zip(below, one[what], strict=True)]
        began = datetime.fromtimestamp(low / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        axes.set_xlabel(f"{word} since {began} UTC")
        axes.set_ylabel(f"{unit} per {step_text(step)}")

    return paint


def _sizes(axes: Any, _found: dict[str, Any], shown: list[Any]) -> None:
    used = [any(one["sizes"][n] for _, one in shown) for n in range(len(SIZES) + 1)]
    first, last = used.index(True), len(used) - used[::-1].index(True)
    labels = [f"≤ {_bytes(size)}" for size in SIZES] + [f"> {_bytes(SIZES[-1])}"]
    below = [0] * (last - first)
    for name, one in shown:
        axes.bar(range(last - first), one["sizes"][first:last], 0.8, bottom=below, label=name)
        below = [a + b for a, b in zip(below, one["sizes"][first:last], strict=True)]
    axes.set_xticks(range(last - first), labels[first:last], fontsize="small")
    axes.set_ylabel("messages")


def _bytes(size: int) -> str:
    for unit, one in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= one:
            return f"{size // one} {unit}"
    return f"{size} B"


def _latency(axes: Any, _found: dict[str, Any], shown: list[Any]) -> None:
    places = range(len(PERCENTILES))
    for name, one in shown:
        axes.plot(places, one["latency_ms"], marker="o", label=name)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xticks(places, [f"p{p:g}" if p < 100 else "max" for p in PERCENTILES])
    axes.set_ylabel("milliseconds")
    axes.grid(axis="y", alpha=0.3)


def main(arguments: list[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of an archive")
    parser.add_argument("--out", type=Path, default=Path("charts"), help="folder (charts)")
    parser.add_argument("--topics", default="*", help="globs, by commas (all)")
    options = parser.parse_args(arguments)
    store = open_store(options.url, S3Options())
    try:
        found = measure(store, options.topics.split(","))
    except TieredStoreError as error:
        raise SystemExit(str(error)) from error
    finally:
        store.close()
    files = draw(found, options.out)
    print(*files, sep="\n")
    return files


if __name__ == "__main__":
    main()
