"""Bodies to columns, a block of messages at a time, whatever their format. What does not fit is set apart and counted.

A block that does not decode is divided where its decoder says that it broke, else halved, until what does not fit is alone,
and the others are none the worse. What is alone is decoded a column at a time, so that only the member is null that does not
fit. One semantics: a message becomes the same whatever block it is in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.archive.bodies import PREFIX, is_name
from tiered.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    import pyarrow as pa

BLOCK_ROWS = 1024
"""What one bad body can make be done again."""
_FEW_ROWS = 16
"""Of so few each is tried alone: halving goes over them as often."""
NO_OBJECT = "the body is not of the topic's format"
NO_FIT = "the body does not fit the topic's columns"


class UnfitError(Exception):
    """A block holds something that does not fit."""

    def __init__(self, what: str, details: str = "", at: int = -1) -> None:
        super().__init__(f"{what}: {details}" if details else what)
        self.what = what  # in few words that no library's version changes
        self.details = details  # whatever else is known
        self.at = at  # which row, if known; a guess is harmless


class Decoder(Protocol):
    """Decodes bodies of one format. For any thread."""

    @property
    def strict(self) -> Decoder | None:
        """The same, but what a body has and no column is of does not fit; None where there is no such thing."""
        ...

    def only(self, number: int) -> Decoder:
        """What decodes one of the columns."""
        ...

    def left_out(self, body: bytes) -> Iterable[str]:
        """Members of a body that no column is of, each as often as it has a value."""
        ...

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """All of a block, a column for each of the layout's.

        Args:
            bodies: Binary, without nulls; at least one.
        """
        ...


@dataclass(slots=True)
class Decoded:
    """What bodies became."""

    columns: list[pa.Array]  # null where a body, or a member of it, did not fit
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By row, why it did not fit: the plain words, and the details."""


NAMES_MAX = 64
"""Members that are counted by name, of one kind; who uses ids as names gets no count for each."""
OTHERS = "(others)"
_NAME_CHARS_MAX = 256
_SHOWN = 8


@dataclass(slots=True)
class BodyCounts:
    """What of bodies is in no column of theirs. One thread."""

    left_out: Counter[str] = field(default_factory=Counter)
    """By member that no column is of: how many values there were, null aside."""
    unfit: Counter[str] = field(default_factory=Counter)
    """By member: in how many rows it did not fit its column."""

    def leave_out(self, names: Iterable[str]) -> None:
        """Members of a body."""
        for name in names:
            _count(self.left_out, name)

    def misfit(self, name: str) -> None:
        """A row's."""
        _count(self.unfit, name)


def _count(counts: Counter[str], name: str) -> None:
    is_sound = len(name) <= _NAME_CHARS_MAX and is_name(name)
    is_known = name in counts or (is_sound and len(counts) < NAMES_MAX)
    counts[name if is_known else OTHERS] += 1


def decode_bodies(
    decoder: Decoder,
    bodies: pa.Array,
    columns: list[pa.Field],
    counts: BodyCounts | None = None,
) -> Decoded:
    """Decode what can be. Of a body that does not fit only the members are null that do not.

    Args:
        bodies: Binary; null is what does not fit.
        counts: What is in no column is added to it; None: it is not looked for.
    """
    work = _DecodeWork(decoder, bodies, counts or BodyCounts(), is_counting=counts is not None)
    work.take_all(np.flatnonzero(bodies.is_valid().to_numpy(zero_copy_only=False)))
    for row in np.flatnonzero(bodies.is_null().to_numpy(zero_copy_only=False)).tolist():
        work.unfit[row] = ("there is no body", "")
    found = Decoded(work.columns(columns), work.unfit)
    if work.partly:
        _decode_members(decoder, bodies, columns, found, work)
    return found


