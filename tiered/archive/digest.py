"""Checksums of the values in columns, whatever batches they come in: what a writer got is held against what is read back.

Two tables have the same digest when they have the same columns with the same values in the same order, as surely as CRC-32
tells. No Python code runs for each value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from tiered.api.arrow import load_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

_BYTE = 8


@dataclass(slots=True)
class Digest:
    """Of all rows so far.

    Attributes:
        rows: How many.
        crcs: By place and kind of what was added up there.
    """

    rows: int = 0
    crcs: dict[str, int] = field(default_factory=dict)

    def add(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows behind those so far."""
        batches = rows.to_batches() if isinstance(rows, load_pyarrow().Table) else [rows]
        for batch in batches:
            self.rows += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                self._fold(name, column)

    def _fold(self, place: str, values: Any) -> None:  # noqa: ANN401 (pyarrow has no types)
        arrow = load_pyarrow()
        kinds, kind = arrow.types, values.type
        valid = values.is_valid().cast(arrow.uint8()).to_numpy()
        self._take(f"{place} there", valid)
        if kinds.is_struct(kind):
            for child, part in zip(kind, values.flatten(), strict=True):
                self._fold(f"{place}.{child.name}", part)
        elif kinds.is_list(kind) or kinds.is_map(kind):
            offsets = values.offsets.to_numpy()
            lengths = np.where(valid, np.diff(offsets), 0)
            self._take(f"{place} lengths", lengths.astype(np.int64))
            self._fold(f"{place}[]", _elements(values, offsets, valid))
        elif kinds.is_binary(kind) or kinds.is_string(kind):
            self._fold_bytes(f"{place} {kind}", values)
        else:
            self._take(f"{place} {kind}", _fixed(values, valid))

    def _fold_bytes(self, place: str, values: Any) -> None:  # noqa: ANN401
        known = values.fill_null(b"" if values.type == load_pyarrow().binary() else "")
        _, offsets, data = known.buffers()
        bounds = np.frombuffer(offsets, np.int32)[known.offset : known.offset + len(known) + 1]
        self._take(f"{place} lengths", np.diff(bounds))
        if data is not None and len(bounds):
            self._take(place, memoryview(data)[bounds[0] : bounds[-1]])

    def _take(self, place: str, data: Any) -> None:  # noqa: ANN401 (a buffer)
        whole = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
        self.crcs[place] = zlib_ng.crc32(whole, self.crcs.get(place, 0))


def _elements(values: Any, offsets: Any, valid: Any) -> Any:  # noqa: ANN401
    """The elements of all lists that are there; a null one may have some behind it all the same."""
    inner = _inner(values)
    if valid.all() or (np.diff(offsets)[valid == 0] == 0).all():
        return inner.slice(offsets[0], offsets[-1] - offsets[0])
    spans = np.repeat(valid, np.diff(offsets)).astype(bool)
    return inner.slice(offsets[0], offsets[-1] - offsets[0]).filter(load_pyarrow().array(spans))


def _inner(values: Any) -> Any:  # noqa: ANN401
    arrow = load_pyarrow()
    if not arrow.types.is_map(values.type):
        return values.values
    return arrow.StructArray.from_arrays([values.keys, values.items], ["key", "value"])


def _fixed(values: Any, valid: Any) -> Any:  # noqa: ANN401
    """Values that take the same number of bytes each; of a null one nothing counts."""
    arrow = load_pyarrow()
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.uint8())
    width = values.type.bit_width // _BYTE
    _, data = values.buffers()
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    found = found[values.offset * width : (values.offset + len(values)) * width]
    return found if valid.all() else found.reshape(-1, width) * valid[:, None]
