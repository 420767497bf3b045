"""Key compaction by Spark, for topics that outgrow a machine: the same plan, the same bytes, the same entry of the journal.

Overview: workers read stretches of parts, and give Spark a narrow row for the newest message of each key in a stretch
(``KEYS``; no body, no key itself). Spark finds the newest of all by one shuffle of those rows; the winners stay with the
executors, on their disks. The driver gets a row for each part: how many of it stay, and how many bytes. To rewrite, winners
are joined with a broadcast table of which part goes into which bundle (a semi-join: of the messages nothing but their
offsets is shuffled), and each bundle is made by one task, which reads its parts once more and uploads it.

Ordering, crashes: as in ``tiered.upkeep.compact``; the driver is who writes entries.

Retries: a task that is tried again, or twice at once, makes the same bytes under the same key, and adopts what is there.
What is damaged ends the run; Spark tries it as often as any task before.

Memory: of a worker a part, and the rows of ``_ROWS`` messages, or what one bundle is made of; of the driver a row for each
part.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.errors import AlreadyExistsError
from backends.wrapping import WrappingStore, put_own
from tiered import errors
from tiered.api.arrow import load_pyarrow
from tiered.api.stores import backend_errors, open_for_reading
from tiered.clock import SystemClock
from tiered.compaction.keyed import keyed_records
from tiered.crashpoints import reached
from tiered.dispatch.merging import Packer
from tiered.errors import DataError, StoreUnavailableError, TieredStoreError
from tiered.format.record import RECORD_BYTES_MIN
from tiered.log.merge import MergeRun
from tiered.log.parts import decode_columns, encode_columns
from tiered.model import MessageQueue
from tiered.upkeep.compact import (
    KEYS_SAMPLED,
    Guest,
    Judged,
    Judgement,
    MadeBundle,
    holds,
    put_sections,
)
from tiered.upkeep.compact_sections import RUN_BYTES_MAX, PartLeft, part_records, section_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.compaction.retention import KeyedRecords
    from tiered.dispatch.settings import Compression
    from tiered.upkeep.compact import CompactSettings, Look, Piece

STRETCH_BYTES: Final = 64 << 20
STRETCHES_MAX: Final = 4096
"""Tasks that read keys: about so many bytes each, or as much more as makes so many of them."""
BUNDLES: Final = 256
"""That are made before they are named, at least; all of a queue's are named at once."""
_ROWS: Final = 1 << 19
_KEYED, _KEYLESS, _SEEN_KEYLESS, _SEEN_TOMBSTONES = range(4)
"""What a row of ``KEYS`` is: a key's newest message, a message without a key that stays, and what was counted."""
_GOES, _IS_NEW, _HOLDS = 1, 2, 4
"""Flags: it is a tombstone whose time is over; it was not compacted yet; it keeps its key's tombstone (``holds``)."""
_COLUMNS: Final = {
    "kind": np.int32,
    "scope": np.int32,
    "high": np.int64,
    "low": np.int64,
    "time_ms": np.int64,
    "offset": np.int64,
    "queue": np.int32,
    "part": np.int32,
    "size": np.int64,
    "flags": np.int32,
}
KEYS: Final = ", ".join(
    f"{name} {'int' if kind is np.int32 else 'long'}" for name, kind in _COLUMNS.items()
)


@dataclass(frozen=True, slots=True)
class CompactOrder:
    """What workers have to know."""

    tier: str  # URL
    prefix: str  # of the broker
    options: S3Options  # how to reach S3


