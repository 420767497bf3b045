"""Archives and tiers for programs of Spark: frames, topics as views, lists of files, and what a read leaves out.

How to use it::

    from tiered.spark import archive, messages, tier

    orders = archive(spark, "s3://bucket2/parquet", "orders")
    recent = tier(spark, "s3://bucket/prefix", "orders")
    every = messages(spark, "s3://bucket/prefix", "orders", archive="s3://bucket2/parquet")

Files of an archive are read by Spark's own reader of Parquet, exactly those that the log names: it prunes columns, hands
filters down, reads vectors. What is only in the tier is read by the source ``rmq_tier`` (``tiered.spark.source``).

A frame is fixed when it is made, files and messages: make it again to see what has come since.

What reads by itself looks at no checksums of ours. So before a frame is made each file's size is held against the log, and
its end (footer, indexes of pages, filters of keys) against its checksums; the pages have their own, which Spark is told to
look at. What lies between them, the pages' headers, is proven only where ``is_proved`` has each file read whole before.

Options are those of the sources (docs/spark.md), with underscores in names as Python wants them; ``report`` and
``file_list`` need no Spark.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial, reduce
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import load_pyarrow
from tiered.api.stores import backend_errors
from tiered.archive.bodies import BodyLayout
from tiered.archive.checked_ranges import ObjectFile, find_damage, prove_files, reading
from tiered.archive.columns import every_schema, topic_schema
from tiered.archive.columns import schema as archive_schema
from tiered.archive.duck import (
    LATEST,
    is_named,
    local_root,
    may_list_tables,
    tables_there,
)
from tiered.archive.exact_names import exact_names, table_names
from tiered.archive.selection import MAX, MIN, Selection, micros, selection_of, shown
from tiered.archive.stale import stale_rows
from tiered.archive.tables import (
    Chosen,
    choose_files,
    explain,
    files_by_topic,
    open_parquet,
    plan_files,
    read_archive,
)
from tiered.errors import InvalidError
from tiered.spark.driver import full_advice
from tiered.spark.offset_ranges import packed, pins_of, plan_tier
from tiered.spark.options import (
    ARCHIVE,
    OF_STREAM,
    OF_TIER,
    READ,
    TIER,
    TierStates,
    at_archive,
    at_place,
    in_one_option,
    isolation_option,
    kind_of,
    partition_bytes,
    plain_names,
    require_columns,
    require_isolation,
    require_known,
    require_values,
    source_options,
    takes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import pyarrow as pa

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ArchiveQueue
    from tiered.spark.offset_ranges import ReadPlan

Value = str | int | bool | datetime | list[str] | tuple[str, ...]
"""Of an option. A time is milliseconds since 1970, UTC, or a ``datetime``; without a zone it is UTC."""


_SEVERAL = frozenset(["topic", "uniq-key"])
"""Options that may have several values."""
OF_FRAME = (READ | OF_TIER) - {"pinned"}
"""Options of a frame that a tier has a share in: which messages are its own is not for callers to say."""


# -- frames ----------------------------------------------------------------------------------------


def archive(
    spark: Any,  # noqa: ANN401 (pyspark has no types)
    url: str,
    topic: str | list[str] | None = None,
    *,
    is_proved: bool = False,
    scheme: str = "s3a",
    **options: Value,
) -> Any:  # noqa: ANN401
    """The messages of an archive, read by Spark's own reader of Parquet from the files that its log names now.

    Of one topic it has the columns of decoded bodies too, of several those that every file has.

    Args:
        topic: One, or several; None: all.
        is_proved: Read each file whole first, and hold it against its checksum.
        scheme: By which Hadoop of this session reaches S3; a folder's files are ``file://``.
        options: Of the source: ``queue``, ``from_``, ``until``, ``from_offset``, ``until_offset``, ``key``, ``uniq_key``,
            and how S3 is reached. Whole files are left out by them, and rows are exactly those asked for.

    Returns:
        A ``DataFrame``.

    Raises:
        InvalidError: An option is wrong, there is no archive or topic, or Spark cannot reach the store by itself.
        DataError: The log is damaged, or a file is gone, cut, or damaged where that was looked at.
    """
    named = _named(url, options, topic)
    require_known(named, READ)
    wanted = selection_of(named)
    with at_place(named) as store:
        state = read_archive(store)
        require_isolation(named, state)
        warn_of_stale(state, wanted)
        plan = plan_files(state, wanted)
        native = _Native(spark, store, state, plan.keys(), scheme=scheme, is_proved=is_proved)
        found = native.frame(plan.files, _columns(state, wanted))
        only_wanted = plan.foreign.isdisjoint(file.key for file in plan.files)
        return _where(found, wanted, only_wanted=only_wanted)


def tier(
    spark: Any,  # noqa: ANN401
    url: str,
    topic: str | list[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    is_stream: bool = False,
    **options: Value,
) -> Any:  # noqa: ANN401
    """The messages of a tier, committed, sealed or not; what of them is archived, too.

    Args:
        topic: One, or several; None: all.
        columns: Those that are needed. Spark does not tell a source written in Python which they are, and making them is
            most of the work; None: all.

    Returns:
        A ``DataFrame``; a streaming one if that is asked for.

    Raises:
        InvalidError: An option or column is wrong, or there is no tier or topic.
    """
    named = plain_names(_named(url, options, topic))
    require_known(named, OF_STREAM | OF_FRAME if is_stream else OF_FRAME - {"archive"})
    require_values(named)
    if is_stream:
        return _of_source(spark, named, "rmq_tier", _chosen(columns, named), is_stream=True)
    plan, _ = _plan(named, selection_of(named), "archive(spark, ARCHIVE)")
    return _of_source(spark, _pinned(named, plan), "rmq_tier", _planned_columns(columns, plan))


def messages(
    spark: Any,  # noqa: ANN401
    url: str,
    topic: str | list[str] | None = None,
    *,
    archive: str,
    columns: Sequence[str] | None = None,
    is_stream: bool = False,
    is_proved: bool = False,
    scheme: str = "s3a",
    **options: Value,
) -> Any:  # noqa: ANN401
    """The messages of an archive and of the tier that it is made of, each once, by queue offset.

    As a batch what is archived is read by Spark's own reader of Parquet, the rest in the tier. As a stream both come through
    the source: from ``earliest`` on what is archived, then the tier, then what comes. Wherever a message moves meanwhile
    (it is merged, archived, compacted, expired in the tier once it is in the archive), a stream has it once, also over
    restarts.

    Args:
        topic: One, or several; None: all.
        columns: As of ``tier``, of what every file of an archive has; None: all of these.
        is_proved: As of ``archive``; of a batch.

    Returns:
        A ``DataFrame``; a streaming one if that is asked for.

    Raises:
        InvalidError: An option or column is wrong, a place is none of what it should be, or Spark cannot reach the archive
            by itself.
        DataError: A log is damaged, or a file is gone, cut, or damaged where that was looked at.
    """
    named = {**plain_names(_named(url, options, topic)), "archive": archive}
    require_known(named, OF_STREAM | OF_FRAME if is_stream else OF_FRAME)
    require_values(named)
    wanted = selection_of(named)
    if is_stream:
        return _of_source(spark, named, "rmq_tier", _chosen(columns, named), is_stream=True)
    plan, state = _plan(named, wanted, "messages(spark, TIER, archive=ARCHIVE)")
    assert state is not None
    chosen = _planned_columns(columns, plan)
    with at_archive(named) as store:
        every, whole = choose_files(state, wanted), _planned_columns(None, plan)
        native = _Native(spark, store, state, every.keys(), scheme=scheme, is_proved=is_proved)
        archived = native.frame(list(plan.files.values()), whole, plan.cuts)
    archived = _where(archived, wanted, only_wanted=every.foreign.isdisjoint(plan.files))
    archived = archived if columns is None else archived.select(*columns)
    if not plan.offset_ranges:
        return archived
    return archived.unionByName(_of_source(spark, _pinned(named, plan), "rmq_tier", chosen))


def _pinned(named: Mapping[str, str], plan: ReadPlan) -> dict[str, str]:
    return {**named, "pinned": in_one_option(pins_of(plan.offset_ranges))}


def _of_source(
    spark: Any,  # noqa: ANN401
    named: Mapping[str, str],
    kind: str,
    columns: pa.Schema | None = None,
    *,
    is_stream: bool = False,
) -> Any:  # noqa: ANN401
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 (heavy)

    from tiered.spark.source import register  # noqa: PLC0415 (needs pyspark)

    register(spark)
    reader = (spark.readStream if is_stream else spark.read).format(kind)
    if columns is not None:
        reader = reader.schema(from_arrow_schema(columns))
    for name, text in named.items():
        if name != "path":
            reader = reader.option(name, text)
    return reader.load(named["path"])


def _chosen(names: Sequence[str] | None, named: Mapping[str, str]) -> pa.Schema | None:
    from tiered.spark.source import tier_columns  # noqa: PLC0415 (needs pyspark)

    if names is None:
        return None
    require_columns(list(names), partial(tier_columns, named, selection_of(named)))
    return _fields(archive_schema(BodyLayout(is_kafka=True)), names)


def _fields(known: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return load_pyarrow().schema([known.field(name) for name in names])


def _planned_columns(names: Sequence[str] | None, plan: ReadPlan) -> pa.Schema:
    known = archive_schema(BodyLayout(is_kafka=plan.is_kafka))
    if names is None:
        return known
    require_columns(list(names), lambda: frozenset(known.names))
    return _fields(known, names)


def _plan(
    named: Mapping[str, str], wanted: Selection, instead: str
) -> tuple[ReadPlan, ArchiveState | None]:
    if kind_of(named, None) != TIER:
        where = named["path"]
        raise InvalidError("this is an archive, and no tier", where=where, do=f"say {instead}")
    return _planned(named, wanted)


def _planned(named: Mapping[str, str], wanted: Selection) -> tuple[ReadPlan, ArchiveState | None]:
    with backend_errors(), contextlib.closing(TierStates(named)) as states:
        found = states.read()
        mine, level = partial(takes, named, wanted), isolation_option(named)
        plan = plan_tier(found, wanted, states.archive, mine, isolation=level)
        return plan, states.archive


def _columns(state: ArchiveState, wanted: Selection) -> pa.Schema:
    topics = {queue.topic for queue in state.queues if wanted.takes("topic", shown(queue.topic))}
    return topic_schema(state, topics.pop()) if len(topics) == 1 else every_schema(state)


def warn_of_stale(state: ArchiveState, wanted: Selection) -> None:
    """Tell, as a ``UserWarning``, which columns of bodies may be null whatever bodies have: sums of them would be too small.

    A frame has these columns only where it is of one topic.
    """
    topics = {queue.topic for queue in state.queues if wanted.takes("topic", shown(queue.topic))}
    for one in stale_rows(state, topics) if len(topics) == 1 else ():
        warnings.warn(one.said(), stacklevel=3)


def _where(frame: Any, wanted: Selection, *, only_wanted: bool) -> Any:  # noqa: ANN401
    """Exactly the rows that are wanted; Spark hands what it can of that down to the files.

    Where files hold no rows of other queues, nobody has to look at the columns that tell queues apart.
    """
    from pyspark.sql import functions  # noqa: PLC0415 (heavy)

    sure = _OF_QUEUES if only_wanted else frozenset()
    for name, (low, high) in wanted.bounds.items():
        if name in sure:
            continue
        column, place = frame[name], functions.timestamp_micros if name.endswith("_ts") else _same
        if low > MIN:
            frame = frame.where(column >= place(functions.lit(low)))
        if high < MAX:
            frame = frame.where(column <= place(functions.lit(high)))
    for name, values in wanted.texts.items():
        if name in sure:
            continue
        frame = frame.where(frame[name].isin(sorted(values)))
    if wanted.key is not None:
        is_key = functions.array_contains(frame["keys"], wanted.key)
        is_key = functions.coalesce(is_key, functions.lit(False))
        frame = frame.where(is_key | (frame["uniq_key"] == wanted.key))
    return frame


_OF_QUEUES = frozenset(["topic", "queue_id", "broker", "incarnation"])


def _same(value: Any) -> Any:  # noqa: ANN401
    return value


@dataclass
class _Native:
    """Spark's own reader, for files of one archive."""

    spark: Any  # a session
    store: ObjectStore  # the archive's
    state: ArchiveState  # what its log says
    there: AbstractSet[str]  # Keys of all files that it names
    scheme: str = "s3a"  # by which Hadoop reaches S3
    is_proved: bool = False  # files are read whole before

    def frame(
        self,
        files: Sequence[Chosen],
        columns: pa.Schema,
        cuts: Mapping[ArchiveQueue, int] | None = None,
    ) -> Any:  # noqa: ANN401
        """All rows of files that count."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 (heavy)

        kinds = from_arrow_schema(columns)
        if not files:
            return self.spark.createDataFrame([], kinds)
        require_reach(self.spark, self.store, self.scheme)
        if self.is_proved:
            prove_whole(self.store, self.state, {file.key for file in files})
        else:
            prove_ends(self.store, files)
        reader = self.spark.read.schema(kinds)
        reader = reader.option("parquet.page.verify-checksum.enabled", "true")
        for name in _SILENT:  # a session may have them for other tables; here rows would be missing
            reader = reader.option(name, "false")
        groups = self._cut(files, cuts or {})
        found = [
            _without(self._read(reader, keys), cuts or {}, cluster)
            for cluster, keys in groups.items()
        ]
        return reduce(lambda one, other: one.unionAll(other), found)

    def _read(self, reader: Any, keys: Sequence[str]) -> Any:  # noqa: ANN401
        """A frame of exactly these files; where they are many, by the folders that hold nothing else.

        Spark has a task of its own look at each path of a long list. What it finds in a folder is fixed with the frame, so
        it is held against the log: files that the log does not name (of a run that was killed, or merged and not yet
        cleaned) keep their folder from being named in the second try.
        """
        wanted, there = set(keys), self.there
        whole = reader.option("recursiveFileLookup", "true")  # paths tell nothing that rows do not
        for _ in range(2 if len(keys) > _PATHS_MAX else 0):
            frame = whole.parquet(*map(self._uri, covering(there, keys)))
            found = {self._key(uri) for uri in frame.inputFiles()}
            if found == wanted:
                return frame
            there = there | found
        return reader.parquet(*map(self._uri, keys))

    def _uri(self, key: str) -> str:
        return uri_of(self.store, key, scheme=self.scheme)

    def _key(self, uri: str) -> str:
        """Undo ``_uri``, of a file as Spark names it."""
        return unquote(uri).removeprefix(
            uri_of(self.store, "", scheme=self.scheme, is_pattern=False)
        )

    def _cut(
        self, files: Sequence[Chosen], cuts: Mapping[ArchiveQueue, int]
    ) -> dict[str | None, list[str]]:
        """Keys of files: by cluster those with rows that do not count; those of which all count by None.

        A file is of one cluster, but no column says of which: brokers of two may have one name.
        """
        cut = {
            file.key: queue.cluster
            for queue, end in cuts.items()
            for one in self.state.overlapping(queue, end, MAX)
            for file in one.files
            if file.high > end
        }
        found: dict[str | None, list[str]] = {}
        for file in files:
            found.setdefault(cut.get(file.key), []).append(file.key)
        return found


_SILENT = ("ignoreMissingFiles", "ignoreCorruptFiles")
_PATHS_MAX = 32
"""That Spark looks at by itself (``spark.sql.sources.parallelPartitionDiscovery.threshold``); of more each is a task."""


def covering(there: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Paths that hold the wanted files and no others: folders, as large as may be, and single files.

    Args:
        there: Keys of all files that may lie beside them.

    Returns:
        Folders end in a slash; "" is all.
    """
    known = set(wanted)
    mixed = {folder for key in there if key not in known for folder in _folders(key)}
    return list(
        dict.fromkeys(
            next((folder for folder in _folders(key) if folder not in mixed), key) for key in wanted
        )
    )


