"""Bodies to columns, a block of messages at a time. What does not fit is set apart, and the others are none the worse.

A block that does not decode is divided where its decoder says that it broke, else halved, until what does not fit is alone.
One semantics: a message becomes the same whatever block it is in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiered.api.arrow import load_pyarrow
from tiered.errors import InternalError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa


BLOCK_ROWS = 1024
"""What one bad body can make be done again."""
_FEW_ROWS = 16
"""Of so few each is tried alone: halving goes over them as often."""
NO_OBJECT = "the body is not of the topic's format"
NO_FIT = "the body does not fit the topic's columns"


class UnfitError(Exception):
    """A block holds something that does not fit.

    Attributes:
        what: In few words that no library's version changes.
        details: Whatever else is known.
        at: Which row, if known; a guess is harmless.
    """

    def __init__(self, what: str, details: str = "", at: int = -1) -> None:
        super().__init__(f"{what}: {details}" if details else what)
        self.what = what
        self.details = details
        self.at = at


class Decoder(Protocol):
    """Decodes bodies of one format. For any thread."""

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """All of a block, a column for each of the layout's.

        Args:
            bodies: Binary, without nulls; at least one.

        Raises:
            UnfitError: Not each of them fits.
        """
        ...


@dataclass(slots=True)
class Decoded:
    """What bodies became.

    Attributes:
        columns: Null where a body did not fit.
        unfit: By row, why it did not fit: the plain words, and the details.
    """

    columns: list[pa.Array]
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)


def decode_bodies(decoder: Decoder, bodies: pa.Array, columns: list[pa.Field]) -> Decoded:
    """Decode what can be.

    Args:
        decoder: For it.
        bodies: Binary; null is what does not fit.
        columns: Of the result.
    """
    work = _DecodeWork(decoder, bodies)
    rows = np.flatnonzero(bodies.is_valid().to_numpy(zero_copy_only=False))
    for start in range(0, len(rows), BLOCK_ROWS):
        work.take(rows[start : start + BLOCK_ROWS])
    for row in np.flatnonzero(bodies.is_null().to_numpy(zero_copy_only=False)).tolist():
        work.unfit[row] = ("there is no body", "")
    return Decoded(work.columns(columns), work.unfit)


@dataclass(slots=True)
class _DecodeWork:
    decoder: Decoder
    bodies: Any
    unfit: dict[int, tuple[str, str]] = field(default_factory=dict)
    _pieces: list[list[Any]] = field(default_factory=list)
    _rows: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def take(self, rows: npt.NDArray[np.int64]) -> None:
        """Decode rows that ascend."""
        waiting = [rows]
        while waiting:
            some = waiting.pop()
            if not len(some):
                continue
            try:
                self._keep(some, self.decoder.decode(self._block(some)))
            except UnfitError as error:
                if len(some) == 1:
                    self.unfit[int(some[0])] = (error.what, error.details)
                    continue
                waiting += reversed(_divided(some, error.at))

    def _block(self, rows: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401 (pyarrow has no types)
        first, count = int(rows[0]), len(rows)
        if int(rows[-1]) - first == count - 1:
            return self.bodies.slice(first, count)
        return self.bodies.take(load_pyarrow().array(rows))

    def _keep(self, rows: npt.NDArray[np.int64], columns: list[Any]) -> None:
        if any(len(column) != len(rows) for column in columns):
            raise InternalError("a decoder of bodies gave another number of rows than it was given")
        self._pieces.append(columns)
        self._rows.append(rows)

    def columns(self, wanted: list[pa.Field]) -> list[pa.Array]:
        """All rows in order; null where one did not fit."""
        arrow, count = load_pyarrow(), len(self.bodies)
        if not self._pieces:
            return [arrow.nulls(count, column.type) for column in wanted]
        whole = [
            arrow.concat_arrays([piece[number] for piece in self._pieces])
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


# -- JSON ------------------------------------------------------------------------------------------
#
# JSON bodies: each one object, its members columns of given types. Arrow's parser takes a block of them at
# once.
#
# What fits: a member that is missing or null is null; members that no column is of are passed over (the body
# has them still); integers are taken for fractions, nothing else for something else. Dates are ``2024-01-31``,
# times ISO 8601, UTC where they say no zone. Members that come twice do not fit.
#
# Why rows cannot get out of step with bodies: each body begins with ``{``, ends with ``}`` and is followed by a
# line's end, which no text of JSON may contain. A body that is not whole therefore breaks the block, one cannot
# be swallowed by the one before it, and two in one body are one row too many.

_ROW = re.compile(r" in row (\d+)$")
_OPEN, _CLOSE = b"{}"
_BLANKS = " \t\r\n"


class JsonDecoder:
    """See ``Decoder``."""

    def __init__(self, columns: Sequence[pa.Field]) -> None:
        """Take the columns.

        Raises:
            InvalidError: One has a type that JSON has nothing for.
        """
        from pyarrow import json as arrow_json  # noqa: PLC0415 (heavy)

        self._arrow: Any = load_pyarrow()
        self._reading = arrow_json
        self._wanted = [column.type for column in columns]
        parsed = [self._arrow.field(one.name, _parsed(one.name, one.type)) for one in columns]
        self._options = arrow_json.ParseOptions(
            explicit_schema=self._arrow.schema(parsed), unexpected_field_behavior="ignore"
        )

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """See ``Decoder``."""
        self._require_objects(bodies)
        arrow = self._arrow
        try:
            table = self._read(bodies)
        except arrow.ArrowInvalid as error:
            raise self._unfit(bodies, str(error)) from None
        if table.num_rows != len(bodies):
            raise UnfitError(NO_OBJECT, "it is not one object")
        try:
            return [
                _whole(arrow, column).cast(kind)
                for column, kind in zip(table.columns, self._wanted, strict=True)
            ]
        except arrow.ArrowInvalid as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _read(self, bodies: pa.Array) -> pa.Table:
        arrow = self._arrow
        listed = arrow.ListArray.from_arrays([0, len(bodies)], bodies)
        (joined,) = arrow.compute.binary_join(listed, b"\n")
        data = joined.as_buffer()
        options = self._reading.ReadOptions(use_threads=False, block_size=data.size + 64)
        return self._reading.read_json(arrow.BufferReader(data), options, self._options)

    def _require_objects(self, bodies: pa.Array) -> None:
        """See that nothing gets out of step, and that texts will be UTF-8, which Arrow does not look at."""
        arrow = self._arrow
        try:
            texts = bodies.cast(arrow.string())
        except arrow.ArrowInvalid:
            raise UnfitError(NO_OBJECT, "it is no UTF-8") from None
        _, offsets, data = bodies.buffers()
        bounds = np.frombuffer(offsets, np.int32)[bodies.offset :][: len(bodies) + 1]
        raw = np.frombuffer(data or b"", np.uint8)
        is_bare = bool((np.diff(bounds) > 1).all())
        is_bare = is_bare and bool((raw[bounds[:-1]] == _OPEN).all())
        if not (is_bare and (raw[bounds[1:] - 1] == _CLOSE).all()):
            self._require_braces(texts)
        if not raw[bounds[0] : bounds[-1]].all():
            raise UnfitError(NO_OBJECT, "a byte of it is 0")

    def _require_braces(self, texts: Any) -> None:  # noqa: ANN401
        """The same with blanks around."""
        compute = self._arrow.compute
        bare = compute.ascii_trim(texts, _BLANKS)
        good = compute.and_(compute.starts_with(bare, "{"), compute.ends_with(bare, "}"))
        if not compute.all(good).as_py():
            raise UnfitError(NO_OBJECT, "it is no object", compute.index(good, False).as_py())

    def _unfit(self, bodies: pa.Array, said: str) -> UnfitError:
        if len(bodies) > 1:
            found = _ROW.search(said)
            return UnfitError(NO_FIT, "", int(found[1]) if found else -1)
        try:
            json.loads(bodies[0].as_py())
        except ValueError:
            return UnfitError(NO_OBJECT, said)
        except RecursionError:
            pass  # a version of Python with more patience would have read it
        return UnfitError(NO_FIT, said)


def _parsed(name: str, kind: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """The type that Arrow's parser is told: dates are texts to it."""
    arrow = load_pyarrow()
    types = arrow.types
    if types.is_date32(kind):
        return arrow.string()
    if types.is_list(kind):
        return arrow.list_(_parsed(name, kind.value_type))
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_parsed(name, field.type)) for field in kind])
    if types.is_map(kind) or types.is_binary(kind):
        raise InvalidError(f"the column {name!r:.80} is a {kind}, which JSON bodies cannot become")
    return kind


def _whole(arrow: Any, column: Any) -> Any:  # noqa: ANN401
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else arrow.concat_arrays(chunks)
