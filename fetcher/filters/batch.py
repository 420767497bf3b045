"""What a filter is, and from a batch of records to the few properties that one looks at.

Only the names that are asked for are looked up, in the stored bytes; nothing else of a record is decoded, except for
inner batches, which are unpacked. Equal values are judged once per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.format.block import parse_records
from tiered.format.message_forms import split_batch
from tiered.format.properties import TAGS, java_text, tag_hash
from tiered.format.property_columns import PropertyColumns
from tiered.format.record import Record, RecordError, decode_record
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import INNER_BATCH
from tiered.log.messages import foreign_messages, kafka_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from tiered.format.block import RecordBlock
    from tiered.local.interface import RecordBatch

# --------------------------------------------------------------------------------------------------
# What a filter can do, and the error of an expression that is none.
# --------------------------------------------------------------------------------------------------


Properties: TypeAlias = Mapping[str, str] | Mapping[bytes, bytes]
"""The properties of one message by name, as text or as stored (UTF-8)."""

EXPRESSION_CHARS_MAX: Final = 1 << 16
"""Of either kind. RocketMQ has no bound of its own; 64 Ki characters are a list of some thousand texts."""
_EXCERPT_CHARS = 40


class Filter(Protocol):
    """Which messages are wanted. Immutable; for any number of threads."""

    @property
    def expression(self) -> str:
        """As it was given."""
        ...

    @property
    def tag_codes(self) -> npt.NDArray[np.int32] | None:
        """An index entry with none of these tag codes is not wanted (unless it is of an inner batch); None: any."""
        ...

    def matches(self, properties: Properties) -> bool:
        """Whether a message with these properties is wanted. Never raises."""
        ...

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        """Numbers of the items that are wanted, ascending.

        Holes are never wanted. An item of an inner batch counts by the inner message that it is.
        """
        ...


class FilterError(InvalidError):
    """An expression that is none."""

    reason = "filter"

    def __init__(self, what: str, expression: str, position: int, *, expected: str = "") -> None:
        before = expression[max(0, position - _EXCERPT_CHARS) : position]
        behind = expression[position : position + _EXCERPT_CHARS]
        super().__init__(
            what,
            where=f"filter expression, character {position + 1}: {before!r}, then {behind!r}",
            do=f"expected {expected}" if expected else "",
        )
        self.position = position  # where, in characters from 0; the expression's length for its end
        self.expected = expected  # what could stand there, in words; may be empty


Row: TypeAlias = tuple[str | None, ...]
"""The values of the names that are asked for, in their order; None where a message has no such property."""


def lookup(properties: Properties, name: str) -> str | None:
    """A property by name; None when it is absent, or empty (which cannot be stored)."""
    value: str | bytes | None = properties.get(name)  # type: ignore[call-overload]
    if value is None:
        value = properties.get(name.encode())  # type: ignore[call-overload]
    text = java_text(value) if isinstance(value, bytes) else value
    return text or None


def select_items(
    batch: RecordBatch,
    codes: npt.NDArray[np.int32] | None,
    names: Sequence[str],
    test: Callable[[Row], bool],
) -> npt.NDArray[np.int64]:
    """Numbers of the items whose message passes a test of the values of ``names``, ascending.

    Only items with one of these tag ``codes``, and those of inner batches (whose code says nothing of the messages). The
    test depends on nothing else, and does not raise.

    Raises:
        DataError: A record is damaged.
        InvalidError: They are not RocketMQ's, and tags are asked for, which others do not have.
    """
    if batch.kind is not RecordKind.ROCKETMQ:
        return _select_foreign(batch, codes, names, test)
    numbers = np.flatnonzero(batch.sizes > 0)
    block = parse_records(batch.data, batch.positions[numbers], batch.sizes[numbers])
    if not block.is_sound:
        raise DataError("a record is damaged")
    is_inner = (block.sys_flags & INNER_BATCH) != 0
    wanted = ~is_inner
    if codes is not None:
        wanted &= np.isin(batch.tag_codes[numbers].astype(np.int32), codes)
    at = np.flatnonzero(wanted)
    wanted[at] = _judge(block, at, names, test)
    at = np.flatnonzero(is_inner)
    wanted[at] = _judge_inner(batch, numbers[at], names, test)
    result: npt.NDArray[np.int64] = numbers[wanted]
    return result


def _select_foreign(
    batch: RecordBatch,
    codes: npt.NDArray[np.int32] | None,
    names: Sequence[str],
    test: Callable[[Row], bool],
) -> npt.NDArray[np.int64]:
    """Of Kafka's records the headers are the properties, of JoyQueue's messages the attributes."""
    if codes is not None:
        what = f"records of {batch.queue} have no tags: they are not RocketMQ's"
        raise InvalidError(what, do="leave out the tags")
    every: list[tuple[int, Mapping[str, str]]]
    if batch.kind is RecordKind.KAFKA:
        records = kafka_records(batch).messages()
        every = [(one.offset - batch.base_offset, one.properties) for one in records]
    else:
        every = [(one.number, one.json["attributes"] or {}) for one in foreign_messages(batch)]
    found = [number for number, properties in every if test(tuple(map(properties.get, names)))]
    return np.array(found, np.int64)


def _judge(
    block: RecordBlock,
    at: npt.NDArray[np.int64],
    names: Sequence[str],
    test: Callable[[Row], bool],
) -> list[bool]:
    if not names:
        return [test(())] * len(at)
    columns = PropertyColumns.of(block, at)
    values = [columns.raw(name.encode("utf-8", "surrogatepass")) for name in names]
    known: dict[tuple[bytes, ...], bool] = {}
    answers: list[bool] = []
    for row in zip(*values, strict=True):
        answer = known.get(row)
        if answer is None:
            answer = known[row] = test(tuple(java_text(value) if value else None for value in row))
        answers.append(answer)
    return answers


def _judge_inner(
    batch: RecordBatch,
    numbers: npt.NDArray[np.int64],
    names: Sequence[str],
    test: Callable[[Row], bool],
) -> list[bool]:
    answers: list[bool] = []
    held = -1
    messages: dict[int, Record] = {}
    for number, position in zip(numbers.tolist(), batch.positions[numbers].tolist(), strict=True):
        if held != position:
            held, messages = position, _unpack(batch, position)
        message = messages.get(batch.base_offset + number)
        if message is None:
            raise DataError("an inner batch holds fewer messages than its index says")
        answers.append(test(tuple(lookup(message.properties, name) for name in names)))
    return answers


def _unpack(batch: RecordBatch, position: int) -> dict[int, Record]:
    try:
        stored = decode_record(batch.data, position, check_crc=False)  # checked on reading
    except RecordError as error:
        raise DataError(f"a record is damaged: {error}") from error
    return {message.queue_offset: message for message in split_batch(stored)}


# -- tags ----------------------------------------------------------------------------------------
#
# Filters by tag: ``A||B``, or ``*`` for every message.
#
# By tag code in the index first, then by the text of the ``TAGS`` property, since different tags may share a code.

ALL: Final = "*"
_SEPARATOR: Final = "||"
BLANKS: Final = "".join(map(chr, range(0x21)))
"""What Java's ``trim`` takes off: other blanks, such as U+00A0, are part of a tag."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Messages with one of some tags; see ``Filter``."""

    expression: str  # as it was given
    names: frozenset[str] | None  # the tags; None for every message
    tag_codes: npt.NDArray[np.int32] | None = field(compare=False)
    """Their codes; None for every message."""

    def matches(self, properties: Properties) -> bool:
        """Whether one with these properties is wanted."""
        return self.names is None or lookup(properties, TAGS) in self.names

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        """See ``Filter``. For ``*`` nothing is decoded."""
        names = self.names
        if names is None:
            return np.flatnonzero(batch.sizes > 0)
        return select_items(batch, self.tag_codes, (TAGS,), lambda row: row[0] in names)


def compile_tags(expression: str, *, strict: bool) -> TagFilter:
    """Make a filter of ``A||B``, with or without blanks around tags; an empty text is ``*``.

    ``*`` is every message only when it stands alone. ``strict`` refuses an expression that names no tag, which no message
    matches. FilterError: it is too long, consists of ``||`` alone, or names no tag.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        what = f"the expression has more than {EXPRESSION_CHARS_MAX} characters"
        raise FilterError(what, expression, EXPRESSION_CHARS_MAX)
    if expression in {"", ALL}:
        return TagFilter(expression, None, None)
    parts = [name.strip(BLANKS) for name in expression.split(_SEPARATOR)]
    names = frozenset(parts) - {""}
    if not names and (strict or not expression.replace(_SEPARATOR, "")):
        raise FilterError("names no tag", expression, 0, expected="tags between ||, or *")
    codes = np.array(sorted(map(tag_hash, names)), np.int32)
    return TagFilter(expression, names, codes)