def _folders(key: str) -> Iterator[str]:
    """Those that a key lies in, the largest first."""
    yield ""
    for at, char in enumerate(key):
        if char == "/":
            yield key[: at + 1]


def _without(frame: Any, cuts: Mapping[ArchiveQueue, int], cluster: str | None) -> Any:  # noqa: ANN401
    """Without the rows of a cluster's queues from an offset on; none of the columns is ever null."""
    for queue, end in cuts.items():
        if queue.cluster != cluster:
            continue
        same = (frame["broker"] == shown(queue.broker)) & (frame["topic"] == shown(queue.topic))
        same &= (frame["queue_id"] == queue.queue_id) & (frame["incarnation"] == queue.incarnation)
        frame = frame.where(~(same & (frame["queue_offset"] >= end)))
    return frame


def require_reach(spark: Any, store: ObjectStore, scheme: str) -> None:  # noqa: ANN401
    """See that Spark can read a store's files by itself; with Spark Connect nobody can tell."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped] # noqa: PLC0415 (heavy)
    from pyspark.errors import PySparkException  # noqa: PLC0415 (heavy)

    name = uri_of(store, "", scheme=scheme).partition("://")[0]
    try:
        context = spark.sparkContext
        known = context._jvm.org.apache.hadoop.fs.FileSystem  # noqa: SLF001 (there is no other way)
        known.getFileSystemClass(name, context._jsc.hadoopConfiguration())  # noqa: SLF001
    except Py4JError as error:
        raise InvalidError(
            f"this Spark cannot read {name}:// by itself",
            where=store.url,
            do="add hadoop-aws of Spark's own Hadoop version, or have this program's client read, by"
            ' spark.read.format("tieredmq")',
        ) from error
    except PySparkException:
        return


# -- proof of files --------------------------------------------------------------------------------

_PROVERS = 8


def prove_whole(store: ObjectStore, state: ArchiveState, keys: Collection[str]) -> None:
    """Read files whole, and hold each against its checksum."""
    every = (file for files in files_by_topic(state).values() for file in files)
    prove_files(store, [file for file in every if file.key in keys])


def prove_ends(store: ObjectStore, files: Iterable[Chosen]) -> None:
    """See that files are there, not cut, and sound behind their pages: footers, indexes of pages, filters of keys.

    A request or two a file. Threads: ``_PROVERS`` of its own.
    """
    with ThreadPoolExecutor(_PROVERS, "tiered-prove") as pool:
        deque(pool.map(partial(_prove_end, store), files), maxlen=0)


def _prove_end(store: ObjectStore, file: Chosen) -> None:
    raw = ObjectFile(store, file.key, file.size_bytes)
    with reading(store, file.key):
        metadata = open_parquet(raw).metadata
        last = metadata.row_group(metadata.num_row_groups - 1)
        chunks = (last.column(at) for at in range(last.num_columns))
        end = max(_start_of(chunk) + chunk.total_compressed_size for chunk in chunks)
    raw.prove(end)


def _start_of(chunk: Any) -> int:  # noqa: ANN401 (pyarrow has no types)
    first: int = chunk.data_page_offset
    return min(first, chunk.dictionary_page_offset or first)


# -- lists of files --------------------------------------------------------------------------------
#
# The exact files of an archive for readers that take a list of them, as Spark's own reader of Parquet does.
#
# Such readers do not look at our checksums, so each file is read whole and held against the log before it is
# named. What becomes of it between that and their own reading only the checksums of its pages tell, to readers
# that are to look at them (``parquet.page.verify-checksum.enabled`` of Hadoop).
#
# Spark reads a folder's files by itself, and those on S3 where ``s3a`` is set up (library and credentials are
# the user's to bring). Every row of a file that the log names counts; which of them are wanted is for the
# reader to say again.

_PATTERN = frozenset("{}[]*?\\")


def uri_of(archive: ObjectStore, key: str, *, scheme: str = "s3a", is_pattern: bool = True) -> str:
    """A file as Hadoop names it, so that nothing in it is taken for a pattern."""
    root = local_root(archive)
    escaped = _escaped if is_pattern else _same
    if root is not None:
        return f"file://{escaped(root + key)}"
    kind, _, place = archive.url.partition("://")
    return f"{scheme if kind == 's3' else kind}://{escaped(f'{place}/{key}')}"


def file_uris(
    archive: ObjectStore,
    wanted: Selection | None = None,
    *,
    scheme: str = "s3a",
    is_proved: bool = True,
) -> list[str]:
    """The files that may hold what is wanted, as ``spark.read.parquet(*uris)`` takes them.

    Raises:
        InvalidError: There is no archive, or a topic is asked for that it has not.
    """
    state = read_archive(archive)
    keys = [file.key for file in plan_files(state, wanted or Selection()).files]
    if is_proved:
        prove_whole(archive, state, set(keys))
    return [uri_of(archive, key, scheme=scheme) for key in keys]


def _escaped(path: str) -> str:
    return "".join("\\" + char if char in _PATTERN else char for char in path)


# -- reports ---------------------------------------------------------------------------------------


def report(url: str, **options: Value) -> dict[str, Any]:
    """Files and row groups of an archive, or parts of a tier, that are read, and those left out by what.

    Of an archive the log, the footers of the files chosen and filters of keys are read; of a tier the journal.

    Raises:
        InvalidError: An option is wrong, or nothing is there.
    """
    named = _named(url, options)
    is_archive = kind_of(named, None) == ARCHIVE
    require_known(named, READ if is_archive else READ | OF_TIER)
    if not is_archive:
        return _of_tier(named)
    with at_place(named) as store:
        return {"source": ARCHIVE, **explain(store, selection_of(named)).document()}


def file_list(url: str, *, scheme: str = "s3a", **options: Value) -> list[str]:
    """Files of an archive that may hold what is wanted, as ``spark.read.parquet(*uris)`` takes them.

    Raises:
        InvalidError: An option is wrong, or there is no archive.
    """
    named = _named(url, options)
    require_known(named, READ)
    with at_place(named) as store:
        return file_uris(store, selection_of(named), scheme=scheme)


def _named(
    url: str, options: Mapping[str, Value], topic: str | list[str] | None = None
) -> dict[str, str]:
    every = options if topic is None else {**options, "topic": topic}
    named = {name.rstrip("_").replace("_", "-").lower(): value for name, value in every.items()}
    for name, value in named.items():
        if isinstance(value, list | tuple) and name not in _SEVERAL:
            # Put together they would be one that no message has.
            raise InvalidError(f"the option {name} has one value, and {len(value)} are given")
    return {**{name: _text(value) for name, value in named.items()}, "path": url}


def _text(value: Value) -> str:
    match value:
        case datetime():
            return str(-(-micros(value) // 1000))  # a broker's times are whole: the next is meant
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ",".join(value)
        case _:
            return str(value)


def _of_tier(options: dict[str, str]) -> dict[str, Any]:
    plan, _ = _planned(options, selection_of(options))
    tasks = [offset_range.task for offset_range in plan.offset_ranges]
    return {
        "source": TIER,
        "partitions": len(packed(plan.offset_ranges, partition_bytes(options))),
        "offset_ranges": len(plan.offset_ranges),
        "parts": sum(len(task.parts) for task in tasks),
        "parts_left_out": dict(sorted(plan.parts_left.items())),
        "offsets": sum(task.end - task.start for task in tasks),
        "offsets_missing": plan.missing,
        "size_bytes": sum(task.size_bytes for task in tasks),
    }


# -- questions in SQL ------------------------------------------------------------------------------
#
# Each topic of the archive is a view of its name. Files of a folder are read by Spark itself, from the exact list
# that the log names, each proven by its checksum before; those of another store by the source ``tieredmq``
# (``tiered.spark.source``), which needs no S3 library for Hadoop.


def ask_spark(
    session: Any,  # noqa: ANN401 (pyspark has no types)
    archive: ObjectStore,
    question: str,
    url: str,
    options: S3Options,
) -> pa.Table:
    """The answer to a question; it comes to this process whole.

    Raises:
        InvalidError: There is no archive, or the statement is wrong.
        DataError: The log, or a file that the question is about, is damaged.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 (heavy; only who asks)
    from pyspark.errors import AnalysisException, PySparkException  # noqa: PLC0415

    try:
        with _exactly(session):
            make_views(session, archive, url, options, question=question)
            return _table(session.sql(question))
    except (PySparkException, Py4JError) as error:
        topics = files_by_topic(read_archive(archive))
        tables = _exact(topics)
        asked = (
            file for t, table in tables.items() if is_named(table, question) for file in topics[t]
        )
        is_wrong = isinstance(error, AnalysisException)
        if not is_wrong and (harm := find_damage(archive, asked)):
            raise harm from error
        there = tables_there(tables.values(), "`")
        if LATEST in question.casefold():
            there = "tables of newest rows are DuckDB's alone: leave --engine out"
        do = full_advice(str(error)) or there
        raise InvalidError(_said(str(error)), do=do) from error


