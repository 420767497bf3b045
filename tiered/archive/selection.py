"""Which messages are wanted: bounds and values of a few columns, by which queues, files and rows are chosen. Pure.

What is chosen by coarse means (the log, statistics) may hold too much, never too little; ``mask`` then decides each row.
"""

from __future__ import annotations

from dataclasses import field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.errors import InvalidError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import pyarrow as pa

    from tiered.archive.model import ArchiveQueue

MIN = -(1 << 63)
MAX = (1 << 63) - 1
EVERY = (MIN, MAX)
_KEY_COLUMNS = ("keys", "uniq_key")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted; all of it must hold."""

    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and greatest value, both included, of columns of numbers; times in microseconds since 1970, UTC."""
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Values of columns of texts."""
    key: str | None = None  # one of the message's keys, or its unique id

    def within(self, column: str, low: int, high: int) -> Selection:
        """The same, with a column between two values, both included."""
        least, most = self.bounds.get(column, EVERY)
        both = (max(low, least), min(high, most))
        bounds = both if MIN <= both[0] <= both[1] <= MAX else (MAX, MIN)
        return replace(self, bounds={**self.bounds, column: bounds})

    def among(self, column: str, values: Iterable[str]) -> Selection:
        """The same, with a column that has one of these values."""
        found = frozenset(values)
        found = found & self.texts[column] if column in self.texts else found
        return replace(self, texts={**self.texts, column: found})

    def meets(self, column: str, low: int, high: int) -> bool:
        """Whether a value between two, both included, can be wanted."""
        least, most = self.bounds.get(column, EVERY)
        return low <= most and high >= least

    def takes(self, column: str, text: str) -> bool:
        """Whether a text can be wanted."""
        return column not in self.texts or text in self.texts[column]

    def require_topics(self, known: Collection[str], place: str, do: str) -> None:
        """See that the topics asked for are there: one that is not would be left out without a word."""
        missing = sorted(self.texts.get("topic", frozenset()) - set(known))
        if missing:
            meant = nearest(missing[0], known)
            raise InvalidError(
                f"the {place} has no topic {', '.join(missing)}",
                do=f"did you mean {meant}?" if meant else do,
            )

    def refuses(self, queue: ArchiveQueue) -> str:
        """By which column nothing of a queue is wanted; empty when something may be."""
        if not self.takes("topic", shown(queue.topic)):
            return "topic"
        if not self.takes("broker", shown(queue.broker)):
            return "broker"
        numbers = {"queue_id": queue.queue_id, "incarnation": queue.incarnation}
        return next((n for n, value in numbers.items() if not self.meets(n, value, value)), "")

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that ``mask`` needs."""
        keys = _KEY_COLUMNS if self.key is not None else ()
        return tuple(dict.fromkeys((*self.bounds, *self.texts, *keys)))

    def mask(self, rows: pa.RecordBatch) -> Any:  # noqa: ANN401 (pyarrow has no types)
        """Which rows are wanted, as a Boolean array; None when all are."""
        arrow = load_pyarrow()
        compute = arrow.compute
        found = [_between(rows, name, *pair) for name, pair in self.bounds.items()]
        for name, values in self.texts.items():
            wanted = arrow.array(sorted(values), arrow.string())
            found.append(compute.is_in(rows.column(name), wanted))
        if self.key is not None:
            found.append(_has_key(rows, self.key))
        if not found:
            return None
        mask = found[0]
        for more in found[1:]:
            mask = compute.and_(mask, more)
        return compute.fill_null(mask, False)

    def rows_of(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted ones."""
        mask = self.mask(rows)
        if mask is None or load_pyarrow().compute.all(mask).as_py():
            return rows
        return rows.filter(mask)


def shown(text: str) -> str:
    """A name as columns have it: bytes that are no UTF-8 are U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def selection_of(options: Mapping[str, str]) -> Selection:
    """What the options of a source ask for: ``topic queue from until from-offset until-offset key uniq-key broker-name``.

    Raises:
        InvalidError: A value is not a number, or ``topic`` names none.
    """
    found = Selection()
    if "topic" in options:
        topics = _divided(options["topic"])
        # As of a variable that is not set: there would be no row, and a stream would wait for ever.
        if not topics:
            raise InvalidError(
                "the option topic names no topic", do="name some, or leave the option out for all"
            )
        found = found.among("topic", topics)
    if "uniq-key" in options:
        found = found.among("uniq_key", _divided(options["uniq-key"]))
    if "queue" in options:
        queue = _number(options, "queue", 0)
        found = found.within("queue_id", queue, queue)
    for column, low, high, scale in (
        ("store_ts", "from", "until", 1000),
        ("queue_offset", "from-offset", "until-offset", 1),
    ):
        if low in options or high in options:
            least = _number(options, low, MIN // scale) * scale
            found = found.within(column, least, _number(options, high, MAX // scale) * scale - 1)
    return replace(found, key=options.get("key"))


def micros(value: datetime) -> int:
    """A time as the columns have it, microseconds; without a zone it is UTC."""
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _divided(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name)
    try:
        return default if text is None else int(text)
    except ValueError as error:
        raise InvalidError(f"the option {name} is not a number: {text!r:.80}") from error


def _between(rows: pa.RecordBatch, name: str, low: int, high: int) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    compute, column = arrow.compute, rows.column(name)
    if name.endswith("_ts"):
        column = column.view(arrow.int64())
    column = column.cast(arrow.int64())
    return compute.and_(compute.greater_equal(column, low), compute.less_equal(column, high))


def _has_key(rows: pa.RecordBatch, key: str) -> Any:  # noqa: ANN401
    """Rows with a key, or with it as their unique id."""
    import numpy as np  # noqa: PLC0415 (heavy)

    arrow = load_pyarrow()
    compute = arrow.compute
    keys = rows.column("keys")
    hits = compute.equal(keys.flatten(), key).fill_null(False)
    parents = compute.list_parent_indices(keys).filter(hits).to_numpy()
    found = np.zeros(rows.num_rows, bool)
    found[parents] = True
    ours = compute.equal(rows.column("uniq_key"), key).fill_null(False)
    return compute.or_(arrow.array(found), ours)
