"""A tier as a file system of fsspec, read-only: ``tiered://TOPIC/QUEUE/FIRST-END.jsonl`` or ``.arrow`` (docs/reading.md).

A topic is a folder, so is a queue. A queue's files are ranges of queue offsets, each of about ``FILE_BYTES`` of the commit
log: a file is made in memory when it is opened, since readers of Arrow files go to the end first. Both forms of a range
have all of its messages; to read a folder, name one of them (``*.arrow``). Any other range of a queue can be opened,
too, by a name made alike.

What there is is what was committed when the tier was opened, or at the last ``invalidate_cache``. The size of a file is not
known before it is made: ``info`` says None, ``size`` makes it. Threads: any. Retries and errors: those of ``Tier``; a path
that is not there is a ``FileNotFoundError``, and whatever would write an ``OSError``.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fsspec import AbstractFileSystem

from backends.lazy_dataclass import dataclass
from backends.s3_settings import S3Options
from tiered.api.arrow import jmq_schema, kafka_schema, load_pyarrow, schema
from tiered.api.tier import Tier, opened_by
from tiered.api.tier import open as open_tier
from tiered.errors import InvalidError
from tiered.log.messages import messages_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    import pyarrow as pa
    import pyarrow.dataset as pd

    from tiered.log.parts import Parts
    from tiered.model import MessageQueue, QueueBounds

FILE_BYTES: Final = 16 << 20
KEPT: Final = 8
"""Files that are kept after they were opened once."""
ARROW, JSON_LINES = "arrow", "jsonl"
_NAME: Final = re.compile(rf"(\d+)-(\d+)\.({ARROW}|{JSON_LINES})")
_TARGET_OPTIONS: Final = {"endpoint_url", "profile", "region"}


@dataclass(frozen=True, slots=True)
class FileRange:
    """A file's worth of a queue: about ``FILE_BYTES`` of its commit log."""

    start: int  # first queue offset
    stop: int  # one past the last
    log_bytes: int  # of the commit log, about
    store_min_ms: int  # no message of it was stored before
    store_max_ms: int  # nor after


def offset_ranges(parts: Parts, bounds: QueueBounds, file_bytes: int) -> list[FileRange]:
    """A queue cut into files. A gap between two parts ends one."""
    made: list[FileRange] = []
    for piece in _pieces(parts, bounds, file_bytes):
        last = made[-1] if made else None
        if last and last.stop == piece.start and last.log_bytes + piece.log_bytes <= file_bytes:
            made[-1] = FileRange(
                last.start,
                piece.stop,
                last.log_bytes + piece.log_bytes,
                min(last.store_min_ms, piece.store_min_ms),
                max(last.store_max_ms, piece.store_max_ms),
            )
        else:
            made.append(piece)
    return made