_CASE = "spark.sql.caseSensitive"


@contextlib.contextmanager
def _exactly(session: Any) -> Iterator[None]:  # noqa: ANN401
    """Tell upper case from lower in names, as RocketMQ does with topics and JSON with members."""
    before = session.conf.get(_CASE, "false")
    session.conf.set(_CASE, "true")
    try:
        yield
    finally:
        session.conf.set(_CASE, before)


def _exact(topics: Iterable[str]) -> dict[str, str]:
    """The view of each topic where upper case is told from lower: its own name."""
    tables = table_names(topics)
    names = {table: name for name, table in exact_names(tables).items()}
    return {topic: names[table] for topic, table in tables.items()}


_NO_ARROW = frozenset({"CalendarIntervalType", "YearMonthIntervalType", "VariantType"})
"""Types that Spark has no Arrow for, or only its own bytes."""


def _table(frame: Any) -> pa.Table:  # noqa: ANN401
    """An answer; columns of types that Arrow has nothing for come as Spark writes them."""
    kinds = [type(field.dataType).__name__ for field in frame.schema]
    if _NO_ARROW.intersection(kinds):
        names = frame.columns
        frame = frame.toDF(*map(str, range(len(kinds))))
        columns = [frame[str(number)] for number in range(len(kinds))]
        pairs = zip(columns, kinds, strict=True)
        cast = (one.cast("string") if kind in _NO_ARROW else one for one, kind in pairs)
        frame = frame.select(*cast).toDF(*names)
    found: pa.Table = frame.toArrow()
    return found


