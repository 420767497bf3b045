"""Archives of captured stores of Kafka and JoyQueue: plain tools find in the files what consumers were given."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from base64 import b64decode, b64encode
from contextlib import closing
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import kafka_batches as plain
from support.archive_jobs import archive, check, job_context, keys
from support.archive_jobs import rows as archive_rows
from support.command_line import here
from support.kafka_stores import FakeNode
from support.kafka_tiers import add_batches, as_dumped, record_batch
from support.lakes import table_of
from support.tiers import PLACE as BROKER
from support.tiers import TierBuilder

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.api.arrow import KAFKA_COLUMNS
from tiered.api.broker_place import choose_place
from tiered.archive import archive_proof
from tiered.archive.archive_proof import ArchiveProof
from tiered.archive.bodies import PREFIX, BodyColumns, BodyLayout
from tiered.archive.columns import Columns
from tiered.archive.job import JobContext, run_job
from tiered.archive.model import DAY_MS, ArchiveQueue
from tiered.archive.tables import read_archive
from tiered.clock import SystemClock
from tiered.errors import InvalidError
from tiered.format.kafka_batch import HEADER_BYTES, walk_batches
from tiered.format.record_kind import RecordKind, tag_codes
from tiered.local.interface import HoleReason, RecordBatch
from tiered.log.decode import TierBatch
from tiered.log.lineage import Isolation
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
LEVELS = (COMMITTED, UNCOMMITTED)
PLACE = itemgetter("topic", "partition", "offset")
OURS = ("topic", "queue_id", "queue_offset", "msg_key", "keys", "body", "broker", "incarnation")


def consumed(name: str, isolation: str) -> list[dict[str, Any]]:
    """What the node gave a consumer."""
    other = plain.FOLDER / f"{name}.committed.jsonl.gz"
    is_other = isolation == COMMITTED and other.exists()
    return sorted(plain.dump(f"{name}.committed" if is_other else name), key=PLACE)


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The tier of a capture by its name, every segment sealed; made once. Not to be changed."""
    folder, made = tmp_path_factory.mktemp("kafka"), dict[str, str]()

    def tier(name: str) -> str:
        if name not in made:
            source = plain.FOLDER.parent / ("jmq" if name.startswith("j") else "kafka")
            with tarfile.open(source / f"{name}.tar.gz") as files:
                files.extractall(folder, filter="data")
            made[name] = f"file://{folder}/{name}-tier"
            options = ("--to", made[name], "--once", "--seal", "--no-index")
            assert here("attach", folder / name, *options).code in {0, 1}
        return made[name]

    return tier


@dataclass
class Archive:
    tier: str
    url: str

    def run(self, *words: str) -> Any:
        return here("archive", self.tier, "--to", self.url, *words, "--json")

    def rows(self) -> list[dict[str, Any]]:
        """Of all files that lie there, by pyarrow alone."""
        found = []
        for path in sorted(Path(self.url.removeprefix("file://"), "data").rglob("*.parquet")):
            found += pq.ParquetFile(path).read().to_pylist()
        return found

    def check(self, name: str, isolation: str) -> None:
        rows = self.rows()
        dumped = [as_dumped({column: row[column] for column in KAFKA_COLUMNS}) for row in rows]
        assert sorted(dumped, key=PLACE) == consumed(name, isolation)
        for row in rows:
            assert (row["queue_id"], row["queue_offset"]) == (row["partition"], row["offset"])
            assert row["store_ts"].timestamp() * 1000 == pytest.approx(row["timestamp_ms"])
            text = None if row["key"] is None else row["key"].decode()
            assert (row["msg_key"], row["keys"]) == (text, None if text is None else [text])
            assert row["body"] is None


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("name", plain.NAMES)
def test_an_archive_has_what_consumers_got(
    name: str, isolation: str, attached: Callable[[str], str], archive_url: str
) -> None:
    made = Archive(attached(name), archive_url)
    done = made.run("--isolation", isolation).good().document
    assert (done["rows"], done["bad"]) == (len(consumed(name, isolation)), 0)
    made.check(name, isolation)
    assert made.run().good().document["planned"] == 0
    made.run("--verify").good()
    made.run("--merge", "--merge-below", "1GiB").good()
    made.run("--clean", "--grace", "0s", "--apply", "-").good()
    made.check(name, isolation)
    made.run("--verify").good()


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("name", ["k01-basic", "k02-transactions", "k03-compacted-after"])
def test_sql_finds_it_in_kafkas_words(
    name: str, isolation: str, attached: Callable[[str], str], archive_url: str
) -> None:
    made = Archive(attached(name), archive_url)
    made.run("--isolation", isolation).good()
    wanted = consumed(name, isolation)
    found = []
    for topic in sorted({row["topic"] for row in wanted}):
        columns = (
            'topic, partition, "offset", timestamp_ms, timestamp_type, to_base64(key) AS key_base64'
        )
        headers = "list_transform(headers, lambda h: [h.name, to_base64(h.value)]) AS headers"
        more = "to_base64(value) AS value_base64, leader_epoch"
        question = f'SELECT {columns}, {more}, {headers} FROM "{topic}"'
        found += here("sql", archive_url, question, "--json").good().document["rows"]
    assert sorted(found, key=PLACE) == wanted