def _decode_members(
    decoder: Decoder,
    bodies: pa.Array,
    columns: list[pa.Field],
    found: Decoded,
    work: _DecodeWork,
) -> None:
    """Decode bodies that do not fit as a whole, a column at a time."""
    arrow, count = load_pyarrow(), len(bodies)
    rows = sorted(work.partly)
    some, where = bodies.take(arrow.array(rows, arrow.int64())), np.arange(count)
    where[rows] = np.arange(count, count + len(rows))
    wrong: dict[int, list[tuple[str, str]]] = {row: [] for row in rows}
    for number, column in enumerate(columns):
        one = _DecodeWork(decoder.only(number), some, BodyCounts())
        one.take_all(np.arange(len(rows)))
        for at in sorted({*one.unfit, *one.partly}):
            _, details = one.unfit.get(at) or one.partly[at]
            wrong[rows[at]].append((column.name.removeprefix(PREFIX), details))
        (values,) = one.columns([column])
        whole = arrow.concat_arrays([found.columns[number], values])
        found.columns[number] = whole.take(arrow.array(where))
    for row, members in wrong.items():
        found.unfit[row] = _misfit(work.partly[row], members)
        for name, _ in members:
            work.counts.misfit(name)


def _misfit(whole: tuple[str, str], members: list[tuple[str, str]]) -> tuple[str, str]:
    if not members:
        return whole
    names = [name for name, _ in members]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    details = "; ".join(dict.fromkeys(details for _, details in members[:_SHOWN] if details))
    return f"{whole[0]}: {', '.join(names[:_SHOWN])}{more}", details


@dataclass(slots=True)
class _DecodeWork:
    decoder: Decoder
    bodies: Any  # all of them
    counts: BodyCounts  # see ``decode_bodies``
    is_counting: bool = False  # members without a column are looked for
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rows of which there is nothing, and why."""
    partly: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rows that do not fit as a whole; of their members some may."""
    is_strict: bool = True  # no body so far had a member without a column
    _row_ranges: list[list[Any]] = field(default_factory=list)
    _rows: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def take_all(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode rows that ascend, in blocks."""
        for start in range(0, len(rows), BLOCK_ROWS):
            self.take(rows[start : start + BLOCK_ROWS])

    def take(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode rows that ascend."""
        waiting = [rows]
        while waiting:
            some = waiting.pop()
            if not len(some):
                continue
            try:
                self._keep(some, self._decoded(self._block(some)))
            except UnfitError as error:
                if len(some) > 1:
                    waiting += reversed(_divided(some, error.at))
                    continue
                kept = self.partly if error.what == NO_FIT else self.unfit
                kept[int(some[0])] = (error.what, error.details)
                if error.what == NO_FIT:
                    self._count(self._block(some))

    def _decoded(self, block: pa.Array) -> list[pa.Array]:
        strict = self.decoder.strict if self.is_counting and self.is_strict else None
        if strict is not None:
            try:
                return strict.decode(block)
            except UnfitError:
                self.is_strict = False
        found = self.decoder.decode(block)
        self._count(block)
        return found

    def _count(self, block: pa.Array) -> None:
        if self.is_counting and self.decoder.strict is not None:
            for body in block.to_pylist():
                self.counts.leave_out(self.decoder.left_out(body))

    def _block(self, rows: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401 (pyarrow has no types)
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first == count - 1:
            return self.bodies.slice(first, count)
        return self.bodies.take(load_pyarrow().array(rows))

    def _keep(self, rows: npt.NDArray[np.int64], columns: list[Any]) -> None:
        if any(len(column) != len(rows) for column in columns):
            raise InternalError("a decoder of bodies gave another number of rows than it was given")
        self._row_ranges.append(columns)
        self._rows.append(rows)

    def columns(self, wanted: list[pa.Field]) -> list[pa.Array]:
        """All rows in order; null where one did not fit."""
        arrow, count = load_pyarrow(), len(self.bodies)
        if not self._row_ranges:
            return [arrow.nulls(count, column.type) for column in wanted]
        whole = [
            arrow.concat_arrays([row_range[number] for row_range in self._row_ranges])
            for number in range(len(wanted))
        ]
        rows = np.concatenate(self._rows)
        if len(rows) == count and (np.diff(rows) == 1).all():
            return whole
        where = np.full(count, -1)
        where[rows] = np.arange(len(rows))
        places = arrow.array(where, mask=where < 0)
        return [column.take(places) for column in whole]


def _divided(rows: npt.NDArray[np.int64], at: int) -> list[npt.NDArray[np.int64]]:
    if 0 <= at < len(rows):
        return [rows[:at], rows[at : at + 1], rows[at + 1 :]]
    if len(rows) <= _FEW_ROWS:
        return list(np.split(rows, len(rows)))
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]
