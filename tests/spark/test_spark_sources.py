"""Spark reads every captured store, from an archive and from its tier, on a folder and on S3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, tiers
from support.archive_rows import java_rows, rows_of, said_by_archive
from support.command_line import here
from support.servers import use_server
from support.streams import Broker
from support.tiers import QUEUE

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.selection import Selection
from tiered.keys import broker_prefix
from tiered.spark import archive, messages
from tiered.spark import tier as read_here
from tiered.spark.frames import file_uris
from tiered.spark.source import register

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.archive_fixtures import Sealed
    from support.servers import S3Server
    from support.shop import Shop

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
ORDER = ["topic", "queue_id", "queue_offset"]


@pytest.mark.parametrize("name", captures.NAMES)
def test_every_capture(
    name: str, sealed: Callable[[str], Sealed], archive_url: str, session: Any
) -> None:
    tier = sealed(name)
    here("archive", tier.url, "--to", archive_url).good()
    register(session)
    wanted = java_rows(tier)
    for url in (archive_url, tier.url):
        table = session.read.format("tieredmq").load(url).orderBy(ORDER).toArrow()
        assert [said_by_archive(row) for row in rows_of(table)] == wanted
    both = messages(session, tier.url, archive=archive_url)
    for frame in (archive(session, archive_url), both, read_here(session, tier.url)):
        table = frame.orderBy(ORDER).toArrow()
        assert [said_by_archive(row) for row in rows_of(table)] == wanted
    store = open_store(archive_url, S3Options())
    uris = file_uris(store)
    store.close()
    table = session.read.parquet(*uris).orderBy(ORDER).toArrow()
    assert [said_by_archive(row) for row in rows_of(table)] == wanted
    hive = session.read.parquet(archive_url).groupBy("date").count().collect()
    assert sum(row["count"] for row in hive) == len(wanted), "as a reader of directories"


def test_on_a_server(
    ministack: S3Server,
    stores: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    session: Any,
) -> None:
    use_server(ministack, monkeypatch)
    tier, archive = (f"s3://{ministack.bucket()}/{name}" for name in ("tier", "parquet"))
    here("attach", stores("s01-basic"), "--to", tier, "--once", "--seal").good()
    here("archive", tier, "--to", archive).good()
    register(session)
    found = [
        session.read.format("tieredmq").load(url).orderBy(ORDER).toArrow()
        for url in (tier, archive)
    ]
    assert found[0].num_rows == captures.captured("s01-basic").count
    assert found[0].equals(found[1])


def test_filters_of_queries_of_one_frame_are_each_their_own(
    sealed: Callable[[str], Sealed], archive_url: str, session: Any
) -> None:
    tier = sealed("s01-basic")
    here("archive", tier.url, "--to", archive_url).good()
    register(session)
    messages = tier.dump.messages["orders"]
    chosen = messages[len(messages) // 2]
    conditions = {
        "queue_id = 1": lambda m: m["queue_id"] == 1,
        f"queue_offset BETWEEN 5 AND {9}": lambda m: 5 <= m["queue_offset"] <= 9,
        "tag IN ('paid', 'TagA')": lambda m: m["tags"] in {"paid", "TagA"},
        "tag IS NULL": lambda m: m["tags"] is None,
        f"store_ts >= timestamp_millis({chosen['store_timestamp_ms']})": lambda m: (
            m["store_timestamp_ms"] >= chosen["store_timestamp_ms"]
        ),
        f"uniq_key = '{chosen['properties']['UNIQ_KEY']}'": lambda m: (
            m["properties"].get("UNIQ_KEY") == chosen["properties"]["UNIQ_KEY"]
        ),
        "queue_id = 1 OR queue_offset < 3": lambda m: m["queue_id"] == 1 or m["queue_offset"] < 3,
    }
    for handing_down in ("true", "false"):
        session.conf.set(PUSHDOWN, handing_down)
        for url in (archive_url, tier.url):
            frame = session.read.format("tieredmq").option("topic", "orders").load(url)
            for condition, holds in conditions.items():
                assert frame.where(condition).count() == sum(map(holds, messages)), condition
            assert frame.count() == len(messages), "after queries of parts of it"
            few, others = frame.where("queue_id = 1"), frame.where("queue_id <> 1")
            assert few.union(others).count() == len(messages)
            keys = ["queue_id", "queue_offset"]
            assert few.join(frame, keys).count() == few.count() > 0
            assert frame.limit(3).count() == len(frame.take(3)) == 3
            assert frame.select("queue_offset").distinct().count() > 3
            kept = frame.cache()
            assert kept.where("queue_id = 1").count() == few.count()
            assert kept.count() == len(messages)
            kept.unpersist()
    session.conf.unset(PUSHDOWN)
    for url in (archive_url, tier.url):
        keyed = next(m for m in messages if m["keys"])
        key = keyed["keys"].split()[0]
        source = session.read.format("tieredmq").option("topic", "orders").option("key", key)
        wanted = [m for m in messages if key in (m["keys"] or "").split()]
        assert source.load(url).count() == len(wanted) > 0


def test_a_stream_over_many_starts(
    stores: Callable[[str], Any], tmp_path: Path, session: Any
) -> None:
    """One topic, then all: to the stream the others are new. Then it is started again with other limits."""
    url, store = f"file://{tmp_path}/tier", stores("s01-basic")
    here("attach", store, "--to", url, "--once", *command_line.SMALL).good()
    register(session)
    out = tmp_path / "out"
    options = [("topic", "orders"), ("max-bytes", "400000"), ("partition-bytes", "1000")]
    for name, value in options:
        query = (
            session.readStream.format("tieredmq")
            .option(name, value)
            .load(url)
            .writeStream.option("checkpointLocation", f"{tmp_path}/checkpoint")
            .trigger(availableNow=True)
            .start(str(out), "parquet")
        )
        query.awaitTermination()
    found = session.read.parquet(str(out)).orderBy(ORDER).toArrow()
    dump = captures.captured("s01-basic")
    assert found.num_rows == dump.count
    wanted = [m["queue_offset"] for topic in sorted(dump.messages) for m in dump.messages[topic]]
    assert found.column("queue_offset").to_pylist() == wanted


class OwnTier:
    """A tier under a broker's own prefix, which Spark's processes find by its URL alone; and streams of it."""

    def __init__(self, session: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers, "PREFIX", broker_prefix("c", "b"))
        register(session)
        self.session, self.folder, self.url = session, folder, f"file://{folder}/tier"
        self.tier = Broker(open_store(self.url, S3Options()))

    def run(self, sink: Callable[[Any, int], None], **options: str) -> Any:
        """A run of the stream to what there is; the query."""
        reader = self.session.readStream.format("rmq_tier").option("cluster", "c")
        for name, text in options.items():
            reader = reader.option(name.replace("_", "-"), text)
        writer = reader.load(self.url).writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", f"{self.folder}/checkpoint")
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    def rows(self, **options: str) -> tuple[list[int], Any]:
        """Offsets that a run reads, and the position behind it."""
        read: list[int] = []
        query = self.run(
            lambda frame, _: read.extend(row[0] for row in frame.select("queue_offset").collect()),
            **options,
        )
        end = json.loads(query.lastProgress["sources"][0]["endOffset"])
        return read, end["c"]["b"]["topics"][QUEUE.topic][str(QUEUE.queue_id)]


def test_a_batch_done_again_counts_what_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    """A sink fails in the first batch; meanwhile 60 of its 90 messages expire, and the next run says so by itself."""
    own = OwnTier(session, tmp_path, monkeypatch)
    for number in range(9):
        own.tier.add([b"%d" % (number * 10 + n) for n in range(10)], roll=True)

    def fails(_frame: Any, _number: int) -> None:
        raise RuntimeError("the sink is full")

    with pytest.raises(Exception, match="the sink is full"):
        own.run(fails, on_gap="skip")
    own.tier.expire(60)
    with pytest.raises(Exception, match="60 of its messages have expired since"):
        own.rows(on_gap="fail")
    read, position = own.rows(on_gap="skip")
    assert sorted(read) == list(range(60, 90))
    assert (position["offset"], position["lost"], position["in_doubt"]) == (90, 60, 0)
    own.tier.add([b"90"])
    read, position = own.rows(on_gap="skip")
    assert (read, position["lost"]) == ([90], 60)


def test_where_a_stream_began_is_kept_when_nothing_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: Any
) -> None:
    own = OwnTier(session, tmp_path, monkeypatch)
    own.tier.add([b"before"])
    read, _ = own.rows(start="latest")
    assert read == []
    own.tier.add([b"a", b"b"])
    read, position = own.rows(start="latest")
    assert (sorted(read), position["lost"]) == ([1, 2], 0)


def test_an_archive_is_no_stream(
    sealed: Callable[[str], Sealed], archive_url: str, session: Any
) -> None:
    here("archive", sealed("s04-batch-compress").url, "--to", archive_url).good()
    register(session)
    with pytest.raises(Exception, match="an archive is no stream"):
        session.readStream.format("tieredmq").load(archive_url).writeStream.format(
            "noop"
        ).start().processAllAvailable()


def test_nothing_is_wanted(sealed: Callable[[str], Sealed], session: Any) -> None:
    register(session)
    assert Selection().columns == ()
    source = session.read.format("rmq_tier").option("from-offset", "1000000")
    assert source.load(sealed("s04-batch-compress").url).count() == 0


def test_decoded_bodies(shop: Shop, archive_url: str, session: Any) -> None:
    """One topic has its own columns; a file without one has null there."""
    here("archive", shop.tier, "--to", archive_url, "--body", "json").good()
    register(session)
    orders = session.read.format("tieredmq").option("topic", "orders").load(archive_url)
    assert {"value_amount", "value_state", "body_error"} < set(orders.columns)
    amounts = [row["value_amount"] for row in orders.select("value_amount").collect()]
    wanted = [json.loads(sent.message.body)["amount"] for sent in shop.of("orders")]
    assert sorted(amounts) == sorted(wanted)
    asked = session.read.format("rmq_archive").schema("value_amount long, value_state string")
    both = asked.load(archive_url)  # payments have no state
    states = sum("state" in json.loads(sent.message.body) for sent in shop.sent)
    assert both.where("value_state IS NOT NULL").count() == states < both.count()
    asked = session.read.format("rmq_archive").schema("value_amout long")
    with pytest.raises(Exception, match="did you mean value_amount"):
        asked.load(archive_url).count()