def _pieces(parts: Parts, bounds: QueueBounds, file_bytes: int) -> Iterator[FileRange]:
    """Each part, or some of it where it is larger than a file."""
    names = ("queue_offset", "count", "log_bytes", "store_min_ms", "store_max_ms")
    for first, count, log_bytes, low_ms, high_ms in zip(
        *(parts.rows[name].tolist() for name in names), strict=True
    ):
        if high_ms < 0:  # nothing but holes
            continue
        step = max(1, count * file_bytes // max(log_bytes, file_bytes))
        for at in range(first, first + count, step):
            start, stop = max(at, bounds.min), min(at + step, first + count, bounds.end)
            if start < stop:
                size = log_bytes * (stop - start) // count
                yield FileRange(start, stop, size, low_ms, high_ms)


class MadeFile(io.BytesIO):
    """An open file, with the size that fsspec asks of one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.size = len(data)


class TieredFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """One broker's tier; see the module."""

    protocol = "tiered"
    root_marker = ""

    def __init__(
        self,
        url: str | None = None,
        cluster: str | None = None,
        broker: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        tier: Tier | None = None,
        **more: Any,  # noqa: ANN401 (fsspec's own)
    ) -> None:
        """Open nothing yet.

        Args:
            url: Of the tier; or it comes as the second link of a chain, ``tiered://orders/0::file:///data/tier``.
            columns: Of Arrow files; default: all.
            fo: What fsspec makes of a chain, as the next two.
            tier: An opened one, which stays the caller's.
        """
        super().__init__(**more)
        if url is None and fo is not None:
            url = _chained(target_protocol or "file", fo)
        if url is None and tier is None:
            do = "give url=, or chain it: tiered://TOPIC/QUEUE::file:///data/tier"
            raise InvalidError("no tier is named", do=do)
        self._url, self._cluster, self._broker = url, cluster, broker
        self._options = _options(target_options or {})
        self._columns, self._tier, self._opening = columns, tier, threading.Lock()
        self._kept: dict[str, bytes] = {}
        self._keeping = threading.Lock()

    @property
    def _opened(self) -> Tier:
        with self._opening:
            if self._tier is None:
                assert self._url is not None
                self._tier = open_tier(
                    self._url, options=self._options, cluster=self._cluster, broker=self._broker
                )
            return self._tier

    def close(self) -> None:
        """Close the tier, if it was opened here; it is opened again when it is wanted."""
        with self._opening:
            if self._url is not None and self._tier is not None:
                self._tier.close()
                self._tier = None

    def invalidate_cache(self, path: str | None = None) -> None:
        """See what was committed since."""
        self._opened.refresh()
        with self._keeping:
            self._kept.clear()
        super().invalidate_cache(path)

    # What there is

    def ls(self, path: str, detail: bool = True, **_more: Any) -> list[Any]:  # noqa: ANN401
        """Topics, queues of a topic, or files of a queue."""
        found = self._listed(self._strip_protocol(path))
        return found if detail else [one["name"] for one in found]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        topic, queue_id, name = self._split(path)
        if name:
            return [self.info(path)]
        if queue_id is None:
            if not topic:
                return [_folder(folder_of(one)) for one in self._opened.topics()]
            queues = self._opened.queues(topic_of(topic))
            if not queues:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return [_folder(f"{topic}/{queue.queue_id}") for queue in queues]
        return [
            _file(self.name(queue, one, form), one)
            for queue in [self._queue(topic, queue_id, path)]
            for one in self.ranges(queue)
            for form in (ARROW, JSON_LINES)
        ]

    def ranges(self, queue: MessageQueue) -> list[FileRange]:
        """A queue's files, in order."""
        incarnation = opened_by(self._opened).state.incarnation(queue)
        assert incarnation
        return offset_ranges(incarnation.parts(), self._opened.bounds(*queue), FILE_BYTES)

    @staticmethod
    def name(queue: MessageQueue, one: FileRange, form: str) -> str:
        """The path of a file."""
        return f"{folder_of(queue.topic)}/{queue.queue_id}/{one.start:020d}-{one.stop:020d}.{form}"

    def info(self, path: str, **_more: Any) -> dict[str, Any]:  # noqa: ANN401
        """A folder, or a file, whose size is not known."""
        path = self._strip_protocol(path)
        topic, queue_id, name = self._split(path)
        if not name:
            self._listed(topic) if queue_id is None else self._queue(topic, queue_id, path)
            return _folder(path)
        queue, start, stop, _ = self._file(path)
        touched = [one for one in self.ranges(queue) if one.start < stop and one.stop > start]
        times = [one.store_min_ms for one in touched], [one.store_max_ms for one in touched]
        sizes = sum(one.log_bytes for one in touched)
        return _file(path, FileRange(start, stop, sizes, min(times[0]), max(times[1])))

    def size(self, path: str) -> int | None:
        """Of a file: it is made for that."""
        path = self._strip_protocol(path)
        return len(self._made(path)) if self._split(path)[2] else None

    def modified(self, path: str) -> datetime:
        """When the last message of a file was stored."""
        return datetime.fromtimestamp(self.info(path)["store_max_ms"] / 1000, UTC)

    # Files

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **_more: Any,  # noqa: ANN401
    ) -> MadeFile:
        del block_size, autocommit, cache_options
        if mode != "rb":
            self._refuse(path)
        return MadeFile(self._made(self._strip_protocol(path)))

    def _made(self, path: str) -> bytes:
        """A file's bytes. The last few are kept: pyarrow opens a file for its schema, and again to read it."""
        with self._keeping:
            kept = self._kept.pop(path, None)
        made = self._make(path) if kept is None else kept
        with self._keeping:
            self._kept[path] = made
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return made

    def _make(self, path: str) -> bytes:
        queue, start, stop, form = self._file(path)
        tier = self._opened
        if form == JSON_LINES:
            batches = tier.read_records(*queue, start, stop)
            lines = (
                line
                for batch in batches
                for line in messages_lines(batch.records, batch.log_offset, raw_body=False)
            )
            return b"".join(line + b"\n" for line in lines)
        arrow = load_pyarrow()
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_file(sink, self.schema()) as writer:
            for found in tier.read_arrow(*queue, start, stop, columns=self._columns):
                writer.write_batch(found)
        return bytes(sink.getvalue())

    def schema(self) -> pa.Schema:
        """Of all Arrow files."""
        kind = opened_by(self._opened).state.store.get("kind")
        made = {"kafka": kafka_schema, "jmq": jmq_schema}.get(str(kind), schema)
        return made(self._columns)

    # Paths

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path)).strip("/")

    @staticmethod
    def _split(path: str) -> tuple[str, str | None, str]:
        """Topic ("": the root), queue and name of a file."""
        topic, _, rest = path.partition("/")
        queue_id, _, name = rest.partition("/")
        return topic, queue_id or None, name

    def _queue(self, topic: str, queue_id: str, path: str) -> MessageQueue:
        for queue in self._opened.queues(topic_of(topic)):
            if str(queue.queue_id) == queue_id:
                return queue
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _file(self, path: str) -> tuple[MessageQueue, int, int, str]:
        """Whose messages a file has, from which queue offset to before which, and its form."""
        topic, queue_id, name = self._split(path)
        found = _NAME.fullmatch(name)
        if not found or queue_id is None:
            is_folder = not name and self.exists(path)
            code = errno.EISDIR if is_folder else errno.ENOENT
            raise OSError(code, os.strerror(code), path)
        queue = self._queue(topic, queue_id, path)
        start, stop, bounds = int(found[1]), int(found[2]), self._opened.bounds(*queue)
        if not max(start, bounds.min) < min(stop, bounds.end):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return queue, start, stop, found[3]

    # What writes

    def _refuse(self, path: object, *_more: object, **_named: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = touch = cp_file = mv = put_file = pipe_file = (
        _refuse
    )


def folder_of(topic: str) -> str:
    """The name of a topic's folder: JoyQueue's topics may have slashes."""
    return topic.replace("%2", "%252").replace("/", "%2F")


def topic_of(folder: str) -> str:
    """Undo ``folder_of``."""
    return re.sub("%252|%2F", lambda found: "/" if found[0] == "%2F" else "%2", folder)


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(name: str, said: FileRange) -> dict[str, Any]:
    times = {"store_min_ms": said.store_min_ms, "store_max_ms": said.store_max_ms}
    return {"name": name, "size": None, "type": "file", "log_bytes": said.log_bytes, **times}


def _chained(protocol: str, path: str) -> str:
    """The URL that a link of a chain was: fsspec takes it apart."""
    return f"file://{path}" if protocol in {"file", "local"} else f"{protocol}://{path.lstrip('/')}"


def _options(given: dict[str, Any]) -> S3Options:
    unknown = given.keys() - _TARGET_OPTIONS
    if unknown:
        do = "settings of S3 come from the environment and the AWS profile"
        raise InvalidError(f"a tier is not opened with {', '.join(sorted(unknown))}", do=do)
    return S3Options(**given)


# -- dataset -------------------------------------------------------------------------------------
#
# A topic as a dataset of pyarrow: the Arrow files of the file system above, each with what is known of it beforehand.
#
# One mechanism for both: pyarrow (and whatever takes its datasets, as DuckDB and Polars) opens a file when it comes to it
# and lets go of it when its rows are used; what it reads ahead of a slow reader ends at 1 GiB. What is known of a file
# (queue, queue offsets, store times) is its partition expression: a filter on these opens no file that cannot have such
# rows.

_QUEUE, _OFFSET = ("queue_id", "partition"), ("queue_offset", "offset", "index")
"""What stores call the same column."""


def make_dataset(tier: Tier, topic: str, columns: Sequence[str] | None) -> pd.FileSystemDataset:
    """See ``Tier.dataset``."""
    arrow = load_pyarrow()
    importlib.import_module("pyarrow.dataset")
    files = TieredFileSystem(tier=tier, columns=columns, skip_instance_cache=True)
    schema, form = files.schema(), arrow.dataset.IpcFileFormat()
    system = arrow.fs.PyFileSystem(arrow.fs.FSSpecHandler(files))
    fragments = [
        form.make_fragment(
            files.name(queue, one, ARROW), system, _known(arrow, schema.names, queue, one)
        )
        for queue in tier.queues(topic)
        for one in files.ranges(queue)
    ]
    return arrow.dataset.FileSystemDataset(fragments, schema, form, system)


def _known(arrow: ModuleType, names: Sequence[str], queue: MessageQueue, one: FileRange) -> object:
    """What holds of each row of a file, as far as its columns are there."""
    time = arrow.timestamp("ms", "UTC")
    known = arrow.dataset.scalar(True)
    for name in names:
        column = arrow.dataset.field(name)
        if name == "topic":
            known &= column == queue.topic
        elif name in _QUEUE:
            known &= column == arrow.scalar(queue.queue_id, arrow.int32())
        elif name in _OFFSET:
            known &= (column >= one.start) & (column < one.stop)
        elif name == "store_timestamp":
            known &= column >= arrow.scalar(one.store_min_ms, time)
            known &= column <= arrow.scalar(one.store_max_ms, time)
    return known
