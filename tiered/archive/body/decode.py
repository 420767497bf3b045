"""Bodies to columns, a block of messages at a time. What does not fit is set apart, and the others are none the worse.

A block that does not decode is divided where its decoder says that it broke, else halved, until what does not fit is alone.
One semantics: a message becomes the same whatever block it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiered.api.arrow import load_pyarrow
from tiered.errors import InternalError

if TYPE_CHECKING:
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
    work = _Work(decoder, bodies)
    rows = np.flatnonzero(bodies.is_valid().to_numpy(zero_copy_only=False))
    for start in range(0, len(rows), BLOCK_ROWS):
        work.take(rows[start : start + BLOCK_ROWS])
    for row in np.flatnonzero(bodies.is_null().to_numpy(zero_copy_only=False)).tolist():
        work.unfit[row] = ("there is no body", "")
    return Decoded(work.columns(columns), work.unfit)


@dataclass(slots=True)
class _Work:
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