def test_keys_are_found_in_it(attached: Callable[[str], str], archive_url: str) -> None:
    made, name = Archive(attached("k02-transactions"), archive_url), "k02-transactions"
    made.run().good()
    wanted = consumed(name, COMMITTED)
    key = next(row["key_base64"] for row in wanted if row["key_base64"] and row["topic"] == "txn")
    mine = [row for row in wanted if (row["topic"], row["key_base64"]) == ("txn", key)]
    found = here("query", archive_url, "txn", "--key", b64decode(key).decode(), "--count", 100)
    assert sorted(found.good().rows, key=PLACE) == mine
    made.run("--key-index").good()
    found = here("query", archive_url, "txn", "--key", b64decode(key).decode(), "--count", 100)
    assert sorted(found.good().rows, key=PLACE) == mine


def test_an_archive_keeps_its_isolation(attached: Callable[[str], str], archive_url: str) -> None:
    made = Archive(attached("k02-transactions"), archive_url)
    made.run("--isolation", UNCOMMITTED, "--max-bytes", "1").good()
    ran = made.run("--isolation", COMMITTED)
    assert ran.code != 0
    assert "read_uncommitted" in ran.err
    made.run().good()
    made.check("k02-transactions", UNCOMMITTED)


def test_it_ends_at_the_last_stable_offset(
    attached: Callable[[str], str], archive_url: str
) -> None:
    name = "k02-transactions"
    made = Archive(attached(name), archive_url)
    made.run().good()
    with closing(open_store(archive_url, S3Options())) as store:
        state = read_archive(store)
    said = map(json.loads, (plain.FOLDER / f"{name}.offsets.jsonl").read_text().splitlines())
    stable = {
        (row["topic"], row["partition"]): row["last_stable_offset"]
        for row in said
        if not row["topic"].startswith("__")
    }
    ends = {
        (queue.topic, queue.queue_id): max(one.end for one in state.queues[queue])
        for queue in state.queues
    }
    assert ends == stable
    for _, one in state.queues.each():  # every offset is a row, or a hole that is explained
        assert one.rows + one.holes == one.end - one.start


@pytest.mark.parametrize("isolation", LEVELS)
def test_lost_files_are_made_again(
    isolation: str, attached: Callable[[str], str], archive_url: str
) -> None:
    name = "k02-transactions"
    made = Archive(attached(name), archive_url)
    made.run("--isolation", isolation, "--raw-records").good()
    root = Path(archive_url.removeprefix("file://"))
    lost = [*root.rglob("*.parquet"), *root.rglob("*.side")]
    before = {path: path.read_bytes() for path in lost}
    for path in lost:
        path.unlink()
    ran = made.run("--repair", "--apply", "-")
    assert ran.good().document["applied"]["made"] == len(lost), ran
    made.check(name, isolation)
    assert all(path.read_bytes() == data for path, data in before.items() if path.suffix == ".side")
    made.run("--verify").good()


