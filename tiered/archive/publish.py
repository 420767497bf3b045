"""Publishes an archive in an Iceberg catalog: a table for each topic, which names the archive's own files.

Overview: for each topic the files that the log names are held against those of the table's present snapshot; what is new is
added and what was replaced is taken out, in one snapshot, which bears the number of the log's entry. Nothing is copied or
rewritten: an archive's files are the table's files, and metadata lies below ``_iceberg/`` of the archive. Columns have the
ids that are in the files (``tiered.archive.columns``): catalogs would number them by themselves, so the ids are told them.

Ordering: the log first, always; it stays the truth. A table is one entry behind or more, never ahead.

Retries: publishing again is a no-op: a table that bears the number of the log's last entry, or a later one, is left alone,
and the same files give the same difference. When another has committed between, the difference is made anew; pyiceberg's own
retries, which would add the same files once more, are switched off.

After a crash: some tables have been brought up to date, others not; publish again.

One thread. Memory: the names of one topic's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from backends.local_files import MAKE_ROOM, is_full
from tiered.api.arrow import load_library, load_pyarrow
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.columns import schema, topic_schema
from tiered.archive.duck import local_root
from tiered.archive.selection import shown
from tiered.archive.tables import files_by_topic, follow_log
from tiered.errors import DataError, InvalidError, StoreUnavailableError, TieredStoreError
from tiered.upkeep.engine import all_done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import ParquetFile
    from tiered.journal.replay import JournalReader
    from tiered.upkeep.engine import Engine, WorkContext

T = TypeVar("T")
NUMBER = "tiered.archive.number"
URL = "tiered.archive.url"
TOPIC = "tiered.topic"
NAMESPACE = "default"
SORTED = ("broker", "queue_id", "incarnation", "queue_offset")
"""Rows of a file are in this order: it is that of queues, and of offsets in each."""
_LOG = logging.getLogger("tiered.archive")
_TRIES = 5
_PLAIN = re.compile(r"[a-z0-9_]+")
_NO_RETRIES = {"commit.retry.num-retries": "0"}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where tables go."""

    catalog: str  # URI of a catalog, or the name of one in pyiceberg's own configuration
    namespace: str  # of the tables

    @classmethod
    def of(cls, text: str) -> Destination:
        """From ``iceberg:CATALOG#NAMESPACE``."""
        kind, _, rest = text.partition(":")
        catalog, _, namespace = rest.partition("#")
        if kind != "iceberg" or not catalog:
            raise ValueError(f"{text!r} is not a place to publish in")
        return cls(catalog, namespace or NAMESPACE)


@dataclass(frozen=True, slots=True)
class Published:
    """What became of one topic's table."""

    topic: str
    table: str  # its name, with the namespace
    added: int  # files added
    removed: int  # files taken out
    number: int  # of the archive's log, up to which the table is


def table_name(topic: str) -> str:
    """Of a topic's table: its own name where that is lower case and plain; else made so, with a hash of the whole."""
    if _PLAIN.fullmatch(topic):
        return topic
    raw = topic.encode("utf-8", "surrogateescape")
    plain = re.sub(r"[^a-z0-9]+", "_", topic.lower()).strip("_")[:100]
    return f"{plain or 'topic'}_{hashlib.sha256(raw).hexdigest()[:8]}"


def publish(
    archive: ObjectStore, destination: Destination, options: S3Options, engine: Engine
) -> Iterator[Published]:
    """Bring the table of each topic up to the archive's log.

    Yields:
        Each table when it is done.

    Raises:
        InvalidError: pyiceberg is missing, or a table of that name is not of this archive, or has got other columns, or
            the archive was begun anew. When all other tables are done; so is a DataError.
    """
    log = follow_log(archive)
    if not log.number:
        return  # nothing was ever archived
    publisher = _Publisher(archive, destination, options, log)
    failed: InvalidError | DataError | None = None
    try:
        for topic, files in publisher.topics().items():
            try:
                done = publisher.publish(topic, files, engine)
            except (InvalidError, DataError) as error:
                if failed is not None:  # the first is the one that ends the run
                    _LOG.warning("the table of %s stays behind: %s", shown(topic), error)
                failed = failed or error
                continue
            yield done
    finally:
        publisher.close()
    if failed is not None:
        raise failed


