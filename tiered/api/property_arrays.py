"""The properties of many messages as two arrays of names and values, without a loop over messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.format.properties import CLIENT_ONLY

if TYPE_CHECKING:
    import numpy.typing as npt

_NAME_END, _PAIR_END = 1, 2
_COUNTED_MAX = 1 << 22
"""Of so many combinations of message and name each is counted; of more they are sorted, which takes longer."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The properties of many messages, one after another.

    Attributes:
        count: Messages.
        parents: int64[n], whose each property is; ascending.
        names: The names.
        values: The values.
        known: Names that occur, each once.
        codes: int32[n], which of them each name is.
    """

    count: int
    parents: npt.NDArray[np.int64]
    names: Any
    values: Any
    known: list[str]
    codes: npt.NDArray[np.int32]

    @classmethod
    def parse(cls, arrow: Any, raw: Any) -> Pairs | None:  # noqa: ANN401 (pyarrow has no types)
        """As ``tiered.format.properties.parse_properties`` does; None where that has to be asked itself.

        Args:
            arrow: pyarrow.
            raw: Binary array, without nulls: the properties of each message as stored.
        """
        try:
            text = raw.cast(arrow.string())
        except arrow.ArrowInvalid:
            return None  # it is no UTF-8
        found = _regular(arrow, raw) or _any(arrow, text)
        parents, names, values = found
        named = names.dictionary_encode()
        codes = named.indices.to_numpy()
        return cls(len(raw), parents, names, values, named.dictionary.to_pylist(), codes).checked()

    def checked(self) -> Pairs | None:
        """These without what clients add; None when a message names a property twice."""
        width = max(len(self.known), 1)
        keys = self.parents * width + self.codes
        if self.count * width <= _COUNTED_MAX:
            twice = bool(len(keys)) and np.bincount(keys).max() > 1
        else:
            twice = len(np.unique(keys)) < len(keys)
        if twice:
            return None
        dropped = [code for code, name in enumerate(self.known) if name in CLIENT_ONLY]
        if not dropped:
            return self
        kept = np.flatnonzero(~np.isin(self.codes, dropped))
        arrays = self.names.take(kept), self.values.take(kept)
        return Pairs(self.count, self.parents[kept], *arrays, self.known, self.codes[kept])

    def map(self, arrow: Any) -> Any:  # noqa: ANN401
        """Name to value, in the order stored."""
        counts = np.bincount(self.parents, minlength=self.count)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return arrow.MapArray.from_arrays(arrow.array(offsets), self.names, self.values)

    def find(self, arrow: Any, name: str) -> Any:  # noqa: ANN401
        """One property of each message; null where there is none."""
        if name not in self.known:
            return arrow.nulls(self.count, arrow.string())
        at = np.flatnonzero(self.codes == self.known.index(name))
        if len(at) == self.count:
            return self.values.take(arrow.array(at))
        where = np.full(self.count, -1)
        where[self.parents[at]] = at
        return self.values.take(arrow.array(where, mask=where < 0))


def _regular(arrow: Any, raw: Any) -> tuple[npt.NDArray[np.int64], Any, Any] | None:  # noqa: ANN401
    """Parents, names and values by the places of their ends; None unless every pair is whole and ended."""
    _, starts_buffer, data_buffer = raw.buffers()
    if not len(raw) or data_buffer is None:
        return None
    bounds = np.frombuffer(starts_buffer, np.int32)[raw.offset : raw.offset + len(raw) + 1]
    first, end = int(bounds[0]), int(bounds[-1])
    data = np.frombuffer(data_buffer, np.uint8)[:end]
    marks = np.flatnonzero((data == _NAME_END) | (data == _PAIR_END))
    marks = marks[np.searchsorted(marks, first) :]
    name_ends, ends = marks[0::2], marks[1::2]
    if not len(ends) or len(name_ends) != len(ends):
        return None
    starts = np.concatenate([[first], ends[:-1] + 1])
    last_bytes = data[bounds[1:][np.diff(bounds) > 0] - 1]
    is_regular = (
        (data[name_ends] == _NAME_END).all()
        and (data[ends] == _PAIR_END).all()
        and (last_bytes == _PAIR_END).all()
        and (name_ends > starts).all()
        and (ends > name_ends + 1).all()
    )
    if not is_regular:
        return None
    parents = np.repeat(np.arange(len(raw)), np.diff(np.searchsorted(starts, bounds)))
    # One array of names, ends of names, values and ends of pairs, of which Arrow takes what is wanted.
    offsets = np.stack([starts, name_ends, name_ends + 1, ends], axis=1).astype(np.int32).ravel()
    buffers = [None, arrow.py_buffer(offsets), data_buffer]
    every = arrow.Array.from_buffers(arrow.string(), len(offsets) - 1, buffers)
    names = every.take(arrow.array(np.arange(0, len(offsets), 4)))
    return parents, names, every.take(arrow.array(np.arange(2, len(offsets), 4)))


def _any(arrow: Any, text: Any) -> tuple[npt.NDArray[np.int64], Any, Any]:  # noqa: ANN401
    """The same of whatever lies there: pairs that are none are passed over."""
    compute = arrow.compute
    listed = compute.split_pattern(text, "\x02")
    parents = compute.list_parent_indices(listed).to_numpy()
    pairs = listed.flatten()
    marks = compute.find_substring(pairs, "\x01").to_numpy()
    good = (marks > 0) & (compute.binary_length(pairs).to_numpy() > marks + 1)
    halves = compute.split_pattern(pairs.filter(arrow.array(good)), "\x01", max_splits=1).flatten()
    names = halves.take(arrow.array(np.arange(0, len(halves), 2)))
    values = halves.take(arrow.array(np.arange(1, len(halves), 2)))
    return parents[good], names, values