@pytest.mark.parametrize("name", ["k02-transactions-39", "k03-compacted-after"])
def test_the_tier_gives_up_what_is_archived(name: str, archive_url: str, tmp_path: Path) -> None:
    with tarfile.open(plain.FOLDER / f"{name}.tar.gz") as files:
        files.extractall(tmp_path, filter="data")
    tier = f"file://{tmp_path}/tier"
    here("attach", tmp_path / name, "--to", tier, "--once", "--seal", "--no-index").good()
    made = Archive(tier, archive_url)
    made.run().good()
    options = ("--ttl", "1ms", "--archived", "--archive", archive_url, "--json")
    planned = here("expire", tier, *options).good().document
    topics = {row["topic"] for row in consumed(name, COMMITTED)}
    if name.startswith("k03"):  # of k02 each queue has a transaction that is open
        assert {step["topic"] for step in planned["steps"]} == topics
    else:
        assert {step["topic"] for step in planned["steps"]} < topics


# -- batches made by hand --------------------------------------------------------------------------

QUEUE = MessageQueue("t", 0)


def batches(*made: bytes, counts: list[int]) -> TierBatch:
    """Batches one behind the other, each of so many offsets."""
    starts = np.cumsum([0, *map(len, made)])[:-1]
    count = sum(counts)
    codes = tag_codes(RecordKind.KAFKA, np.zeros(count, np.int64))
    sizes = np.repeat(np.array([len(one) for one in made], np.int32), counts)
    none = np.full(count, -1, np.int64)
    positions = np.repeat(starts, counts).astype(np.int64)
    data = b"".join(made)
    records = RecordBatch(QUEUE, QueueOffset(0), data, positions, sizes, codes, none, none)
    return TierBatch(records, LogOffset(0))


def columns() -> Columns:
    return Columns(ArchiveQueue("c", "b", "t", 0, 0), BodyLayout(is_kafka=True))


def records(*pairs: tuple[bytes | None, bytes | None], first: int) -> bytes:
    section = plain.section([(at, at, key, value, ()) for at, (key, value) in enumerate(pairs)])
    return plain.batch(section, len(pairs), base_offset=first)


def test_keys_are_text_where_they_are_utf8_and_a_tombstone_stays_one() -> None:
    made = records((b"one two", b"1"), (b"\xff", None), (None, b""), ("ü".encode(), b"4"), first=0)
    ((rows,), aside) = columns().make(batches(made, counts=[4]))
    assert not aside
    assert rows.column("msg_key").to_pylist() == ["one two", None, None, "ü"]
    assert rows.column("keys").to_pylist() == [["one two"], None, None, ["ü"]]
    assert rows.column("key").to_pylist() == [b"one two", b"\xff", None, "ü".encode()]
    assert rows.column("value").to_pylist() == [b"1", None, b"", b"4"]


def test_a_batch_that_cannot_be_unpacked_costs_itself_alone() -> None:
    sound = [records((b"k", b"v"), (b"k", b"w"), first=first) for first in (0, 2, 6)]
    bad = plain.batch(sound[0][HEADER_BYTES:], 1, base_offset=4, last_offset_delta=1)
    rows, aside = columns().make(batches(sound[0], sound[1], bad, sound[2], counts=[2, 2, 2, 2]))
    offsets = [offset for some in rows for offset in some.column("offset").to_pylist()]
    assert offsets == [0, 1, 2, 3, 6, 7]
    assert [(one.queue_offset, one.record) for one in aside] == [(4, bad), (5, b"")]
    assert all("damaged" in one.reason for one in aside)


def test_values_become_columns_and_tombstones_are_no_misfits() -> None:
    body = BodyColumns("json", "n BIGINT")
    layout = BodyLayout(body, 1, is_kafka=True)
    made = records((b"a", b'{"n": 1}'), (b"b", None), (b"c", b"no object"), first=0)
    rows, aside = Columns(ArchiveQueue("c", "b", "t", 0, 0), layout).make(batches(made, counts=[3]))
    assert [row for some in rows for row in some.column(f"{PREFIX}n").to_pylist()] == [
        1,
        None,
        None,
    ]
    assert [(one.queue_offset, one.has_row) for one in aside] == [(2, True)]