def expire_snapshots(
    archive: ObjectStore, destination: Destination, options: S3Options, before_ms: int
) -> Iterator[tuple[str, int]]:
    """Take old snapshots out of each topic's table, but the present one: they name what ``--clean`` deletes.

    The metadata files of such snapshots stay where they are.

    Args:
        archive: The archive's store, with retries.
        options: How S3 is reached.
        before_ms: UTC.

    Raises:
        InvalidError: pyiceberg is missing, or a table of that name is not of this archive.
    """
    log = follow_log(archive)
    publisher = _Publisher(archive, destination, options, log)
    try:
        for topic in publisher.topics():
            count = publisher.expire(topic, before_ms)
            if count:
                yield f"{destination.namespace}.{table_name(topic)}", count
    finally:
        publisher.close()


class _Publisher:
    def __init__(
        self,
        archive: ObjectStore,
        destination: Destination,
        options: S3Options,
        log: JournalReader[ArchiveState],
    ) -> None:
        self._archive = archive
        self._place = destination
        self._log = log
        self._state = log.state
        self._number = log.number
        root = local_root(archive)
        self._root = f"file://{root}" if root is not None else archive.url.rstrip("/") + "/"
        self._catalog = _open(destination.catalog, _properties(options, self._root))

    def close(self) -> None:
        self._catalog.close()

    def topics(self) -> dict[str, list[ParquetFile]]:
        """Files of each topic that the log has, and of each that only a table has: the broker truncated all of it."""
        found = files_by_topic(self._state)
        known = {table_name(topic) for topic in found}
        try:
            others = [table for table in self._tables(known) if table.get(URL) == self._archive.url]
        except Exception as error:
            raise self._refused(_said(error), error) from error
        return found | {table[TOPIC]: [] for table in others if table.get(TOPIC) not in found}

    def _tables(self, known: set[str]) -> Iterator[dict[str, str]]:
        """Properties of the other tables of the namespace."""
        from pyiceberg.exceptions import (  # noqa: PLC0415 (heavy)
            NoSuchIcebergTableError,
            NoSuchNamespaceError,
            NoSuchTableError,
        )

        with contextlib.suppress(NoSuchNamespaceError):
            for name in self._catalog.list_tables(self._place.namespace):
                if name[-1] not in known:
                    with contextlib.suppress(NoSuchIcebergTableError, NoSuchTableError):
                        yield self._catalog.load_table(name).metadata.properties

    def publish(self, topic: str, files: list[ParquetFile], engine: Engine) -> Published:
        wanted = {self._root + file.key: file for file in files}
        return self._tried(topic, lambda: self._publish(topic, wanted, engine))

    def _tried(self, topic: str, do: Callable[[], T]) -> T:
        """Do something that commits; again when another has committed between, since it is another thing then."""
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 (heavy)

        for number in range(_TRIES):
            try:
                return do()
            except CommitFailedException:
                continue
            except (TieredStoreError, BackendError):
                raise
            except Exception as error:
                if number:  # once, since who makes the same table at the same moment makes us fail in many ways
                    raise self._refused(_said(error), error) from error
        raise self._refused(f"others keep changing the table of {topic}")

    def expire(self, topic: str, before_ms: int) -> int:
        """How many snapshots of a topic's table are gone that were older; tried again when another commits between."""
        return self._tried(topic, lambda: self._expire(topic, before_ms))

    def _expire(self, topic: str, before_ms: int) -> int:
        name = f"{self._place.namespace}.{table_name(topic)}"
        if not self._catalog.table_exists(name):
            return 0
        table = self._table(name, topic)
        present = table.metadata.current_snapshot_id
        old = [
            one.snapshot_id
            for one in table.snapshots()
            if one.timestamp_ms < before_ms and one.snapshot_id != present
        ]
        if old:
            table.maintenance.expire_snapshots().by_ids(old).commit()
        return len(old)

    def _publish(self, topic: str, wanted: dict[str, ParquetFile], engine: Engine) -> Published:
        name = f"{self._place.namespace}.{table_name(topic)}"
        if not wanted and not self._catalog.table_exists(name):
            return Published(topic, name, 0, 0, self._number)
        table = self._table(name, topic)
        self._require_not_ahead(name, table)
        if _number_of(table) >= self._number:
            return Published(topic, name, 0, 0, _number_of(table))
        present = {task.file.file_path: task.file for task in table.scan().plan_files()}
        added = [wanted[path] for path in sorted(wanted) if path not in present]
        removed = [
            file
            for path, file in present.items()
            if path.startswith(self._root) and path not in wanted
        ]
        if added or removed:
            self._commit(table, topic, added, removed, engine)
        return Published(topic, name, len(added), len(removed), self._number)

    def _require_not_ahead(self, name: str, table: Any) -> None:  # noqa: ANN401
        """See that the log has all that the table was made of, now if not when we read it."""
        if _number_of(table) > self._number:
            self._log.catch_up()
            if _number_of(table) > self._log.number:
                raise InvalidError(
                    f"the table {name} is at entry {_number_of(table)} of the archive's log, which ends at"
                    f" {self._log.number}: the archive was begun anew, or an older copy of it put back",
                    where=self._place.catalog.rpartition("@")[2],
                    do="drop the table, or publish into a namespace of its own",
                )

    def _commit(
        self,
        table: Any,  # noqa: ANN401 (pyiceberg's, whose types come with it)
        topic: str,
        added: list[ParquetFile],
        removed: list[Any],
        engine: Engine,
    ) -> None:
        table.metadata.properties.update(_NO_RETRIES)  # of our copy: it is not sent
        properties = {NUMBER: str(self._number), URL: self._archive.url}
        with table.transaction() as change:
            self._add_columns(change, topic)
            self._map_names(change, topic)
            update = change.update_snapshot(snapshot_properties=properties)
            with update.overwrite() if removed else update.fast_append() as snapshot:
                for file in removed:
                    snapshot.delete_data_file(file)
                footers = _footers(change.table_metadata, self._root, added)
                with all_done(engine(read_footers, footers)) as every:
                    for file in (file for _, files in every for file in files):
                        snapshot.append_data_file(file)

    def _table(self, name: str, topic: str) -> Any:  # noqa: ANN401
        from pyiceberg.exceptions import (  # noqa: PLC0415 (heavy)
            NoSuchTableError,
            TableAlreadyExistsError,
        )

        try:
            table = self._catalog.load_table(name)
        except NoSuchTableError:
            try:
                table = self._make(name, topic)
            except TableAlreadyExistsError:
                table = self._catalog.load_table(name)
        said = table.metadata.properties
        if said.get(URL) != self._archive.url or said.get(TOPIC) != topic:
            raise InvalidError(
                f"the table {name} is not of this archive, or of another topic",
                where=self._place.catalog,
                do="publish into a namespace of its own",
            )
        return table

    def _make(self, name: str, topic: str) -> Any:  # noqa: ANN401
        """A table of the columns that every file has: catalogs number these as we do."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema  # noqa: PLC0415 (heavy)
        from pyiceberg.transforms import DayTransform, IdentityTransform  # noqa: PLC0415 (heavy)

        self._catalog.create_namespace_if_not_exists(self._place.namespace)
        location = f"{self._root}_iceberg/{self._place.namespace}/{table_name(topic)}"
        with self._catalog.create_table_transaction(
            name,
            schema=pyarrow_to_schema(schema()),
            location=location,
            properties={URL: self._archive.url, TOPIC: topic},
        ) as change:
            with change.update_spec() as spec:
                spec.add_field("store_ts", DayTransform(), "store_day")
            with change.update_sort_order() as order:
                for column in SORTED:
                    order.asc(column, IdentityTransform())
        return self._catalog.load_table(name)

    def _add_columns(self, change: Any, topic: str) -> None:  # noqa: ANN401 (pyiceberg's)
        """Add what files of the topic have got since."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema  # noqa: PLC0415 (heavy)
        from pyiceberg.schema import Schema  # noqa: PLC0415
        from pyiceberg.table.update import (  # noqa: PLC0415
            AddSchemaUpdate,
            AssertCurrentSchemaId,
            SetCurrentSchemaUpdate,
        )

        schemas = change.table_metadata.schemas
        present = change.table_metadata.schema()
        wanted = pyarrow_to_schema(topic_schema(self._state, topic)).fields
        self._require_same(topic, schemas, present, wanted)
        known = {field.field_id for field in present.fields}
        added = [field for field in wanted if field.field_id not in known]
        if not added:
            return
        number = 1 + max(one.schema_id for one in schemas)
        ids = present.identifier_field_ids
        new = Schema(*present.fields, *added, schema_id=number, identifier_field_ids=ids)
        # What adds columns in pyiceberg numbers them by itself; these are the updates that it makes of that.
        change._apply(  # noqa: SLF001
            (AddSchemaUpdate(schema=new), SetCurrentSchemaUpdate(**{"schema-id": number})),
            (AssertCurrentSchemaId(**{"current-schema-id": present.schema_id}),),
        )

    def _map_names(self, change: Any, topic: str) -> None:  # noqa: ANN401 (pyiceberg's)
        """Say which id a name in a file means, for readers that do not look at the ids in the files."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema  # noqa: PLC0415 (heavy)
        from pyiceberg.table import TableProperties  # noqa: PLC0415

        text = pyarrow_to_schema(topic_schema(self._state, topic)).name_mapping.model_dump_json()
        if change.table_metadata.properties.get(TableProperties.DEFAULT_NAME_MAPPING) != text:
            change.set_properties({TableProperties.DEFAULT_NAME_MAPPING: text})

    def _require_same(self, topic: str, schemas: list[Any], present: Any, wanted: Any) -> None:  # noqa: ANN401
        """See that the table has our columns under our names and ids, and no other ones under them."""
        from pyiceberg.schema import Schema  # noqa: PLC0415 (heavy)

        known = {field.field_id: field for field in present.fields}
        names = {field.name for field in present.fields}
        used = {number for one in schemas for number in one.field_ids}

        def is_changed(ours: Any) -> bool:  # noqa: ANN401
            theirs = known.get(ours.field_id)
            if theirs is None:
                return ours.name in names or bool(used & Schema(ours).field_ids)
            return (theirs.name, theirs.field_type) != (ours.name, ours.field_type)

        changed = [field.name for field in wanted if is_changed(field)]
        if changed:
            raise InvalidError(
                f"others have changed columns of the table for {topic}: {', '.join(changed)[:200]}",
                where=self._place.catalog.rpartition("@")[2],
                do="publish into a namespace of its own",
            )

    def _refused(self, why: str, error: Exception | None = None) -> StoreUnavailableError:
        do = _advice(error, "publish again when the catalog answers")
        return StoreUnavailableError(
            f"the catalog refuses: {why}"[:500],
            where=self._place.catalog.rpartition("@")[2],
            do=f"what is archived stays so; {do}",
        )


# -- footers ---------------------------------------------------------------------------------------

FOOTERS = 32
"""Read by one piece of work: each takes a request or two."""


@dataclass(frozen=True, slots=True)
class Footers:
    """Files of which a table's metadata has to know sizes, counts and bounds."""

    table: Any  # pyiceberg's metadata of the table, without its history
    root: str  # of the archive, as the table has it
    files: tuple[tuple[str, int], ...]  # key and bytes of each


