"""Spark as this program drives it: its session, work as tasks, what they met, and the stores that a worker has open.

Work is done by the functions of every engine (``tiered.upkeep.engine``): a segment each, a file to be made or looked at,
some footers, keys of an offset range of a tier, a bundle of it.

Overview: the driver sends a few tasks at a time as a table of numbers, one partition each; ``mapInArrow`` has each worker
read what it needs, write its objects and give one row back, which says what it made. No message enters the JVM. The
window of what is under way rolls on without a barrier; the driver's memory is that of the window, however many there are.

Retries: what a task meets (damage, a store that does not answer after all its own tries) comes back as a row, so one bad
segment does not end the others. What kills a worker is Spark's to try again; a second try, or a speculative one beside the
first, makes the same objects and adopts them.

Workers need this package and pyarrow: in local mode they run this very Python; on a cluster pack the environment
(docs/archive.md).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from backends.local_files import MAKE_ROOM
from tiered.api.arrow import load_pyarrow
from tiered.api.stores import open_for_reading
from tiered.clock import SystemClock
from tiered.errors import InvalidError, StoreUnavailableError, TieredStoreError
from tiered.upkeep.engine import WorkContext, rolling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.s3_settings import S3Options
    from tiered.upkeep.engine import Engine, Outcomes, T, V

MASTER = "local[*,4]"
"""All processors of this machine, and a failed task is tried again as on a cluster."""
JAVA_MIN = 17
WINDOW = 8
"""Jobs of Spark under way: one that waits for a slow task holds up an eighth of the rest at most."""
_ROW = "number long, said binary"
_GROUPS = itertools.count()
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
    """What workers have to know of the job."""

    tier: str  # URL
    prefix: str  # of the broker
    archive: str | None  # URL; None: the work is the tier's alone
    options: S3Options  # how to reach S3


def require_java() -> None:
    """See that there is a Java that Spark can use."""
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
    """Work by Spark, each row range a task, in a rolling window of small jobs. While the caller commits, executors work on.

    About two tasks a core are under way, however much there is to do; driver and closures hold no more than these.
    """
    context = session.sparkContext
    count = max(2 * context.defaultParallelism // WINDOW, 1)

    def run(do: Callable[[WorkContext, T], V], works: Iterable[T]) -> Outcomes[T, V]:
        group = f"tiered-archive-{next(_GROUPS)}"

        def some(those: Sequence[T]) -> list[V | Exception]:
            context.setJobGroup(group, f"tiered: {do.__name__}", interruptOnCancel=False)
            numbers = session.range(0, len(those), 1, len(those))
            rows = _collect(numbers.mapInArrow(worker(order, do, those), _ROW))
            found = {row["number"]: heard(row["said"]) for row in rows}
            return [found[number] for number in range(len(those))]

        def give_up() -> None:
            context.cancelJobGroup(group)

        return rolling(works, some, count=count, window=WINDOW, give_up=give_up)

    return run


def _collect(frame: Any) -> list[Any]:  # noqa: ANN401
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
            or "see Spark's own log for why; run it again: what is done is not done twice",
        ) from error
    return rows


def full_advice(said: str) -> str:
    """What to do where Spark found no room for its work files, by what it says; empty: it is something else."""
    is_full = "No space left on device" in said or "Disk quota exceeded" in said
    return f"{MAKE_ROOM} where Spark works (spark.local.dir)" if is_full else ""


_held: list[tuple[SparkOrder, WorkContext]] = []
"""What this worker process has open: one order's tier and archive, since most workers never see another's."""


def _bench(order: SparkOrder) -> WorkContext:
    """Tier and archive, opened once by each worker process, which does many tasks, one at a time; they end with it."""
    if not _held or _held[0][0] != order:
        for _, context in _held:
            context.tier.close()
            context.archive.close()
        stop, clock = threading.Event(), SystemClock()
        tier = open_for_reading(order.tier, order.options, clock, stop=stop).store
        archive = tier
        if order.archive is not None:
            archive = open_for_reading(order.archive, order.options, clock, stop=stop).store
        _held[:] = [(order, WorkContext(tier, order.prefix, archive))]
    return _held[0][1]


def worker(
    order: SparkOrder, do: Callable[[WorkContext, T], Any], works: Sequence[T]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a worker does with numbers of tasks."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arrow = load_pyarrow()
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            done = [said(do, _bench(order), works[number]) for number in numbers]
            columns = [arrow.array(numbers, arrow.int64()), arrow.array(done, arrow.binary())]
            yield arrow.RecordBatch.from_arrays(columns, ["number", "said"])

    return work


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception on its way: some cannot be pickled, since they take more than they have as ``args``."""

    kind: type[Exception]
    args: tuple[Any, ...]
    fields: dict[str, Any]


def said(do: Callable[[WorkContext, T], Any], context: WorkContext, work: T) -> bytes:
    """What something came to, to be heard elsewhere; damage and failures of stores are outcomes, too."""
    try:
        return pickle.dumps(do(context, work))
    except (TieredStoreError, BackendError) as error:
        return pickle.dumps(_Failed(type(error), error.args, vars(error)))


def heard(data: bytes) -> Any:  # noqa: ANN401 (whatever was said)
    """Undo ``said``; a failure is an exception that is not raised."""
    made = pickle.loads(data)  # noqa: S301 (our own workers')
    if not isinstance(made, _Failed):
        return made
    error = made.kind.__new__(made.kind, *made.args)
    vars(error).update(made.fields)
    return error
