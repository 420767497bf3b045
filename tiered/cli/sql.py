"""``tiered sql``: a question to an archive."""

from __future__ import annotations

import base64
import itertools
import math
import os
import uuid
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from backends.local_files import advice_for
from tiered.api.arrow import load_pyarrow
from tiered.cli import kinds
from tiered.cli.archive import SparkOptions
from tiered.cli.exits import DONE
from tiered.cli.frame import command
from tiered.cli.options import argument, option
from tiered.cli.output import Output, show
from tiered.cli.values import counted, json_text
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import tzinfo

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.stale import Stale
    from tiered.cli.call import Call

_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class SqlOptions(SparkOptions):
    """What ``tiered sql`` can be told."""

    url: str = argument("URL or folder of the archive")
    question: str = argument("an SQL statement; each topic is a table")
    engine: str = option(
        "DuckDB in this process, or Spark",
        kinds.one_of("ENGINE", "duckdb", "spark"),
        default="duckdb",
    )
    to: str | None = option(
        "write the result here, as Parquet",
        kinds.Kind("FILE", kinds.parquet_name),
        default_text="print it",
    )


@command("sql", SqlOptions)
def run(call: Call, options: SqlOptions) -> int:
    """Answers a question in SQL from an archive.

    Examples:
        tiered sql file:///tmp/parquet 'SELECT tag, count(*) FROM orders GROUP BY tag'
        tiered sql s3://bucket2/parquet 'FROM "%RETRY%workers"' --to /tmp/retries.parquet
    """
    answer = _ask(call, options, call.objects(options.url))
    answer = answer.rename_columns(distinct_names(answer.schema.names))
    file = options.to
    if file is not None:
        _save(answer, file)
        call.say(f"tiered: {counted(answer.num_rows, 'row')} in {file}")
        return DONE
    names = answer.schema.names
    if call.form == "json":
        Output(call).listing({"format": 1, "columns": names}, "rows", _rows(answer))
    else:
        show(call, {}, rows=_rows(answer), columns=names)
    if not answer.num_rows:
        call.say("tiered: no rows")
    return DONE


def _ask(call: Call, options: SqlOptions, archive: ObjectStore) -> pa.Table:
    question = options.question
    if not question.strip(" \t\r\n;"):
        raise InvalidError(
            "no question is asked", where=call.path, do="write one, as 'SHOW TABLES'"
        )
    if options.engine == "duckdb":
        from tiered.archive.duck import ask

        found = ask(archive, question)
        if found.left_out:
            call.say(
                f"tiered: {found.left_out:,} of {counted(found.files, 'file')} left out unread"
            )
        _say_stale(call, found.stale)
        return found.rows
    from tiered.archive.duck import is_named, stale_asked
    from tiered.archive.exact_names import table_names
    from tiered.archive.tables import files_by_topic, read_archive
    from tiered.spark.frames import ask_spark

    session = options.session(call)
    state = read_archive(archive)
    topics = [
        t for t, table in table_names(files_by_topic(state)).items() if is_named(table, question)
    ]
    _say_stale(call, stale_asked(state, topics, question))
    return ask_spark(session, archive, question, options.url, call.s3_options())


def _say_stale(call: Call, found: list[Stale]) -> None:
    for one in found:
        call.say(f"tiered: {one.said()}")


def _rows(answer: pa.Table) -> Iterator[dict[str, Any]]:
    """Row after row, without holding them all."""
    for batch in answer.to_batches(max_chunksize=_BATCH_ROWS):
        yield from plain_rows(batch)


def _save(answer: pa.Table, file: str) -> None:
    from pyarrow import ArrowNotImplementedError, parquet

    try:
        parquet.write_table(answer, file, compression="zstd", write_page_checksum=True)
    except ArrowNotImplementedError as error:
        raise InvalidError(
            f"Parquet has no form for a column of the answer: {error}",
            where=file,
            do="make a text of it, as by CAST(… AS VARCHAR)",
        ) from None
    except OSError as error:
        raise InvalidError(
            f"cannot be written: {os.strerror(error.errno) if error.errno else error}",
            where=file,
            do=advice_for(error, "name a file in a directory that can be written"),
        ) from error


