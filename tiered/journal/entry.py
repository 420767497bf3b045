r"""One journal entry: small, immutable, created once.

Layout: two lines of ASCII text::

    {"actions":[…],"format":1,"epoch":3,"number":17,"previous":305419896,"time_ms":1700000000000,"writer":"0badcafe"}\n
    <8 hex digits: CRC-32 of the first line without its newline>\n

``previous`` is the checksum of the entry before (0 for the first), so that an entry shows whose successor it is: one that
was put under a number that had been used and deleted long ago, or restored to the wrong place, is found out.

An action is an object whose ``do`` names it. This package knows only ``epoch`` (a writer begins: ``epoch``,
``holder``); all others belong to the state machine above. An unknown action stops a writer and is an error for a reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError
from tiered.keys import TIMER

if TYPE_CHECKING:
    from collections.abc import Iterator

# -- typed records -------------------------------------------------------------------------------
#
# Typed records as JSON, and back: the types of a dataclass's fields say its form, and what of it is checked.
#
# A right checksum proves that bytes are as they were written, not that a writer of ours wrote them: anybody who may
# write into the bucket can compute it. So types and bounds are checked where JSON becomes values, once; whether these make
# sense together is replay's business, and ``tiered.log.verify_objects``'s.
#
# ========================= ========================================================================================
# type                      JSON
# ========================= ========================================================================================
# ``int``                   a whole number from -1 up to, and without, ``INT_MAX``; ``AnyInt``: any one
# ``float``                 a number
# ``str``, ``bool``         itself; ``Key``: the key of an object
# ``frozenset[X]``          a list in order
# ``tuple[X, ...]``         a list, as of ``Sequence[X]``; ``tuple[X, Y]``: a list of just these
# ``X | None``              ``null``, or as ``X``
# ``Mapping[str, Any]``     an object, as it is
# ``Mapping[X, Y]``         a list of rows of key and value
# a dataclass               in rows: a list of its fields' values, without those at the end that equal their defaults. In
#                           objects: each under its name
# a ``NamedTuple``          a list of its members; in a dataclass these, as if they were fields of that
# ``Annotated[X, check]``   as ``X``, and ``check(value)`` raises a ``ValueError`` when it is not one
# ========================= ========================================================================================
#
# What does not fit is a ``ValueError`` that names the fields on the way to it; an unknown member does not fit either.

T = TypeVar("T")

INT_MAX: Final = 2**62
"""Offsets, sizes and times are below this, so that sums of two fit into 64 bits."""
KEY_CHARS_MAX: Final = 1024


class JsonForm(NamedTuple, Generic[T]):
    """How values of a type stand in JSON."""

    encode: Callable[[T], Any]
    decode: Callable[[Any], T]
    """Raises ``ValueError`` or ``TypeError`` for what is no such value."""


Nested = Callable[[type[Any]], JsonForm[Any]]
"""Gives the form of dataclasses within others."""


def is_key(key: str) -> None:
    """Refuse (``ValueError``) what cannot be the key of an object."""
    if not 0 < len(key) <= KEY_CHARS_MAX:
        raise ValueError(f"an object's key is {key!r:.80}")


Key = Annotated[str, is_key]
AnyInt = Annotated[int, "any"]
"""A number without bounds."""


def row_of(value: Any) -> list[Any]:  # noqa: ANN401 (a dataclass)
    """A dataclass as a row."""
    row: list[Any] = as_row(type(value)).encode(value)
    return row


def document_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 (a dataclass)
    """A dataclass as an object, and all dataclasses in it."""
    document: dict[str, Any] = as_document(type(value)).encode(value)
    return document


def as_row(kind: type[T], **own: JsonForm[Any]) -> JsonForm[T]:
    """Of a dataclass: as rows, and all dataclasses in it.

    Args:
        own: Forms of some fields, which are never left out then.
    """
    return _shaped(kind, _row, as_row, own)


def as_object(kind: type[T], **own: JsonForm[Any]) -> JsonForm[T]:
    """Of a dataclass: as objects, and all dataclasses in it as rows. See ``as_row``."""
    return _shaped(kind, _object, as_row, own)


def as_document(kind: type[T]) -> JsonForm[T]:
    """Of a dataclass: as objects, and all dataclasses in it."""
    return _shaped(kind, _object, as_document, {})


_SHAPED: Final[dict[tuple[object, ...], JsonForm[Any]]] = {}


def _shaped(
    kind: type[T],
    shape: Callable[..., JsonForm[T]],
    nested: Nested,
    own: Mapping[str, JsonForm[Any]],
) -> JsonForm[T]:
    known = kind, shape, nested
    if own:
        return shape(kind, _fields_of(kind, nested, own))
    if known not in _SHAPED:
        _SHAPED[known] = shape(kind, _fields_of(kind, nested, own))
    return _SHAPED[known]


class _Field(NamedTuple):
    """A field of a dataclass; one that is a ``NamedTuple`` takes the place of as many as that has."""

    name: str
    names: tuple[str, ...]  # in JSON
    form: JsonForm[Any]
    default: object  # ``_NONE``: it has to be there


_NONE: Final = object()


def _fields_of(kind: type[Any], nested: Nested, own: Mapping[str, JsonForm[Any]]) -> list[_Field]:
    hints, found = get_type_hints(kind, include_extras=True), []
    for one in fields(kind):
        hint, default = hints[one.name], _NONE
        if one.name not in own and one.default is not MISSING:
            default = one.default
        elif one.name not in own and one.default_factory is not MISSING:
            default = one.default_factory()
        names = getattr(hint, "_fields", (one.name,))
        found.append(_Field(one.name, names, own.get(one.name) or _form(hint, nested), default))
    return found


def _row(kind: Callable[..., T], known: list[_Field]) -> JsonForm[T]:
    ends = [*accumulate(len(field.names) for field in known)]
    needed = (end for end, field in zip(ends, known, strict=True) if field.default is _NONE)
    least = max(needed, default=0)

    def encode(record: T) -> list[Any]:
        left = len(known)
        while left and getattr(record, known[left - 1].name) == known[left - 1].default:
            left -= 1
        row: list[Any] = []
        for name, names, form, _ in known[:left]:
            value = form.encode(getattr(record, name))
            if len(names) == 1:
                row.append(value)
            else:
                row += value
        return row

    def decode(row: Any) -> T:  # noqa: ANN401 (JSON values)
        if not least <= len(_of_type(list, row)) <= ends[-1]:
            raise ValueError(f"it has {len(row)} values: {row!r:.80}")
        values, at = [], 0
        for field, end in zip(known, ends, strict=True):
            if at == len(row):
                break
            value = row[at] if end == at + 1 else row[at:end]
            values.append(_decode(field, value))
            at = end
        return kind(*values)

    return JsonForm(encode, decode)


def _object(kind: Callable[..., T], known: list[_Field]) -> JsonForm[T]:
    all_names = {name for field in known for name in field.names}

    def encode(record: T) -> dict[str, Any]:
        document: dict[str, Any] = {}
        for name, names, form, _ in known:
            value = form.encode(getattr(record, name))
            document |= {name: value} if len(names) == 1 else zip(names, value, strict=True)
        return document

    def decode(document: Any) -> T:  # noqa: ANN401 (JSON values)
        if unknown := _of_type(dict, document).keys() - all_names:
            raise ValueError(f"{min(unknown)!r:.80} is unknown here")
        values = {}
        for field in known:
            if missing := [name for name in field.names if name not in document]:
                raise ValueError(f"{missing[0]} is missing")
            found = [document[name] for name in field.names]
            values[field.name] = _decode(field, found if len(found) > 1 else found[0])
        return kind(**values)

    return JsonForm(encode, decode)


def _decode(field: _Field, value: Any) -> Any:  # noqa: ANN401 (JSON values)
    try:
        return field.form.decode(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field.name}: {error}") from error


def _form(kind: Any, nested: Nested) -> JsonForm[Any]:  # noqa: ANN401 (a type)
    """The form of a type's values; ``nested``: of dataclasses, ``as_row`` or ``as_document``."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, (_, check) = _form(args[0], nested), args
        return JsonForm(inner.encode, partial(_checked, inner.decode, check))
    if origin is UnionType:
        (some,) = (_form(one, nested) for one in args if one is not NoneType)
        return JsonForm(partial(_unless_none, some.encode), partial(_unless_none, some.decode))
    if origin is Sequence or args[1:] == (...,):
        inner, made = _form(args[0], nested), list if origin is Sequence else tuple
        return JsonForm(
            lambda values: [*map(inner.encode, values)],
            lambda values: made(map(inner.decode, _of_type(list, values))),
        )
    if origin is frozenset:
        inner = _form(args[0], nested)
        return JsonForm(
            lambda values: sorted(map(inner.encode, values)),
            lambda values: frozenset(map(inner.decode, _of_type(list, values))),
        )
    if origin is tuple:
        return _fixed(lambda *values: values, [_form(one, nested) for one in args])
    if origin is Mapping and args[0] is not str:
        return _table(*args)
    if isinstance(kind, type) and is_dataclass(kind):
        return nested(kind)
    if hasattr(kind, "_fields"):
        members = get_type_hints(kind, include_extras=True)
        return _fixed(kind, [_form(members[name], nested) for name in kind._fields])
    return _PLAIN.get(origin or kind) or _PLAIN[kind.__supertype__]