def test_what_the_cleaner_took_is_a_hole() -> None:
    made = plain.batch(records((b"k", b"v"), first=0)[HEADER_BYTES:], 1, last_offset_delta=2)
    ((rows,), aside) = columns().make(batches(made, counts=[3]))
    assert rows.column("offset").to_pylist() == [0]
    reason = f"hole: {HoleReason.COMPACTED.name.lower()}"
    assert [(one.queue_offset, one.reason, one.record) for one in aside] == [
        (1, reason, None),
        (2, reason, None),
    ]


# -- a queue that grows ----------------------------------------------------------------------------


def marker(kind: int, *, first: int, producer: int) -> bytes:
    """The end of a transaction, of transaction version 2."""
    key, value = kind.to_bytes(4, "big"), bytes(6)
    section = plain.section([(0, 0, key, value, ())])
    return plain.batch(section, 1, base_offset=first, attributes=0x30, producer_id=producer)


class Queue:
    """A queue of Kafka's in a tier, a batch a part and a segment each; and the archive of it."""

    def __init__(self) -> None:
        self.builder, self.end = TierBuilder(), 0
        self.builder.say({"do": "meta", "store": {"cluster": "c", "broker": "b", "kind": "kafka"}})
        self.at = job_context(self.builder.store)

    def add(
        self,
        *values: bytes,
        producer: int = -1,
        ends: int | None = None,
        times: tuple[int, ...] = (),
    ) -> None:
        attributes = 0 if producer < 0 else 0x10
        stamps = times or range(len(values))
        pairs = [
            (at, time, b"k", value, ())
            for at, (time, value) in enumerate(zip(stamps, values, strict=True))
        ]
        raw = plain.batch(
            plain.section(pairs),
            len(pairs),
            base_offset=self.end,
            attributes=attributes,
            producer_id=producer,
        )
        if ends is not None:
            raw = marker(ends, first=self.end, producer=producer)
        block = walk_batches(raw, 0, len(raw), size_max=1 << 20)
        add_batches(self.builder, [record_batch(QUEUE, block, self.end)], roll=bool(self.end))
        self.end += len(values) or 1

    def archived(self, isolation: Isolation | None = None) -> list[bytes]:
        """Values of all that is archived, once that is brought up to date."""
        at = replace(self.at, isolation=isolation)
        assert not archive(at).failed
        check(at)
        found = sorted(archive_rows(at), key=itemgetter("queue_offset"))
        return [row["value"] for row in found]


ABORT, COMMIT = 0, 1


@pytest.mark.parametrize("ends", [ABORT, COMMIT])
def test_what_an_open_transaction_holds_up_comes_once_it_is_decided(ends: int) -> None:
    queue = Queue()
    queue.add(b"a", b"b")
    queue.add(b"of 1", producer=1)
    queue.add(b"of 2", producer=2)
    queue.add(b"c")
    queue.add(producer=2, ends=COMMIT)
    queue.add(b"d")
    assert queue.archived() == [b"a", b"b"]
    queue.add(producer=1, ends=ends)
    queue.add(b"open")
    mine = [b"of 1"] if ends == COMMIT else []
    assert queue.archived() == [b"a", b"b", *mine, b"of 2", b"c", b"d"]
    queue.add(b"e")
    with pytest.raises(InvalidError, match="read_committed"):
        queue.archived(Isolation.UNCOMMITTED)


def test_producers_may_say_any_time() -> None:
    times = (DAY_MS, 0, 2**63 - 1, DAY_MS + 1, -(2**63), -1, 1)
    queue = Queue()
    queue.add(*(b"%d" % time for time in times), times=times)
    queue.add(b"open")
    assert queue.archived() == [b"%d" % time for time in times]
    rows = sorted(archive_rows(queue.at), key=itemgetter("queue_offset"))
    assert [row["timestamp_ms"] for row in rows] == [*times]
    assert [row["store_ts"].year for row in rows] == [1970, 1970, 9999, 1970, 1969, 1969, 1970]
    assert len(keys(queue.at)) == 4