def _footers(table: Any, root: str, files: list[ParquetFile]) -> Iterator[Footers]:  # noqa: ANN401
    lists: dict[str, Any] = {"snapshots": [], "snapshot_log": [], "metadata_log": [], "refs": {}}
    alone = table.model_copy(update=lists | {"current_snapshot_id": None})
    for at in range(0, len(files), FOOTERS):
        some = files[at : at + FOOTERS]
        yield Footers(alone, root, tuple((file.key, file.size_bytes) for file in some))


def read_footers(context: WorkContext, footers: Footers) -> list[Any]:
    """What a table says of each file, by its footer."""
    from pyiceberg.io.pyarrow import parquet_file_to_data_file  # noqa: PLC0415 (heavy)

    sizes = dict(footers.files)
    io: Any = _OurFiles(context.archive, footers.root, sizes)
    return [parquet_file_to_data_file(io, footers.table, footers.root + key) for key in sizes]


@dataclass(frozen=True, slots=True)
class _OurFiles:
    """Files as pyiceberg opens them, by our own client, which proves what it reads."""

    archive: ObjectStore
    root: str
    sizes: dict[str, int]

    def new_input(self, path: str) -> _OurFile:
        key = path.removeprefix(self.root)
        return _OurFile(self.archive, key, self.sizes[key])