# --------------------------------------------------------------------------------------------------
# Columns of an answer as values that JSON, CSV and tables can show, each with all of its digits.
#
# Arrow's own way to Python values cannot be taken: it has no time of a nanosecond and no year 10,000, ends at a name
# that a struct has twice, and makes of a FLOAT 0.1 the DOUBLE 0.10000000149011612.
#
# =========================== ============================================================================================
# type                        becomes
# =========================== ============================================================================================
# integers                    ``int``, exact
# DECIMAL                     ``Decimal``, with its scale; shown as a number of all its digits
# FLOAT, DOUBLE               ``float`` of the fewest digits that mean it; ``NaN``, ``Infinity`` and ``-Infinity`` are texts
# times                       ISO 8601, with six digits behind the second or, where they are needed, nine; with a zone
#                             always in it; years beyond 9999 and before 0 have a sign
# DATE, TIME                  likewise; what is not a day in DuckDB is ``infinity`` or ``-infinity``
# intervals, durations        ISO 8601
# bytes                       text where they are UTF-8, else ``base64:`` and base64; so are those that begin with that word
# lists, structs, maps        lists and objects of these
# =========================== ============================================================================================
# --------------------------------------------------------------------------------------------------


_BASE64 = "base64:"
_DAY_S = 86_400
_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_LAST_DAY = date.max.toordinal()
_CYCLE_DAYS, _CYCLE_YEARS = 146_097, 400
"""After so many days the calendar comes round again."""
_INFINITE = {32: 2**31 - 1, 64: 2**63 - 1}
"""What DuckDB has for ``infinity``, by bits; with a minus for the other one."""