def _fixed(kind: Callable[..., Any], forms: list[JsonForm[Any]]) -> JsonForm[Any]:
    def encode(values: Iterable[Any]) -> list[Any]:
        return [form.encode(one) for form, one in zip(forms, values, strict=True)]

    def decode(row: Any) -> Any:  # noqa: ANN401 (JSON values)
        pairs = zip(forms, _of_type(list, row), strict=True)
        return kind(*[form.decode(one) for form, one in pairs])

    return JsonForm(encode, decode)


def _table(key: Any, kind: Any) -> JsonForm[Any]:  # noqa: ANN401 (types)
    pair = make_dataclass("pair", [("key", key), ("value", kind)])
    whole: JsonForm[Any] = as_row(pair)

    def encode(values: Mapping[Any, Any]) -> list[list[Any]]:
        return [whole.encode(pair(*item)) for item in values.items()]

    def decode(table: Any) -> dict[Any, Any]:  # noqa: ANN401 (JSON values)
        found: Iterable[Any] = map(whole.decode, _of_type(list, table))
        return {one.key: one.value for one in found}

    return JsonForm(encode, decode)


def _same(value: T) -> T:
    return value


def _of_type(kind: type[T], value: T) -> T:
    if type(value) is not kind:
        raise ValueError(f"it is {value!r:.80}")
    return value