def _said(text: str) -> str:
    """What Spark says, in one line: of a failure within it, what came first."""
    lines = text.strip().splitlines() or ["Spark says nothing"]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    is_ours = lines[0].endswith("Traceback (most recent call last):")
    return causes[-1] if causes else lines[-1 if is_ours else 0]


def make_views(
    session: Any,  # noqa: ANN401
    archive: ObjectStore,
    url: str,
    options: S3Options,
    *,
    question: str | None = None,
) -> list[str]:
    """Make a view of each topic, of what the log names now; their names.

    These differ in more than case (the second is ``orders~2``), unless the session tells case (``spark.sql.caseSensitive``):
    then they are the topics' own.

    Args:
        options: How they reach S3.
        question: Only of topics that it may name.

    Raises:
        InvalidError: There is no archive.
    """
    state = read_archive(archive)
    topics = files_by_topic(state)
    is_exact = session.conf.get(_CASE, "false") == "true"
    wants_all = question is None or may_list_tables(question)
    tables = {
        topic: table
        for topic, table in (_exact(topics) if is_exact else table_names(topics)).items()
        if wants_all or is_named(table, question or "")
    }
    there = {file.key for files in topics.values() for file in files}
    native = _Native(session, archive, state, there, is_proved=True)
    for topic, table in tables.items():
        if local_root(archive) is None:
            named = {**source_options(options), "path": url, "topic": topic}
            frame = _of_source(session, named, "rmq_archive", topic_schema(state, topic))
        else:
            files = [Chosen(file.key, file.size_bytes, []) for file in topics[topic]]
            frame = native.frame(files, topic_schema(state, topic))
        frame.createOrReplaceTempView("`" + table.replace("`", "``") + "`")
    return list(tables.values())
