"""The questions of docs/analytics.md, and their answers counted in Python from what was sent."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from support.shop import HOUR_MS, RETRIES, Sent, Shop

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = (Path(__file__).parents[2] / "docs" / "analytics.md").read_text("utf-8")
QUESTIONS = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", PAGE, re.DOTALL))
WORDS = re.findall(r"^\| (`+) ?(.+?) ?\1 \| (`+) ?(.+?) ?\3 \|$", PAGE, re.MULTILINE)
SHOPPING = ("orders", "payments")


def for_spark(question: str) -> str:
    """The same in Spark's words, by the table of the page."""
    for _, duckdb, _, spark in WORDS:
        question = question.replace(duckdb, spark)
    return question


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows with numbers of one kind, and times as milliseconds."""
    return [tuple(map(_plain, row.values())) for row in table.to_pylist()]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return round(value.replace(tzinfo=value.tzinfo or UTC).timestamp() * 1000)
    if isinstance(value, Decimal | float):
        return round(float(value), 6)
    return value


def _hourly(shop: Shop) -> list[tuple[Any, ...]]:
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for one in shop.of(*SHOPPING):
        if 6 <= one.hour < 18:
            hour_ms = one.store_ms // HOUR_MS * HOUR_MS
            found[hour_ms, one.message.topic].append(len(one.message.body))
    return [(t, hour, len(sizes), sum(sizes)) for (hour, t), sizes in sorted(found.items())]


def _latency(shop: Shop) -> list[tuple[Any, ...]]:
    rows = []
    for topic in SHOPPING:
        values = [one.latency_ms for one in shop.of(topic)]
        middle, high = (round(float(np.percentile(values, p)), 6) for p in (50, 99))
        rows.append((topic, middle, high, max(values)))
    return rows


def _retries(shop: Shop) -> list[tuple[Any, ...]]:
    tries = Counter(
        (m.topic.removeprefix("%RETRY%"), m.properties["RETRY_TOPIC"], m.reconsume_times)
        for m in (one.message for one in shop.of(*RETRIES))
    )
    return [(*what, number) for what, number in sorted(tries.items())]


def _keys(shop: Shop) -> list[tuple[Any, ...]]:
    every = Counter(key for one in shop.of("orders") for key in one.keys)
    found = [(key, n) for key, n in every.items() if key.startswith("customer-")]
    return sorted(found, key=lambda item: (-item[1], item[0]))[:5]


def _order(shop: Shop) -> list[tuple[Any, ...]]:
    found = [one for one in shop.sent if "order-11" in one.keys]
    return sorted(
        (one.store_ms, m.topic, m.tags, m.reconsume_times, _amount(one))
        for one in found
        for m in [one.message]
    )


def _amount(one: Sent) -> str:
    found = re.search(rb'"amount": (\d+)', one.message.body)
    assert found
    return found[1].decode()


def _join(shop: Shop) -> list[tuple[Any, ...]]:
    made = {one.keys[0]: one.store_ms for one in shop.of("orders") if one.message.tags == "created"}
    paid = {one.keys[0]: one.store_ms for one in shop.of("payments")}
    waits = [paid[key] - at_ms for key, at_ms in made.items() if key in paid]
    return [(len(made), len(waits), round(sum(waits) / len(waits) / 60000, 6))]


ANSWERS = {
    "hourly": _hourly,
    "latency": _latency,
    "retries": _retries,
    "keys": _keys,
    "order": _order,
    "join": _join,
}
