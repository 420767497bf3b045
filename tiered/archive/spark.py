"""Archiving and merging as Spark tasks: a segment each, small ones together, or a file of files; by the same functions.

Overview: the driver sends a few tasks at a time as a table of numbers, one partition each; ``mapInArrow`` has each worker
read its segments, write its Parquet objects and give one row back, which says what it made. No message enters the JVM. The
window of what is under way rolls on without a barrier; the driver's memory is that of the window, however many there are.

Retries: what a task meets (damage, a store that does not answer after all its own tries) comes back as a row, so one bad
segment does not end the others. What kills a worker is Spark's to try again; a second try, or a speculative one beside the
first, makes the same objects and adopts them.

Workers need this package and pyarrow: in local mode they run this very Python; on a cluster pack the environment
(docs/archive.md).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from backends.errors import BackendError, ObjectNotFoundError, StoreFullError
from backends.local_files import MAKE_ROOM
from tiered.api.arrow import load_pyarrow
from tiered.api.stores import open_for_reading
from tiered.archive.bodies import BodyLayout
from tiered.archive.job import rolling
from tiered.archive.machine import lane_row
from tiered.archive.merging import Together, write_together
from tiered.archive.model import Archived, ArchiveLane, ParquetFile
from tiered.archive.moves import MovedPiece, NewFile
from tiered.archive.plan import Task, Work
from tiered.archive.task import do_work
from tiered.clock import SystemClock
from tiered.errors import (
    DataError,
    InternalError,
    InvalidError,
    StoreUnavailableError,
    TieredStoreError,
)
from tiered.log.parts import decode_columns, encode_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.archive.job import Engine, Made
    from tiered.archive.merging import MergeEngine

MASTER = "local[*,4]"
"""All processors of this machine, and a failed task is tried again as on a cluster."""
JAVA_MIN = 17
WINDOW = 8
"""Jobs of Spark under way: one that waits for a slow task holds up an eighth of the rest at most."""
_ROW = "number long, text string"
T = TypeVar("T")
V = TypeVar("V")
Do = Callable[["ObjectStore", "ObjectStore", str, str], str]
"""What a worker does for one text, with tier, archive and prefix; what it came to is a text, too."""
_KINDS = {
    error.kind: error for error in (DataError, InternalError, InvalidError, StoreUnavailableError)
}
_QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "-1",  # as `tiered archive` has it by itself
}
_LEAN = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1"}
"""Of a JVM that only hands out tasks, optimised code never earns what making it costs. The user's own
``spark.driver.extraJavaOptions`` come behind these and win."""


@dataclass(frozen=True, slots=True)
class SparkOrder:
    """What workers have to know of the job.

    Attributes:
        tier: URL.
        prefix: Of the broker.
        archive: URL.
        options: How to reach S3.
    """

    tier: str
    prefix: str
    archive: str
    options: S3Options


def require_java() -> None:
    """See that there is a Java that Spark can use.

    Raises:
        InvalidError: There is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    do = f"install a JDK {JAVA_MIN} and set JAVA_HOME, or use --engine local"
    if not java or not Path(java).exists():
        raise InvalidError(
            f"Spark needs Java {JAVA_MIN}, and there is none", where=home or "PATH", do=do
        )
    said = subprocess.run(  # noqa: S603 (the user's own Java)
        [java, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if found and int(found[1]) < JAVA_MIN:
        raise InvalidError(
            f"Spark needs Java {JAVA_MIN}, and this is {found[1]}", where=java, do=do
        )


def open_session(master: str | None, conf: Mapping[str, str], *, is_lean: bool = False) -> Any:  # noqa: ANN401 (pyspark has no types)
    """A Spark session; ours, or the one that ``spark-submit`` has prepared.

    Args:
        master: Where Spark runs; None: as ``spark-submit`` says, else ``MASTER``.
        conf: Settings of Spark.
        is_lean: No rows enter its JVM, so it may start cheaply; one that ``spark-submit`` has started is as it is.

    Raises:
        InvalidError: pyspark, pandas or Java is missing.
    """
    for name in ("pyspark", "pandas", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            raise InvalidError(
                f"--engine spark needs {name}, which is not installed",
                do="pip install 'tieredmq[spark]', or use --engine local",
            )
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted:
        require_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession  # noqa: PLC0415 (heavy; only who uses it)

    builder = SparkSession.builder.appName("tiered-archive")
    if master is not None or not is_submitted:
        builder = builder.master(master or MASTER)
    for name, value in {**_QUIET, **(_LEAN if is_lean else {}), **conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def spark_engine(session: Any, order: SparkOrder) -> Engine:  # noqa: ANN401
    """Work by Spark: a segment each, or small ones together. While the caller commits, executors work on.

    Args:
        session: Of Spark.
        order: Where tier and archive are, as workers see them.
    """

    def do(texts: list[str]) -> list[Made]:
        return list(map(outcome_of, ask(texts)))

    ask = partial(_ask, session, order, do_task)
    return lambda works: _rolled(session, works, work_text, do)


def spark_merge_engine(session: Any, order: SparkOrder) -> MergeEngine:  # noqa: ANN401
    """Files of others made by Spark, each by a task.

    Args:
        session: Of Spark.
        order: Where the archive is, as workers see it.
    """

    def do(texts: list[str]) -> list[Any]:
        return list(map(_heard, _ask(session, order, do_together, texts)))

    def make(plan: Iterable[Together]) -> Iterator[NewFile]:
        for one, made in _rolled(session, plan, together_text, do):
            if isinstance(made, Exception):
                raise made
            size, crc = made
            yield NewFile(one.key, size, crc, one.pieces)

    return make


def _rolled(
    session: Any,  # noqa: ANN401
    works: Iterable[T],
    text_of: Callable[[T], str],
    do: Callable[[list[str]], list[V]],
) -> Iterator[tuple[T, V]]:
    """Work in a rolling window of small jobs of Spark: as one ends, its outcomes are given, and another begins.

    About two tasks a core are under way, however much there is to do; driver and closures hold no more than these.
    """
    context = session.sparkContext
    count = max(2 * context.defaultParallelism // WINDOW, 1)
    group = f"tiered-archive-{id(do):x}"

    def some(those: Sequence[T]) -> list[V]:
        context.setJobGroup(group, "tiered archive", interruptOnCancel=False)
        return do([text_of(one) for one in those])

    def give_up() -> None:
        context.cancelJobGroup(group)

    return rolling(works, some, count=count, window=WINDOW, give_up=give_up)


def _ask(
    session: Any,  # noqa: ANN401
    order: SparkOrder,
    do: Do,
    texts: list[str],
) -> list[str]:
    """What workers say, a task for each text."""
    numbers = session.range(0, len(texts), 1, len(texts))
    rows = _collect(numbers.mapInArrow(worker(order, texts, do), _ROW))
    found = {row["number"]: row["text"] for row in rows}
    return [found[number] for number in range(len(texts))]


def _collect(frame: Any) -> list[Any]:  # noqa: ANN401
    """All rows.

    Raises:
        StoreUnavailableError: Spark has given up, mostly since workers died again and again.
    """
    from py4j.protocol import (  # type: ignore[import-untyped] # noqa: PLC0415 (comes with pyspark)
        Py4JError,
    )
    from pyspark.errors import PySparkException  # noqa: PLC0415 (heavy)

    try:
        rows: list[Any] = frame.collect()
    except (Py4JError, PySparkException) as error:
        said = re.search(r"SparkException: ([^\n]{1,160})", str(error))
        raise StoreUnavailableError(
            f"Spark has given up: {said[1] if said else type(error).__name__}",
            do=full_advice(str(error))
            or "see Spark's own log for why; archive again, and what is done is not done twice",
        ) from error
    return rows


def full_advice(said: str) -> str:
    """What to do where Spark found no room for its work files, by what it says; empty: it is something else."""
    is_full = "No space left on device" in said or "Disk quota exceeded" in said
    return f"{MAKE_ROOM} where Spark works (spark.local.dir)" if is_full else ""


_held: list[tuple[SparkOrder, ObjectStore, ObjectStore]] = []
"""What this worker process has open: one order's tier and archive, since most workers never see another's."""


def _stores(order: SparkOrder) -> tuple[ObjectStore, ObjectStore]:
    """Tier and archive, opened once by each worker process, which does many tasks, one at a time; they end with it."""
    if not _held or _held[0][0] != order:
        for _, *others in _held:
            for store in others:
                store.close()
        stop, clock = threading.Event(), SystemClock()
        tier = open_for_reading(order.tier, order.options, clock, stop=stop).store
        archive = open_for_reading(order.archive, order.options, clock, stop=stop).store
        _held[:] = [(order, tier, archive)]
    return _held[0][1:]


def worker(
    order: SparkOrder, texts: list[str], do: Do
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a worker does with numbers of tasks."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arrow = load_pyarrow()
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            done = [do(*_stores(order), order.prefix, texts[number]) for number in numbers]
            columns = [arrow.array(numbers, arrow.int64()), arrow.array(done, arrow.string())]
            yield arrow.RecordBatch.from_arrays(columns, ["number", "text"])

    return work


def do_task(tier: ObjectStore, archive: ObjectStore, prefix: str, text: str) -> str:
    """Some work; what it came to, as ``outcome_of`` reads it."""

    def made() -> list[Any]:
        return [one.document() for one in do_work(tier, prefix, archive, work_of(text))]

    return _said(made)


def do_together(_tier: ObjectStore, archive: ObjectStore, _prefix: str, text: str) -> str:
    """A file of others: its size and checksum, as ``_heard`` reads them."""

    def made() -> list[int]:
        new = write_together(archive, together_of(text))
        return [new.size_bytes, new.crc]

    return _said(made)


def _said(do: Callable[[], list[Any]]) -> str:
    """What something came to; damage and failures of stores are outcomes, too."""
    try:
        return json.dumps({"done": do()})
    except ObjectNotFoundError as error:
        return json.dumps({"moved": str(error)})
    except TieredStoreError as error:
        return json.dumps({"kind": error.kind, "said": [error.what, error.where, error.do]})
    except StoreFullError as error:
        return json.dumps({"full": str(error)})
    except BackendError as error:
        return json.dumps({"kind": StoreUnavailableError.kind, "said": [str(error), "", ""]})


def outcome_of(text: str) -> Made:
    """What a worker said of some work."""
    said = _heard(text)
    return said if isinstance(said, Exception) else tuple(map(Archived.of, said))


def _heard(text: str) -> list[Any] | Exception:
    """Undo ``_said``."""
    said = json.loads(text)
    if "done" in said:
        done: list[Any] = said["done"]
        return done
    if "moved" in said:
        return ObjectNotFoundError(said["moved"])
    if "full" in said:
        return StoreFullError(said["full"])
    what, where, do = said["said"]
    return _KINDS.get(said["kind"], InternalError)(what, where=where, do=do)


def together_text(one: Together) -> str:
    """A file to be as JSON."""
    return json.dumps([one.key, [[lane_row(p.lane), p.file.row()] for p in one.pieces]])


def together_of(text: str) -> Together:
    """Undo ``together_text``."""
    key, rows = json.loads(text)
    pieces = (MovedPiece(ArchiveLane.of(lane), ParquetFile.of(file)) for lane, file in rows)
    return Together(key, tuple(pieces))


def work_text(work: Work) -> str:
    """As JSON."""
    return json.dumps([task_text(task) for task in work.tasks])


def work_of(text: str) -> Work:
    """Undo ``work_text``."""
    return Work(tuple(map(task_of, json.loads(text))))


def task_text(task: Task) -> str:
    """A task as JSON."""
    bounds, parts = [task.start, task.end], encode_columns([task.parts])
    layout = task.layout.document()
    document = {"bounds": bounds, "parts": parts, "tails": task.tails, "layout": layout}
    return json.dumps({"lane": lane_row(task.lane), **document})


def task_of(text: str) -> Task:
    """Undo ``task_text``."""
    said = json.loads(text)
    lane, parts, layout = (
        ArchiveLane.of(said["lane"]),
        decode_columns(said["parts"]),
        said["layout"],
    )
    start, end = said["bounds"]
    return Task(lane, start, end, parts, said["tails"], BodyLayout.of(layout))
