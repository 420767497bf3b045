"""JSON bodies: each one object, its members columns of given types. Arrow's parser takes a block of them at once.

What fits: a member that is missing or null is null; members that no column is of are passed over (the body has them still);
integers are taken for fractions, nothing else for something else. Dates are ``2024-01-31``, times ISO 8601, UTC where they
say no zone. Members that come twice do not fit.

Why rows cannot get out of step with bodies: each body begins with ``{``, ends with ``}`` and is followed by a line's end,
which no text of JSON may contain. A body that is not whole therefore breaks the block, one cannot be swallowed by the one
before it, and two in one body are one row too many.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.api.arrow import load_pyarrow
from tiered.archive.body.decode import NO_FIT, NO_OBJECT, UnfitError
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

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