def test_any_time_comes_from_a_node_into_tier_and_archive(tmp_path: Path, archive_url: str) -> None:
    node, times = FakeNode(tmp_path / "node"), (-5, 2**63 - 2, 7, -(2**63))
    node.make(QUEUE)
    for time in times:
        node.append(QUEUE, 1, time_ms=time)
    node.stop()
    tier = f"file://{tmp_path}/tier"
    here("attach", tmp_path / "node", "--to", tier, "--once", "--seal", "--no-index").good()
    said = [row["timestamp_ms"] for row in here("cat", tier, "t").good().rows]
    assert said == [*times]
    here("verify", tier, "--deep").good()
    made = Archive(tier, archive_url)
    made.run().good()
    rows = sorted(made.rows(), key=itemgetter("queue_offset"))
    assert [row["timestamp_ms"] for row in rows] == [*times]
    made.run("--verify").good()


def test_without_isolation_only_the_nodes_own_records_are_left_out() -> None:
    queue = Queue()
    queue.add(b"a")
    queue.add(b"of 1", producer=1)
    queue.add(producer=1, ends=ABORT)
    queue.add(b"of 2", producer=2)
    queue.add(b"open")
    assert queue.archived(Isolation.UNCOMMITTED) == [b"a", b"of 1", b"of 2"]


def test_an_archive_with_holes_that_nothing_explains_proves_nothing() -> None:
    queue = Queue()
    queue.add(b"a")
    queue.add(b"of 1", producer=1)
    queue.add(producer=1, ends=ABORT)
    queue.add(b"open")
    queue.archived()
    state = read_archive(queue.at.archive)
    tier = queue.builder.journal.state
    segments = tier.queues[QUEUE][0].segments[:-1]
    proof = ArchiveProof(queue.at.tier, BROKER, queue.at.archive, state, "url")
    assert all(proof.holds(tier, QUEUE, 0, segment) for segment in segments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_proof, "_EXPLAINED", frozenset[str]())
        proof = ArchiveProof(queue.at.tier, BROKER, queue.at.archive, state, "url")
        held = [proof.holds(tier, QUEUE, 0, segment) for segment in segments]
    assert held == [True, False, False]


def test_a_table_of_iceberg_has_kafkas_columns(
    attached: Callable[[str], str], archive_url: str, tmp_path: Path
) -> None:
    name, catalog = "k02-transactions", f"sqlite:///{tmp_path}/catalog.db"
    made = Archive(attached(name), archive_url)
    made.run("--publish", f"iceberg:{catalog}#lake").good()
    rows = table_of(catalog, "txn").scan(selected_fields=KAFKA_COLUMNS).to_arrow().to_pylist()
    wanted = [row for row in consumed(name, COMMITTED) if row["topic"] == "txn"]
    assert sorted(map(as_dumped, rows), key=PLACE) == wanted


# -- JoyQueue --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["j01-basic", "j02-crash", "j02-crash-torn"])
def test_joyqueues_messages(name: str, attached: Callable[[str], str], archive_url: str) -> None:
    made = Archive(attached(name), archive_url)
    made.run("--raw-records").good()
    with gzip.open(plain.FOLDER.parent / "jmq" / f"{name}.jsonl.gz", "rt") as lines:
        wanted = [row for row in map(json.loads, lines) if row["committed"]]
    rows = made.rows()
    found = [
        (
            row["topic"],
            row["queue_id"],
            row["queue_offset"],
            b64encode(row["body"]).decode(),
            row["msg_key"] or "",
            round(row["store_ts"].timestamp() * 1000),
        )
        for row in rows
    ]
    names = ("topic", "partition", "index", "body_base64", "business_id", "store_time_ms")
    assert sorted(found) == sorted(
        tuple("" if row[name] is None else row[name] for name in names) for row in wanted
    )
    assert all(row["record"] for row in rows if row["queue_offset"] == 0)
    made.run("--verify").good()
    key = next(row["business_id"] for row in wanted if row["business_id"])
    topic = next(row["topic"] for row in wanted if row["business_id"] == key)
    hits = here("query", archive_url, topic, "--key", key, "--count", 1000).good().rows
    mine = [row["index"] for row in wanted if (row["topic"], row["business_id"]) == (topic, key)]
    assert sorted(row["index"] for row in hits) == sorted(mine)