class SparkEngine:
    """Reads and writes messages by Spark; see ``tiered.upkeep.compact.Engine``."""

    def __init__(
        self,
        session: Any,  # noqa: ANN401 (pyspark has no types)
        order: CompactOrder,
        settings: CompactSettings,
    ) -> None:
        """Begin.

        Args:
            order: Where the tier is, as workers see it.
        """
        self._session = session
        self._order = order
        self._settings = settings
        self._winners: dict[str, Any] = {}

    def judge(self, looks: Sequence[Look], seen_ms: int) -> Judgement:
        settings = self._settings
        texts = [json.dumps(some) for some in _stretches(looks)]
        reader = _key_reader(
            self._order,
            texts,
            keeps_keyless=settings.retention.keeps_keyless,
            seen_ms=seen_ms,
            is_across=settings.across_queues,
        )
        keys = self._numbers(len(texts)).mapInArrow(reader, KEYS)
        topic = looks[0].queue.topic
        self._forget(topic)
        # AQE does not gather the partitions of what is persisted: as many as there is work, not 200.
        messages = sum(look.parts.messages for look in looks)
        tasks = max(self._session.sparkContext.defaultParallelism, messages // _ROWS)
        keys = keys.repartition(tasks, "kind", "scope", "high", "low")
        winners = self._winners[topic] = _newest(keys).persist(_disk_only())
        rows = _collect(_by_part(winners))
        judged = [_judged(look, number, rows) for number, look in enumerate(looks)]
        keys_met = sum(one.counts["keys"] for one in judged)
        if len(looks) == 1 or settings.across_queues:
            return Judgement(judged, 0, keys_met)
        return Judgement(judged, *_spread(winners, keys_met))

    def maker(self, guest: Guest) -> SparkMaker:
        return SparkMaker(self, guest)

    def make(self, topic: str, texts: list[str], takes: list[tuple[int, int, int]]) -> list[str]:
        """Have bundles made; what each came to, in order.

        Args:
            texts: Of each, what it is.
            takes: Queue, part, and which bundle the part goes into; all by number.
        """
        from pyspark.sql import functions as f  # noqa: PLC0415 (heavy; only who uses it)

        session, winners = self._session, self._winners[topic]
        wanted = session.createDataFrame(takes, "queue int, part int, bundle int")
        stay = winners.where(f"kind <= {_KEYLESS} AND flags & {_GOES} = 0")
        places = stay.join(f.broadcast(wanted), ["queue", "part"]).select(
            "bundle", "offset", "queue"
        )
        # A bundle of which nothing stays is made, too. One task each: AQE would put these few bytes into one.
        every = session.range(len(texts)).selectExpr(
            "CAST(id AS int) AS bundle", "-1L AS offset", "-1 AS queue"
        )
        rows = places.unionByName(every).repartition(2 * len(texts), "bundle")
        worker = _bundle_worker(self._order, texts, self._settings)
        made = _collect(rows.groupBy("bundle").applyInArrow(worker, "bundle int, text string"))
        found = {row["bundle"]: row["text"] for row in made}
        return [found[number] for number in range(len(texts))]

    def close(self) -> None:
        """Let winners go."""
        for topic in list(self._winners):
            self._forget(topic)

    def _forget(self, topic: str) -> None:
        known = self._winners.pop(topic, None)
        if known is not None:
            known.unpersist()

    def _numbers(self, count: int) -> Any:  # noqa: ANN401
        return self._session.range(0, count, 1, count)


class SparkMaker:
    """Gathers what goes into bundles, and has all of them made at once; see ``tiered.upkeep.compact.Maker``."""

    def __init__(self, engine: SparkEngine, guest: Guest) -> None:
        """Wire it."""
        self._engine = engine
        self._guest = guest
        self._bundles: list[list[Piece]] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        return len(self._bundles) >= BUNDLES

    def add(self, piece: Piece) -> None:
        if not self._bundles or self._size + piece.left_bytes > RUN_BYTES_MAX:
            self._bundles.append([])
            self._size = 0
        self._bundles[-1].append(piece)
        self._size += piece.left_bytes

    def finish(self) -> list[MadeBundle]:
        bundles, self._bundles = self._bundles, []
        if not bundles:
            return []
        takes = [
            (piece.judged.number, part, number)
            for number, pieces in enumerate(bundles)
            for piece in pieces
            for part in range(piece.begin, piece.begin + len(piece.run.parts))
        ]
        topic = bundles[0][0].run.queue.topic
        said = self._engine.make(topic, [self._text(pieces) for pieces in bundles], takes)
        reached("compacted-stored")
        made = []
        for pieces, text in zip(bundles, said, strict=True):
            row, size = json.loads(text)
            made.append(MadeBundle(row, size, tuple(piece.run for piece in pieces)))
        return made

    def _text(self, pieces: Iterable[Piece]) -> str:
        guest = self._guest
        made = [guest.epoch, guest.writer, next(guest.sequences), guest.now_ms]
        rows = [_piece_row(piece) for piece in pieces]
        return json.dumps({"guest": made, "escapes_case": guest.escapes_case, "pieces": rows})


def _piece_row(piece: Piece) -> dict[str, Any]:
    run, look = piece.run, piece.judged.look
    return {
        "queue": [run.queue.topic, run.queue.queue_id],
        "number": piece.judged.number,
        "run": [run.life, run.incarnation, run.segment],
        "parts": encode_columns([run.parts]),
        "last": look.last,
    }


# -- what is asked of Spark --------------------------------------------------------------------------


def _stretches(looks: Sequence[Look]) -> list[list[dict[str, Any]]]:
    """What each task reads: neighbouring parts of one queue or of several."""
    every = sum(look.parts.log_bytes for look in looks)
    most = max(STRETCH_BYTES, every // STRETCHES_MAX)
    tasks: list[list[dict[str, Any]]] = [[]]
    size = 0
    for number, look in enumerate(looks):
        sizes = look.parts.column("log_bytes").tolist()
        begin = 0
        for at, more in enumerate(sizes):
            size += more
            if size >= most or at == len(sizes) - 1:
                tasks[-1].append(_stretch(look, number, begin, at + 1))
                begin = at + 1
            if size >= most:
                tasks.append([])
                size = 0
    return [task for task in tasks if task]


def _stretch(look: Look, number: int, begin: int, end: int) -> dict[str, Any]:
    return {
        "queue": [look.queue.topic, look.queue.queue_id],
        "number": number,
        "begin": begin,
        "parts": encode_columns([look.parts[begin:end]]),
        "new_from": look.planned.dirty_from,
        "tombstones_to": look.tombstones_to,
        "last": look.last,
    }


def _newest(keys: Any) -> Any:  # noqa: ANN401
    """The newest row of each key, with its place; a row that is of no key stays what it is.

    A tombstone does not go where any row of its key holds it.
    """
    from pyspark.sql import functions as f  # noqa: PLC0415 (heavy; only who uses it)

    place = f.struct("time_ms", "offset", "queue", "part", "size", "flags")
    held = f.max(f.expr(f"flags & {_HOLDS}")).alias("held")
    found = keys.groupBy("kind", "scope", "high", "low").agg(f.max(place).alias("newest"), held)
    flags = f.expr(f"IF(held > 0, newest.flags & ~{_GOES}, newest.flags) AS flags")
    names = ("time_ms", "offset", "queue", "part", "size")
    return found.select("kind", "high", "low", *(f"newest.{name}" for name in names), flags)


def _by_part(winners: Any) -> Any:  # noqa: ANN401
    """Of each part what stays, and what was counted."""
    goes, is_new = f"flags & {_GOES} > 0", f"kind = {_KEYED} AND flags & {_IS_NEW} > 0"
    return winners.groupBy("kind", "queue", "part").agg(
        *(
            _sum(f"IF({goes}, 0, {value})", name)
            for value, name in (("1", "left"), ("size", "bytes"))
        ),
        _sum(f"IF({is_new}, 1, 0)", "keys"),
        _max(f"IF({goes}, -1, offset)", "last"),
    )


def _sum(what: str, name: str) -> Any:  # noqa: ANN401
    from pyspark.sql import functions as f  # noqa: PLC0415 (heavy; only who uses it)

    return f.sum(f.expr(what)).alias(name)


def _max(what: str, name: str) -> Any:  # noqa: ANN401
    from pyspark.sql import functions as f  # noqa: PLC0415 (heavy; only who uses it)

    return f.max(f.expr(what)).alias(name)


def _spread(winners: Any, keys: int) -> tuple[int, int]:  # noqa: ANN401
    """Of some keys, how many went to several queues, and of how many."""
    share = max(1, keys // (16 * KEYS_SAMPLED))
    some = winners.where(f"kind = {_KEYED} AND pmod(high, {share}) = 0")
    often = some.groupBy("high", "low").count()
    (row,) = _collect(often.selectExpr("count(*) AS every", "count_if(count > 1) AS several"))
    return int(row["several"]), int(row["every"])


def _judged(look: Look, number: int, rows: list[Any]) -> Judged:
    counts = {"keys": 0, "rounds": 1, "reads": len(look.parts), "keyless": 0, "tombstones": 0}
    left, left_bytes = [0] * len(look.parts), [0] * len(look.parts)
    last = -1
    for row in rows:
        if row["queue"] != number:
            continue
        if row["kind"] == _SEEN_KEYLESS:
            counts["keyless"] += row["bytes"]
        elif row["kind"] == _SEEN_TOMBSTONES:
            counts["tombstones"] += row["bytes"]
        else:
            left[row["part"]] += row["left"]
            left_bytes[row["part"]] += row["bytes"]
            counts["keys"] += row["keys"]
            last = max(last, row["last"])
    if look.last > last and look.parts[len(look.parts) - 1].last != 0:
        left[-1] += 1  # the queue's newest message stays whatever it is; about so large
        left_bytes[-1] += RECORD_BYTES_MIN
    columns = (look.parts.column("count") - look.parts.column("holes")).tolist()
    gone = [had - stay for had, stay in zip(columns, left, strict=True)]
    return Judged(look, gone, left_bytes, counts, number=number)


def _disk_only() -> Any:  # noqa: ANN401
    from pyspark import StorageLevel  # noqa: PLC0415 (heavy; only who uses it)

    return StorageLevel.DISK_ONLY


def _collect(frame: Any) -> list[Any]:  # noqa: ANN401
    """All rows."""
    from py4j.protocol import (  # type: ignore[import-untyped] # noqa: PLC0415 (comes with pyspark)
        Py4JError,
    )
    from pyspark.errors import PySparkException  # noqa: PLC0415 (heavy)

    try:
        rows: list[Any] = frame.collect()
    except (Py4JError, PySparkException) as error:
        raise _error_of(str(error)) from error
    return rows


def _error_of(said: str) -> TieredStoreError:
    """What a worker has met, by what Spark says of it."""
    found = re.search(r"tiered\.errors\.(\w+): ([^\n]{1,500})", said)
    kind = getattr(errors, found[1], None) if found else None
    if found and isinstance(kind, type) and issubclass(kind, TieredStoreError):
        return kind(found[2])
    spark = re.search(r"SparkException: ([^\n]{1,160})", said)
    return StoreUnavailableError(
        f"Spark has given up: {spark[1] if spark else said[:160]}",
        do="see Spark's own log for why; compact again: what was named is not done twice",
    )


# -- in workers --------------------------------------------------------------------------------------


_STORES: Final[dict[str, ObjectStore]] = {}


def _store(order: CompactOrder) -> ObjectStore:
    """The tier, open as long as the worker's process is: others of its tasks go on with it."""
    name = repr(order)
    if name not in _STORES:
        _STORES[name] = open_for_reading(order.tier, order.options, SystemClock()).store
    return _STORES[name]


def _key_reader(
    order: CompactOrder, texts: list[str], *, keeps_keyless: bool, seen_ms: int, is_across: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Reads the keys of stretches by their numbers."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with backend_errors():
                    yield from stretch_keys(
                        order,
                        json.loads(texts[number]),
                        keeps_keyless=keeps_keyless,
                        seen_ms=seen_ms,
                        is_across=is_across,
                    )

    return work


def stretch_keys(
    order: CompactOrder,
    stretches: Iterable[dict[str, Any]],
    *,
    keeps_keyless: bool,
    seen_ms: int,
    is_across: bool,
) -> Iterator[pa.RecordBatch]:
    """Rows of ``KEYS`` of what one task reads."""
    store = _store(order)
    for stretch in stretches:
        queue, number = MessageQueue(*stretch["queue"]), int(stretch["number"])
        held: list[npt.NDArray[np.void]] = []
        for at, part in enumerate(decode_columns(stretch["parts"]), stretch["begin"]):
            keyless = tombstones = 0
            for records in keyed_records(part_records(store, order.prefix, queue, part)):
                rows = _rows(records, stretch, at)
                rows["flags"][records.times_ms >= seen_ms] &= ~_GOES
                rows["flags"] |= (
                    _IS_NEW * is_across
                )  # what is clean in one queue is not among several
                rows["scope"] = 0 if is_across else number
                rows["time_ms"] = records.times_ms if is_across else 0
                kept = records.has_key | keeps_keyless
                held.append(rows[kept])
                keyless += int(np.count_nonzero(~records.has_key))
                tombstones += int(np.count_nonzero(records.is_tombstone))
            held.append(_counted(number, at, keyless, tombstones))
            if sum(map(len, held)) >= _ROWS:
                yield _arrow(_narrowed(held))
                held = []
        yield _arrow(_narrowed(held))


_ROW: Final = np.dtype(list(_COLUMNS.items()))


def _rows(records: KeyedRecords, stretch: dict[str, Any], part: int) -> npt.NDArray[np.void]:
    rows = np.zeros(len(records), _ROW)
    digests = records.digests.view(np.int64)
    rows["kind"] = np.where(records.has_key, _KEYED, _KEYLESS)
    rows["high"] = np.where(records.has_key, digests[:, 0], records.offsets)
    rows["low"] = np.where(records.has_key, digests[:, 1], stretch["number"])
    rows["offset"], rows["size"] = records.offsets, records.sizes
    rows["queue"], rows["part"] = stretch["number"], part
    goes = records.has_key & records.is_tombstone & (records.offsets < stretch["tombstones_to"])
    is_new = records.offsets >= stretch["new_from"]
    rows["flags"] = _GOES * goes + _IS_NEW * is_new + _HOLDS * holds(records, stretch["last"])
    return rows


def _counted(number: int, part: int, keyless: int, tombstones: int) -> npt.NDArray[np.void]:
    rows = np.zeros(2, _ROW)
    rows["kind"] = _SEEN_KEYLESS, _SEEN_TOMBSTONES
    rows["high"], rows["low"] = part, number
    rows["queue"], rows["part"] = number, part
    rows["size"] = keyless, tombstones
    return rows


def _narrowed(held: list[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Of each key only the newest: what else there is, another row of the same task has replaced.

    What holds a tombstone has to come to it wherever that lies.
    """
    rows = np.concatenate(held)
    names = ("offset", "time_ms", "low", "high", "kind")
    rows = rows[np.lexsort(tuple(rows[name] for name in names))]
    last = np.ones(len(rows), np.bool_)
    same = [rows[name][1:] == rows[name][:-1] for name in ("kind", "high", "low")]
    last[:-1] = ~np.logical_and.reduce(same)
    return rows[last | (rows["flags"] & _HOLDS > 0)]


def _arrow(rows: npt.NDArray[np.void]) -> pa.RecordBatch:
    arrow = load_pyarrow()
    columns = [arrow.array(np.ascontiguousarray(rows[name])) for name in _COLUMNS]
    return arrow.RecordBatch.from_arrays(columns, list(_COLUMNS))


def _bundle_worker(
    order: CompactOrder, texts: list[str], settings: CompactSettings
) -> Callable[[pa.Table], pa.Table]:
    """Makes the bundle whose messages a group of rows lists."""
    compression = settings.compression

    def work(places: pa.Table) -> pa.Table:
        number = places.column("bundle")[0].as_py()
        with backend_errors():
            text = make_bundle(order, json.loads(texts[number]), places, compression)
        arrow = load_pyarrow()
        columns = [arrow.array([number], arrow.int32()), arrow.array([text], arrow.string())]
        return arrow.table(columns, ["bundle", "text"])

    return work


def make_bundle(
    order: CompactOrder, said: dict[str, Any], places: pa.Table, compression: Compression | None
) -> str:
    """Make and upload one bundle; its row for the journal, and its size."""
    store, packer = _store(order), Packer(compression) if compression else None
    offsets, queues = places.column("offset").to_numpy(), places.column("queue").to_numpy()
    runs, sections = [], []
    for row in said["pieces"]:
        life, incarnation, segment = row["run"]
        run = MergeRun(
            MessageQueue(*row["queue"]), life, incarnation, segment, decode_columns(row["parts"])
        )
        mine = np.sort(offsets[queues == row["number"]])
        runs.append(run)
        sections.append(
            section_of(run, _lefts(store, order.prefix, run, mine, row["last"]), packer)
        )
    *guest, now_ms = said["guest"]
    epoch, writer, sequence = guest
    who = Guest(epoch, writer, iter([sequence]), now_ms, escapes_case=said["escapes_case"])
    made = put_sections(who.uploader(_Adopting(store), order.prefix), tuple(runs), sections)
    return json.dumps([made.row, made.size_bytes])


def _lefts(
    store: ObjectStore, prefix: str, run: MergeRun, stays: npt.NDArray[np.int64], last: int
) -> Iterator[PartLeft]:
    for part in run.parts:
        low, high = np.searchsorted(stays, (part.queue_offset, part.queue_end))
        flags = np.zeros(part.count, np.bool_)
        flags[stays[low:high] - int(part.queue_offset)] = True
        if part.queue_offset <= last < part.queue_end:
            flags[last - int(part.queue_offset)] = True
        yield PartLeft(part, part_records(store, prefix, run.queue, part), flags)


class _Adopting(WrappingStore):
    """Takes an object that is there already for its own, if it is the same to the last byte."""

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        try:
            put_own(self._inner, key, data)
        except AlreadyExistsError:
            raise DataError(
                "another try of this task has made other bytes",
                where=key,
                do="run all workers with the same versions of this program and its libraries",
            ) from None