def plain_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Row after row, by the names of columns."""
    columns = [plain_column(column) for column in batch.columns]
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def distinct_names(names: Iterable[str]) -> list[str]:
    """Names that differ: the second ``a`` is ``a_2``."""
    found: list[str] = []
    for name in names:
        tries = (f"{name}_{number}" for number in itertools.count(2))
        found.append(next(n for n in itertools.chain([name], tries) if n not in found))
    return found


def plain_column(values: Any) -> list[Any]:  # noqa: ANN401 (pyarrow has no types)
    """The values of an array; None for null."""
    arrow = load_pyarrow()
    types, kind = arrow.types, values.type
    if isinstance(kind, arrow.BaseExtensionType):
        return _of_extension(values)
    if types.is_nested(kind):
        return _of_nested(values)
    if types.is_dictionary(kind):
        return plain_column(values.dictionary_decode())
    if types.is_temporal(kind):
        return _of_time(values)
    if types.is_floating(kind):
        return _each(values, _short(kind))
    if _is_bytes(kind):
        return _each(values, _text)
    found: list[Any] = values.to_pylist()
    return found


def _is_bytes(kind: Any) -> bool:  # noqa: ANN401
    types = load_pyarrow().types
    tests = types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view
    return any(test(kind) for test in tests)


def _each(values: Any, make: Callable[[Any], Any]) -> list[Any]:  # noqa: ANN401
    return [None if value is None else make(value) for value in values.to_pylist()]


def _of_extension(values: Any) -> list[Any]:  # noqa: ANN401
    if values.type.extension_name == "arrow.uuid":
        return _each(values.storage, lambda raw: str(uuid.UUID(bytes=raw)))
    return plain_column(values.storage)


# -- numbers and bytes -----------------------------------------------------------------------------


def _short(kind: Any) -> Callable[[float], float | str]:  # noqa: ANN401
    """Makes numbers of a width out of doubles: of all that mean the same in this width the shortest."""
    import numpy as np

    narrow = {16: np.float16, 32: np.float32}.get(kind.bit_width)

    def short(value: float) -> float | str:
        if math.isfinite(value):
            return float(value) if narrow is None else float(str(narrow(value)))
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    return short


def _text(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = _BASE64
    # A text that looks like base64 would be taken for other bytes.
    return _BASE64 + base64.b64encode(raw).decode() if text.startswith(_BASE64) else text


# -- times -----------------------------------------------------------------------------------------


def _of_time(values: Any) -> list[Any]:  # noqa: ANN401
    arrow = load_pyarrow()
    types, kind = arrow.types, values.type
    if types.is_interval(kind):
        return _each(values, lambda parts: _duration(*parts))
    bits = kind.bit_width
    numbers = values.view(arrow.int32() if bits == _DAY_BITS else arrow.int64())
    if types.is_date32(kind):
        return _each(numbers, _day)
    if types.is_date64(kind):
        return _each(numbers, lambda millis: _day(millis // (_DAY_S * 1000)))
    per_s = _UNITS[kind.unit]
    if types.is_time(kind):
        return _each(numbers, lambda number: _clock(number // per_s, number % per_s, per_s))
    if types.is_duration(kind):
        return _each(numbers, lambda number: _duration(0, 0, number * (_UNITS["ns"] // per_s)))
    zone = arrow.lib.string_to_tzinfo(kind.tz) if kind.tz else None
    return _each(numbers, lambda number: _moment(number, per_s, zone))


_DAY_BITS = 32


def _moment(number: int, per_s: int, zone: tzinfo | None) -> str:
    if abs(number) == _INFINITE[64]:
        return "infinity" if number > 0 else "-infinity"
    second, fraction = divmod(number, per_s)
    shift = "" if zone is None else "+00:00"
    if zone is not None and (moved := _shifted(second, zone)):
        second, shift = moved
    day, second = divmod(second, _DAY_S)
    return f"{_day(day)}T{_clock(second, fraction, per_s)}{shift}"


def _shifted(second: int, zone: tzinfo) -> tuple[int, str] | None:
    """A second as clocks of a zone have it, and how far that is; None where its calendar has no such day."""
    from datetime import UTC, datetime, timedelta

    try:
        there = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)).astimezone(zone)
    except OverflowError:
        return None
    ahead = there.utcoffset() or timedelta()
    return second + round(ahead.total_seconds()), there.isoformat()[_ZONE_AT:]


_ZONE_AT = len("1970-01-01T00:00:00")


def _day(number: int) -> str:
    """A day since 1970 by the calendar of today, also of years that ``date`` does not have."""
    if abs(number) == _INFINITE[32]:
        return "infinity" if number > 0 else "-infinity"
    ordinal = number + _EPOCH_DAY
    if 0 < ordinal <= _LAST_DAY:
        return date.fromordinal(ordinal).isoformat()
    cycles, left = divmod(ordinal - 1, _CYCLE_DAYS)
    within = date.fromordinal(left + 1)
    year = within.year + cycles * _CYCLE_YEARS
    sign = "-" if year < 0 else "+" if year > date.max.year else ""
    return f"{sign}{abs(year):04d}{within.isoformat()[4:]}"


def _clock(second: int, fraction: int, per_s: int) -> str:
    nanos = fraction * (_UNITS["ns"] // per_s)
    micros, rest = divmod(nanos, 1000)
    behind = f".{nanos:09d}" if rest else f".{micros:06d}" if micros else ""
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}{behind}"


def _duration(months: int, days: int, nanoseconds: int) -> str:
    """As ISO 8601 has it; without calendar parts it is seconds alone."""
    seconds = f"{Decimal(nanoseconds).scaleb(-9):f}"
    seconds = seconds.rstrip("0").rstrip(".") if "." in seconds else seconds
    return "P" + f"{months}M" * bool(months) + f"{days}D" * bool(days) + f"T{seconds}S"


# -- what has values within it ---------------------------------------------------------------------


def _of_nested(values: Any) -> list[Any]:  # noqa: ANN401
    types, kind = load_pyarrow().types, values.type
    if types.is_struct(kind):
        return _of_struct(values)
    if types.is_union(kind):
        return _of_union(values)
    if types.is_map(kind):
        return _of_map(values)
    return _of_list(values)


def _of_struct(values: Any) -> list[Any]:  # noqa: ANN401
    names = distinct_names(field.name for field in values.type)
    columns = [plain_column(column) for column in values.flatten()]
    rows: Iterable[Sequence[Any]] = zip(*columns, strict=True) if columns else [()] * len(values)
    there = values.is_valid().to_pylist()
    pairs = zip(rows, there, strict=True)
    return [dict(zip(names, row, strict=True)) if is_there else None for row, is_there in pairs]


def _of_union(values: Any) -> list[Any]:  # noqa: ANN401
    kind = values.type
    columns = {
        code: plain_column(values.field(number)) for number, code in enumerate(kind.type_codes)
    }
    codes = values.type_codes.to_pylist()
    places = range(len(codes)) if kind.mode == "sparse" else values.offsets.to_pylist()
    return [columns[code][at] for code, at in zip(codes, places, strict=True)]


def _of_map(values: Any) -> list[Any]:  # noqa: ANN401
    """Objects; of a name that comes twice the last value counts, as in RocketMQ's own properties."""
    offsets = values.offsets.to_pylist() or [0]
    low, high = offsets[0], offsets[-1]
    found = plain_column(values.keys.slice(low, high - low))
    keys = [key if isinstance(key, str) else json_text(key) for key in found]
    items = plain_column(values.items.slice(low, high - low))
    there = values.is_valid().to_pylist()
    return [
        dict(zip(keys[start - low : end - low], items[start - low : end - low], strict=True))
        if is_there
        else None
        for (start, end), is_there in zip(itertools.pairwise(offsets), there, strict=True)
    ]


def _of_list(values: Any) -> list[Any]:  # noqa: ANN401
    """Of whichever kind of list: ``flatten`` has the elements of those that are not null."""
    arrow = load_pyarrow()
    inner = iter(plain_column(values.flatten()))
    lengths = arrow.compute.list_value_length(values).to_pylist()
    return [None if size is None else list(itertools.islice(inner, size)) for size in lengths]