def _bounded(value: int) -> int:
    if type(value) is not int or not -1 <= value < INT_MAX:
        raise ValueError(f"it is {value!r:.80}")
    return value


def _checked(decode: Callable[[Any], T], check: Callable[[T], None], value: Any) -> T:  # noqa: ANN401 (JSON values)
    found = decode(value)
    check(found)
    return found


def _unless_none(convert: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 (JSON values)
    return None if value is None else convert(value)


_PLAIN: Final[dict[Any, JsonForm[Any]]] = {
    int: JsonForm(_same, _bounded),
    AnyInt: JsonForm(_same, partial(_of_type, int)),
    float: JsonForm(_same, float),
    str: JsonForm(_same, partial(_of_type, str)),
    bool: JsonForm(_same, partial(_of_type, bool)),
    Mapping: JsonForm(dict, partial(_of_type, dict)),
    Any: JsonForm(_same, _same),
}


# -- entries ----------------------------------------------------------------------------------------

FORMAT_VERSION = 1
EPOCH = "epoch"
_SMALL_BYTES = 1 << 20
_DECODER = json.JSONDecoder()

Action = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a tier's history."""

    number: AnyInt  # place in the journal, from 1
    epoch: AnyInt  # of its writer; 0 for writers without one
    writer: str  # 8-hex-digit id of the process that wrote it
    time_ms: AnyInt  # when, by the writer's wall clock; for people, nothing depends on it
    actions: Sequence[Action]  # what changed, in order
    previous: AnyInt = 0  # checksum of the entry before; 0 for entry 1


def checksum(data: bytes) -> int:
    """The checksum that an entry bears and that its successor repeats."""
    return zlib_ng.crc32(data.partition(b"\n")[0])


def json_text(value: Any) -> bytes:  # noqa: ANN401 (JSON values)
    """JSON in the one form in which it is written here: ASCII, sorted, without blanks."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii")


def json_members(text: str, listed: str) -> Iterator[tuple[str, Any]]:
    """Members of an object as ``json_text`` writes it, each made a value when it is its turn.

    Args:
        listed: Name of a list that is given as an iterator of its values, to be used up before the next member.
    """
    at = 0

    def value(mark: str) -> Any:  # noqa: ANN401 (JSON values)
        nonlocal at
        if not text.startswith(mark, at):
            raise ValueError(f"there is no {mark} at {at}")
        found, at = _DECODER.raw_decode(text, at + 1)
        return found

    def values() -> Iterator[Any]:
        nonlocal at
        if text.startswith("[]", at):
            at += 1
        elif text.startswith("[", at):
            yield value("[")
        while not text.startswith("]", at):
            yield value(",")
        at += 1

    for mark in chain("{", repeat(",")):
        name = value(mark)
        if name == listed and text.startswith(":[", at):
            at += 1
            yield name, values()
        else:
            yield name, value(":")
        if at + 1 == len(text) and text.endswith("}"):
            return


def seal_text(document: Mapping[str, Any]) -> bytes:
    """One JSON line and the line with its checksum: the form of entries, checkpoints and the lease."""
    line = json_text(document)
    return b"%s\n%08x\n" % (line, zlib_ng.crc32(line))


def open_text(
    data: bytes, *, where: str, versions: Sequence[int] = (FORMAT_VERSION,)
) -> dict[str, Any]:
    """Check and parse what ``seal_text`` made."""
    line, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib_ng.crc32(line):
        option = " --timers" if f"/{TIMER}" in where else ""
        do = f"run `tiered verify{option}` to see what is damaged"
        raise DataError("the checksum is wrong", where=where, do=do)
    try:
        document = json.loads(require_sparse(line))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise OtherVersionError("it is not a JSON object", where=where)
    found = document.get("format")
    if type(found) is not int or found not in versions:
        known = " and ".join(map(str, versions))
        raise OtherVersionError(f"its format is {found!r:.80}, where {known} is known", where=where)
    return document


def require_sparse(text: bytes) -> bytes:
    """Refuse JSON that is little but brackets, since as values it would take twenty times its size in memory.

    Args:
        text: Any; the densest that we write has a bracket in six bytes.

    Returns:
        The text.

    Raises:
        ValueError: It is denser, and not small.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if 4 * brackets > len(text) + _SMALL_BYTES:
        raise ValueError(f"{brackets} brackets in {len(text)} bytes")
    return text


def encode_entry(entry: Entry) -> bytes:
    """The object's bytes."""
    return seal_text({"format": FORMAT_VERSION, **as_object(Entry).encode(entry)})


def decode_entry(data: bytes, *, where: str) -> Entry:
    """Parse an entry."""
    document = open_text(data, where=where)
    del document["format"]
    try:
        return as_object(Entry).decode(document)
    except ValueError as error:
        raise OtherVersionError(
            f"a journal entry has another form: {error}", where=where
        ) from error