@dataclass(frozen=True, slots=True)
class _OurFile:
    archive: ObjectStore
    key: str
    size_bytes: int

    def open(self) -> ObjectFile:
        return ObjectFile(self.archive, self.key, self.size_bytes)

    def __len__(self) -> int:
        return self.size_bytes


def _number_of(table: Any) -> int:  # noqa: ANN401
    """Of the archive's log, up to which a table is; 0 when nothing was published."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        said = snapshot.summary.additional_properties if snapshot.summary else {}
        if NUMBER in said:
            return int(said[NUMBER])
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    return 0


def _properties(options: S3Options, root: str) -> dict[str, str]:
    """How pyiceberg reaches what we reach; for this process, nothing of it becomes part of a table."""
    known = {"warehouse": root + "_iceberg"}
    if not root.startswith("s3://"):
        return known
    from backends.s3_settings import resolve, split_location  # noqa: PLC0415 (with boto3)

    bucket, _ = split_location(root.removeprefix("s3://").rstrip("/"))
    settings = resolve(bucket, options, os.environ)
    pair = settings.credentials()
    texts = {
        "s3.endpoint": settings.endpoint_url,
        "s3.region": settings.region,
        "s3.access-key-id": pair["access_key_id"],
        "s3.secret-access-key": pair["secret_access_key"],
        "s3.session-token": pair.get("token"),
        "s3.force-virtual-addressing": str(not settings.path_style).lower(),
    }
    return known | {name: text for name, text in texts.items() if text is not None}


def _open(catalog: str, properties: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The catalog that a URI or a name means."""
    load_pyarrow()
    known = load_library("pyiceberg.catalog", "this needs pyiceberg", "iceberg")
    is_uri = ":" in catalog
    name, more = ("tiered", {"uri": catalog}) if is_uri else (catalog, {})
    try:
        return _loaded(lambda: known.load_catalog(name, **properties, **more))
    except ValueError as error:
        raise InvalidError(
            f"there is no such catalog: {error}",
            where=catalog.rpartition("@")[2],
            do="give a URI as sqlite:////path/catalog.db or https://host, or a name from .pyiceberg.yaml",
        ) from error
    except Exception as error:
        raise StoreUnavailableError(
            f"the catalog cannot be opened: {_said(error)}"[:300],
            where=catalog.rpartition("@")[2],
            do=_advice(error, "see that it is there and lets you in"),
        ) from error


def _said(error: Exception) -> str:
    """What a catalog says; of an error of a database, without the statement."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}"


def _advice(error: Exception | None, otherwise: str) -> str:
    """What to do: make room, where the disk of metadata or catalog is full."""
    said = getattr(getattr(error, "orig", None), "sqlite_errorname", "")
    return MAKE_ROOM if said == "SQLITE_FULL" or is_full(error) else otherwise


def _loaded(load: Callable[[], Any]) -> Any:  # noqa: ANN401
    """A catalog; asked for three times, since of two that make a new one at once one fails, at each of its two tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            try:
                return load()
            except ValueError:
                raise
            except Exception:  # noqa: BLE001, S112 (the last try tells)
                continue
        return load()