def test_newest_rows_of_a_cleaned_topic_are_those_that_were_not_deleted(
    attached: Callable[[str], str], archive_url: str
) -> None:
    name = "k03-compacted-after2"
    made = Archive(attached(name), archive_url)
    made.run().good()
    words = ("--archive", archive_url, "--topic", "compact", "--dirty-ratio", "0", "--apply", "-")
    here("compact", made.tier, *words).good()
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    for row in consumed(name, COMMITTED):
        if row["topic"] == "compact":
            newest[row["partition"], row["key_base64"]] = row
    question = 'SELECT partition, "offset" FROM "compact$latest"'
    found = here("sql", archive_url, question, "--json").good().document["rows"]
    wanted = [(at, row["offset"]) for (at, _), row in newest.items() if row["value_base64"]]
    assert sorted((row["partition"], row["offset"]) for row in found) == sorted(wanted)


# -- Spark -----------------------------------------------------------------------------------------


def by_spark(frame: Any) -> list[dict[str, Any]]:
    rows = frame.select(*KAFKA_COLUMNS).toArrow().to_pylist()
    return sorted(map(as_dumped, rows), key=PLACE)


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("k02-transactions", marks=pytest.mark.slow),
        pytest.param("k01-basic", marks=pytest.mark.slow),
        pytest.param("k03-compacted-after", marks=pytest.mark.slow),
    ],
)
def test_spark_finds_it(  # noqa: PLR0917 (fixtures)
    name: str,
    isolation: str,
    attached: Callable[[str], str],
    archive_url: str,
    tmp_path: Path,
    session: Any,
) -> None:
    from tiered import spark
    from tiered.spark.source import register

    register(session)
    made, wanted = Archive(attached(name), archive_url), consumed(name, isolation)
    made.run("--isolation", isolation).good()
    source = session.read.format("tieredmq").option("isolation", isolation)
    assert by_spark(source.load(made.tier)) == wanted
    assert by_spark(source.load(archive_url)) == wanted
    assert by_spark(spark.archive(session, archive_url)) == wanted
    assert by_spark(spark.tier(session, made.tier, isolation=isolation)) == wanted
    assert by_spark(spark.messages(session, made.tier, archive=archive_url)) == wanted
    other = next(level for level in LEVELS if level != isolation)
    for fails in (
        lambda: by_spark(source.option("isolation", other).load(archive_url)),
        lambda: spark.archive(session, archive_url, isolation=other),
        lambda: spark.messages(session, made.tier, archive=archive_url, isolation=other),
    ):
        with pytest.raises(Exception, match=isolation):
            fails()
    stream = spark.tier(session, made.tier, is_stream=True, isolation=isolation)
    stream = stream.select(*KAFKA_COLUMNS).writeStream.format("parquet")
    stream = stream.option("checkpointLocation", str(tmp_path / "check"))
    stream.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    assert by_spark(session.read.parquet(str(tmp_path / "out"))) == wanted


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_makes_the_same_archive(
    attached: Callable[[str], str], archive_url: str, session: Any
) -> None:
    from tiered.spark.driver import SparkOrder, spark_engine

    name = "k02-transactions"
    made = Archive(attached(name), archive_url)
    source, target = open_store(made.tier, S3Options()), open_store(archive_url, S3Options())
    with closing(source), closing(target):
        place = choose_place(source, None, None)
        order = SparkOrder(made.tier, place.prefix, archive_url, S3Options())
        at = JobContext(source, place, target, target, SystemClock(), random.Random(1))
        at = replace(at, isolation=Isolation.UNCOMMITTED)
        assert not run_job(at, spark_engine(session, order)).failed
    made.check(name, UNCOMMITTED)
    made.run("--verify").good()
