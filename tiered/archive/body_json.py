"""Decodes JSON bodies: each one object, its members columns of given types. Arrow's parser takes a block of them at once.

What fits: a member that is missing or null is null; members that no column is of are passed over (the body
has them still) and counted; integers are taken for fractions, nothing else for something else. Numbers fit a
DOUBLE if it has all their digits; integers a FLOAT likewise, fractions as far as it goes. Dates are ``2024-01-31``,
times ISO 8601, UTC where they say no zone. Members that come twice do not fit.

Why rows cannot get out of step with bodies: each body begins with ``{``, ends with ``}`` and is followed by a
line's end, which no text of JSON may contain. A body that is not whole therefore breaks the block, one cannot
disappear in the one before it, and two in one body are one row too many.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.api.arrow import load_pyarrow
from tiered.archive.bodies import BOM, keeps_digits
from tiered.archive.body_blocks import NO_FIT, NO_OBJECT, UnfitError
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

_ROW = re.compile(r" in row (\d+)$")
_OPEN, _CLOSE = b"{}"
_BLANKS = " \t\r\n"


class JsonDecoder:
    """Decodes JSON objects by a fixed schema; fields that it has not are passed over."""

    def __init__(self, columns: Sequence[pa.Field], *, is_strict: bool = False) -> None:
        """Take the columns.

        Args:
            is_strict: Fields that it has not do not fit.

        Raises:
            InvalidError: One has a type that JSON has nothing for.
        """
        from pyarrow import json as arrow_json  # noqa: PLC0415 (heavy)

        self._arrow: Any = load_pyarrow()
        self._reading = arrow_json
        self._columns = list(columns)
        self._wanted = [column.type for column in columns]
        self._tree = _tree(columns)
        self._run = min(_runs(columns), default=0)
        parsed = [self._arrow.field(one.name, _parsed(one.name, one.type)) for one in columns]
        self._options = arrow_json.ParseOptions(
            explicit_schema=self._arrow.schema(parsed),
            unexpected_field_behavior="error" if is_strict else "ignore",
        )
        self.strict = None if is_strict else JsonDecoder(columns, is_strict=True)

    def only(self, number: int) -> _MemberDecoder:
        """Whatever is wrong with the other members."""
        return _MemberDecoder(self._columns[number])

    def left_out(self, body: bytes) -> Iterable[str]:
        """Names, those within others behind theirs and a dot."""
        try:
            document = json.loads(body.removeprefix(BOM), parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            return ()
        return _strangers(document, self._tree, "")

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        """All of a block."""
        bodies = self._without_marks(bodies)
        self._require_objects(bodies)
        arrow = self._arrow
        try:
            table = self._read(bodies)
        except arrow.ArrowInvalid as error:
            raise self._unfit(bodies, str(error)) from None
        if table.num_rows != len(bodies):
            raise UnfitError(NO_OBJECT, "it is not one object")
        if self._run:
            self._require_digits(bodies)
        try:
            columns = (arrow.concat_arrays(column.chunks) for column in table.columns)
            return [one.cast(kind) for one, kind in zip(columns, self._wanted, strict=True)]
        except arrow.ArrowInvalid as error:
            raise UnfitError(NO_FIT, str(error)) from None

    def _without_marks(self, bodies: pa.Array) -> pa.Array:
        """The same without byte-order marks before them."""
        arrow = self._arrow
        if not arrow.compute.any(arrow.compute.starts_with(bodies, BOM)).as_py():
            return bodies
        return arrow.array([body.removeprefix(BOM) for body in bodies.to_pylist()], arrow.binary())

    def _read(self, bodies: pa.Array) -> pa.Table:
        arrow = self._arrow
        listed = arrow.ListArray.from_arrays([0, len(bodies)], bodies)
        (joined,) = arrow.compute.binary_join(listed, b"\n")
        data = joined.as_buffer()
        options = self._reading.ReadOptions(use_threads=False, block_size=data.size + 64)
        return self._reading.read_json(arrow.BufferReader(data), options, self._options)

    def _require_digits(self, bodies: pa.Array) -> None:
        """See that no number loses digits. Only bodies are looked into that have one with so many."""
        raw, bounds = _bytes_of(bodies)
        is_other = ((raw < _ZERO) | (raw > _NINE)) & (raw != _POINT)
        others = np.flatnonzero(is_other)
        ends = others[1:][np.diff(others) > self._run]
        for row in np.unique(np.searchsorted(bounds, ends, "right") - 1).tolist():
            self._require_digits_of(row, bodies[row].as_py())

    def _require_digits_of(self, row: int, body: bytes) -> None:
        try:
            document = json.loads(body, parse_int=_Digits, parse_float=_Digits)
        except (ValueError, RecursionError):
            return
        for column in self._columns:
            for digits in _lost_digits(document.get(column.name), column.type):
                raise UnfitError(NO_FIT, f"{column.name} would lose digits of {digits:.80}", row)

    def _require_objects(self, bodies: pa.Array) -> None:
        """See that nothing gets out of step, and that texts will be UTF-8, which Arrow does not look at."""
        arrow = self._arrow
        try:
            texts = bodies.cast(arrow.string())
        except arrow.ArrowInvalid:
            raise UnfitError(NO_OBJECT, "it is not UTF-8") from None
        raw, bounds = _bytes_of(bodies)
        is_bare = bool((np.diff(bounds) > 1).all())
        is_bare = is_bare and bool((raw[bounds[:-1]] == _OPEN).all())
        if not (is_bare and (raw[bounds[1:] - 1] == _CLOSE).all()):
            self._require_braces(texts)
        if not raw.all():
            raise UnfitError(NO_OBJECT, "a byte of it is 0")

    def _require_braces(self, texts: Any) -> None:  # noqa: ANN401
        """The same with blanks around."""
        compute = self._arrow.compute
        bare = compute.ascii_trim(texts, _BLANKS)
        good = compute.and_(compute.starts_with(bare, "{"), compute.ends_with(bare, "}"))
        if not compute.all(good).as_py():
            raise UnfitError(NO_OBJECT, "it is not an object", compute.index(good, False).as_py())

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


class _MemberDecoder(JsonDecoder):
    """Decodes one member, whatever is wrong with the others."""

    def __init__(self, column: pa.Field) -> None:
        super().__init__([column])
        self._name = column.name

    def decode(self, bodies: pa.Array) -> list[pa.Array]:
        try:
            return super().decode(bodies)
        except UnfitError:
            # A number beyond all bounds, or half a character, is what the parser stops at, wherever it stands.
            alone = _alone(bodies[0].as_py(), self._name) if len(bodies) == 1 else None
            if alone is None:
                raise
            return super().decode(self._arrow.array([alone], self._arrow.binary()))


_VALUES = json.JSONDecoder(parse_int=str, parse_float=str)
_BLANK = re.compile(r"[ \t\r\n]*")


def _alone(body: bytes, name: str) -> bytes | None:
    """An object of one member of another, as it is written there; None when it has it twice, or is not an object."""
    text, found = body.removeprefix(BOM).decode(errors="replace"), list[str]()
    try:
        at = _behind(text, 0, "{")
        while text[at] != "}":
            key, at = _VALUES.raw_decode(text, at)
            at = _behind(text, at, ":")
            _, end = _VALUES.raw_decode(text, at)
            found += [text[at:end]] if key == name else []
            at = _behind(text, end, "")
            at = _behind(text, at, ",") if text[at] == "," else at
    except (ValueError, LookupError, RecursionError):
        return None
    if len(found) > 1:
        return None
    inner = f"{json.dumps(name)}: {found[0]}" if found else ""
    return f"{{{inner}}}".encode()


def _behind(text: str, at: int, mark: str) -> int:
    """Where the next token begins, behind a mark and the blanks about it."""
    match = _BLANK.match(text, at)
    assert match is not None
    if not text.startswith(mark, match.end()):
        raise ValueError(mark)
    behind = _BLANK.match(text, match.end() + len(mark))
    assert behind is not None
    return behind.end()


def _bytes_of(bodies: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:  # noqa: ANN401
    """All bytes of some bodies, and where each begins, and the last ends."""
    _, offsets, data = bodies.buffers()
    bounds = np.frombuffer(offsets, np.int32)[bodies.offset :][: len(bodies) + 1]
    raw = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return raw, bounds.astype(np.int64) - bounds[0]


class _Digits(str):
    __slots__ = ()


_ZERO, _NINE, _POINT = b"09."
_SURE_DIGITS = {32: 7, 64: 15}
"""A number of no more digits than that is a FLOAT, or a DOUBLE, with all of them."""
_FLOAT_BITS = 32


def _runs(columns: Iterable[pa.Field]) -> Iterator[int]:
    """For each type of floating numbers the digits that are no question."""
    types = load_pyarrow().types
    for column in columns:
        kind = column.type
        if types.is_floating(kind):
            yield _SURE_DIGITS[kind.bit_width]
        elif types.is_struct(kind):
            yield from _runs(kind)
        elif types.is_list(kind):
            yield from _runs([kind.value_field])


def _lost_digits(value: Any, kind: Any) -> Iterator[str]:  # noqa: ANN401
    types = load_pyarrow().types
    if isinstance(value, _Digits):
        if types.is_floating(kind) and not _keeps(value, kind.bit_width):
            yield value
    elif isinstance(value, list) and types.is_list(kind):
        for one in value:
            yield from _lost_digits(one, kind.value_type)
    elif isinstance(value, dict) and types.is_struct(kind):
        for one in kind:
            yield from _lost_digits(value.get(one.name), one.type)


def _keeps(digits: str, bits: int) -> bool:
    if bits != _FLOAT_BITS:
        return keeps_digits(digits)
    is_fraction = not digits.lstrip("-").isdecimal()
    return is_fraction or int(np.float32(digits)) == int(digits)


_Tree = dict[str, "_Tree | None"]


def _tree(columns: Iterable[pa.Field]) -> _Tree:
    """Names of columns, and of the fields of those that have some."""
    return {column.name: _tree_of(column.type) for column in columns}


def _tree_of(kind: Any) -> _Tree | None:  # noqa: ANN401
    types = load_pyarrow().types
    if types.is_list(kind):
        return _tree_of(kind.value_type)
    return _tree(kind) if types.is_struct(kind) else None


def _strangers(value: Any, tree: _Tree, path: str) -> Iterator[str]:  # noqa: ANN401
    """Members of a value that are not in a tree."""
    if isinstance(value, list):
        for one in value:
            yield from _strangers(one, tree, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if inner is None:
                continue
            if name not in tree:
                yield path + name
            elif (below := tree[name]) is not None:
                yield from _strangers(inner, below, f"{path}{name}.")


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
