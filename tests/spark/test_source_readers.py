"""The readers as Spark calls them, without Spark: what a stream pins and tells, options, files that queues share."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType
from support.command_line import here
from support.streams import OTHER, Broker, Place, Spark
from support.tiers import QUEUE

from tiered.archive.columns import schema
from tiered.archive.selection import selection_of
from tiered.errors import DataError, InvalidError
from tiered.spark import messages, tier
from tiered.spark.positions import positions_of
from tiered.spark.source import ArchiveReader, ArchiveSource, TierSource, TierStreamReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.archive_fixtures import Sealed


ALL = ReadAllAvailable()


def bodies(reader: TierStreamReader, start: Any, end: Any) -> list[bytes]:
    return [
        body
        for partition in reader.partitions(start, end)
        for rows in reader.read(partition)
        for body in rows.column("body").to_pylist()
    ]


def test_what_is_pinned_stays_so(place: Place) -> None:
    place.tier.add([b"a", b"b"])
    reader = place.reader()
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    place.tier.add([b"c"])
    end = reader.latestOffset(start, ReadMaxRows(1))
    assert bodies(reader, start, end) == [b"a"]
    last = reader.latestOffset(end, ALL)
    assert bodies(reader, end, last) == [b"b"]
    assert reader.latestOffset(last, ALL) is last
    assert reader.partitions(last, last) == []
    told = reader.reportLatestOffset()
    assert told
    assert told["c"]["b"]["topics"]["topic-ä"]["3"]["offset"] == 2
    reader.commit(last)
    reader.stop()
    later = place.reader()
    assert bodies(later, last, later.latestOffset(last, ALL)) == [b"c"]
    later.stop()


def test_the_end_as_a_start(place: Place) -> None:
    place.tier.add([b"a"])
    reader = place.reader(start="latest")
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) is start
    place.tier.add([b"b"])
    assert bodies(reader, start, reader.latestOffset(start, ReadMaxBytes(1))) == [b"b"]
    reader.stop()
    chosen = place.reader(start='{"topic-ä": {"3": 1}}')
    assert bodies(chosen, None, chosen.latestOffset(chosen.initialOffset(), ALL)) == [b"b"]
    chosen.stop()


def test_positions_of_a_tier_that_was_wiped_and_begun_anew_are_refused(place: Place) -> None:
    """The new one has other messages at the same offsets, and more: none of what the stream has passed would be missed."""
    place.tier.add([b"a", b"b"])
    with place.stream() as reader:
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
    for info in [*place.store.list("")]:
        place.store.delete(info.key)
    place.tier = Broker(place.store, writer="00000bad")
    place.tier.add([b"c", b"d", b"e"])
    with place.stream() as reader:
        with pytest.raises(DataError, match="wiped and begun anew"):
            reader.latestOffset(end, ALL)
        with pytest.raises(DataError, match="wiped and begun anew"):
            reader.partitions(start, end)
        assert bodies(reader, None, reader.latestOffset(reader.initialOffset(), ALL)) == [
            b"c",
            b"d",
            b"e",
        ]


def test_what_is_passed_over_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.tier.add([b"a"])
    place.tier.gap(4)
    place.tier.add([b"b"])
    strict, lax = place.reader(), place.reader(on_gap="skip")
    end = strict.latestOffset({}, ALL)
    with pytest.raises(DataError, match="on-gap"):
        strict.latestOffset(end, ALL)
    end = lax.latestOffset({}, ALL)
    assert bodies(lax, {}, end) == [b"a", b"b"]
    assert "topic-ä/3: 4 messages are not there" in caplog.text
    strict.stop()
    lax.stop()


def lost(positions: Any) -> int:
    """How many messages a stream has left out so far, by its positions."""
    return sum(at.lost for at in positions_of(positions).values())


def ninety(place: Place) -> None:
    """Nine segments of ten messages."""
    for number in range(9):
        place.tier.add([b"%d" % (number * 10 + n) for n in range(10)], roll=True)


def test_what_expires_before_a_batch_is_done_again_is_counted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash between the plan of a batch and its end; done again, 60 of its 90 messages are gone."""
    ninety(place)
    with place.stream(on_gap="skip") as planner:
        end = planner.latestOffset(planner.initialOffset(), ALL)
    place.tier.expire(60)
    for _ in range(2):  # a second crash: what is lost counts once
        with place.stream(on_gap="skip") as reader:
            caplog.clear()
            assert len(bodies(reader, {}, end)) == 30
            assert "topic-ä/3: 60 messages of a batch that was planned earlier" in caplog.text
    with place.stream(on_gap="skip") as reader:
        assert len(bodies(reader, {}, end)) == 30
        after = reader.latestOffset(end, ALL)
        assert (lost(end), lost(after)) == (0, 60)
        assert bodies(reader, end, after) == []
        assert reader.latestOffset(after, ALL) is after, "and is said once"


def test_a_batch_that_cannot_be_done_again_as_it_was_fails_and_counts_with_skip(
    place: Place,
) -> None:
    ninety(place)
    with place.stream() as strict:
        end = strict.latestOffset(strict.initialOffset(), ReadMaxRows(50))
        place.tier.expire(20)
        with pytest.raises(DataError, match=r'offset 0 to 50.*"skip"'):
            strict.partitions({}, end)
    with place.stream(on_gap="skip") as lax:
        assert len(bodies(lax, {}, end)) == 30
        last = lax.latestOffset(end, ALL)
        assert (len(bodies(lax, end, last)), lost(last)) == (40, 20)


def test_what_expires_while_a_pinned_end_is_read_is_counted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches of one ``availableNow`` run: what goes after the first one is left out by name."""
    ninety(place)
    with place.stream(on_gap="skip") as lax, place.stream() as strict:
        ends, read = [], []
        for reader in (lax, strict):
            reader.prepareForTriggerAvailableNow()
            start = reader.initialOffset()
            ends.append(reader.latestOffset(start, ReadMaxRows(30)))
            read.append(len(bodies(reader, start, ends[-1])))
        place.tier.expire(60)
        place.tier.add([b"later"], roll=True)
        second = lax.latestOffset(ends[0], ReadMaxRows(30))
        read[0] += len(bodies(lax, ends[0], second))
        assert (read, lost(second)) == ([60, 30], 30)
        assert "topic-ä/3: 30 messages are not there" in caplog.text
        assert lax.latestOffset(second, ReadMaxRows(30)) is second, "the end stays pinned"
        with pytest.raises(DataError, match="offset 30 to 60"):
            strict.latestOffset(ends[1], ReadMaxRows(30))


def test_nothing_behind_a_pinned_end_is_read(place: Place) -> None:
    """Neither what came since, nor a new incarnation of a queue, nor a queue that was not there: a run has an end."""
    place.tier.add([b"a", b"b"])
    with place.stream() as reader:
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        place.tier.add([b"c"])
        place.tier.begin_anew()
        place.tier.add([b"new"])
        place.tier.add([b"x"], queue=OTHER)
        end = reader.latestOffset(start, ALL)
        assert bodies(reader, start, end) == [b"a", b"b"]
        assert reader.latestOffset(end, ALL) is end
    with place.stream() as reader:
        last = reader.latestOffset(end, ALL)
        assert sorted(bodies(reader, end, last)) == [b"c", b"new", b"x"]


def test_what_was_read_before_it_expired_stops_nobody(place: Place) -> None:
    """The last batch of a run is long done; that its messages have expired meanwhile is no gap of the next run."""
    ninety(place)
    with place.stream() as reader:
        end = reader.latestOffset(reader.initialOffset(), ALL)
        assert len(bodies(reader, {}, end)) == 90
    place.tier.expire(80)
    place.tier.add([b"next"])
    with place.stream() as reader:
        after = reader.latestOffset(end, ALL)
        assert (bodies(reader, end, after), lost(after)) == ([b"next"], 0)


def test_a_new_stream_begins_at_the_first_message_that_is_there(place: Place) -> None:
    """Incarnations that have expired, and gaps before the first message, were before its time."""
    place.tier.add([b"a"])
    place.tier.add([b"b"], roll=True)
    place.tier.begin_anew()
    place.tier.gap(3)
    place.tier.add([b"c"], roll=True)
    place.tier.gap(2)
    place.tier.add([b"d"], roll=True)
    place.tier.expire(2, incarnation=0)
    for incarnation, read in ((0, [b"c", b"d"]), (1, [b"d"])):
        if incarnation:
            place.tier.expire(6, incarnation=1)
        with place.stream(on_gap="skip") as reader:
            start = reader.initialOffset()
            (at,) = positions_of(start).values()
            end = reader.latestOffset(start, ALL)
            assert bodies(reader, start, end) == read
            assert (at.incarnation, at.offset) == (1, 6 if incarnation else 3)
            assert lost(end) == (0 if incarnation else 2), "the gap between them"


def test_a_queue_that_is_not_named_begins_at_what_is_there_then(place: Place) -> None:
    ninety(place)
    place.tier.add([b"x"], queue=OTHER)
    place.tier.expire(60)
    with place.stream(start='{"other": {"0": "latest"}}') as reader:
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        assert len(bodies(reader, start, end)) == 30


def test_a_queue_that_a_stream_meets_late_is_read_from_its_beginning_or_counted(
    place: Place,
) -> None:
    place.tier.add([b"x"], queue=OTHER)
    with place.stream(on_gap="skip") as reader:
        start = reader.latestOffset(reader.initialOffset(), ALL)
        assert bodies(reader, {}, start) == [b"x"]
    ninety(place)
    place.tier.expire(60)
    with place.stream() as strict, pytest.raises(DataError, match=r"topic-ä/3 from offset 0 to 60"):
        strict.latestOffset(start, ALL)
    with place.stream(on_gap="skip") as lax:
        end = lax.latestOffset(start, ALL)
        assert (len(bodies(lax, start, end)), lost(end)) == (30, 60)
    with place.stream() as fresh:
        end = fresh.latestOffset(fresh.initialOffset(), ALL)
        assert (len(bodies(fresh, {}, end)), lost(end)) == (31, 0), "a new one begins here"


def test_a_stream_that_began_before_there_was_a_queue_counts_from_the_first_message(
    place: Place,
) -> None:
    with place.stream() as reader:
        start = reader.latestOffset(reader.initialOffset(), ALL)
    ninety(place)
    place.tier.expire(60)
    with place.stream() as strict, pytest.raises(DataError, match="offset 0 to 60"):
        strict.latestOffset(start, ALL)


def test_what_another_process_may_have_left_out_is_in_doubt(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It did a batch again, said in its log what was lost, and died before the next plan could say so, too."""
    ninety(place)
    with place.stream(on_gap="skip") as planner:
        end = planner.latestOffset(planner.initialOffset(), ALL)
    place.tier.expire(60)
    with place.stream(on_gap="skip") as died:
        assert len(bodies(died, {}, end)) == 30
    caplog.clear()
    with place.stream(on_gap="skip") as reader:
        after = reader.latestOffset(end, ALL)
        (at,) = positions_of(after).values()
        assert (at.lost, at.in_doubt) == (0, 60)
        assert "60 messages of the batch before" in caplog.text
        assert reader.latestOffset(after, ALL) is after
    with place.stream(on_gap="skip") as again:
        assert again.latestOffset(after, ALL) is after, "what is settled stays so"


def test_what_expires_after_the_start_was_read_by_the_process_before(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for body in (b"a", b"b", b"c"):
        place.tier.add([body], roll=body != b"a")
    with place.stream(on_gap="skip") as reader:
        last = reader.latestOffset(reader.initialOffset(), ALL)
        assert bodies(reader, {}, last) == [b"a", b"b", b"c"]
    with place.stream(on_gap="skip") as reader:
        assert reader.latestOffset(last, ALL) is last, "all of it is there, so it was read"
        place.tier.expire(2)
        assert reader.latestOffset(last, ALL) is last
        place.tier.add([b"d"])
        later = reader.latestOffset(last, ALL)
        assert [at.in_doubt for at in positions_of(later).values()] == [0]
        assert bodies(reader, last, later) == [b"d"]
    assert not caplog.records


def test_a_batch_is_not_done_again_without_a_queue_that_it_has(place: Place) -> None:
    """Its position would go on, and the queue's messages would be nowhere."""
    place.tier.add([b"a"])
    place.tier.add([b"x"], queue=OTHER)
    with place.stream(on_gap="skip") as planner:
        end = planner.latestOffset(planner.initialOffset(), ALL)
    narrow = selection_of({"topic": OTHER.topic})
    with (
        place.stream(narrow, on_gap="skip") as reader,
        pytest.raises(InvalidError, match="topic-ä/3 of c/b, which the options leave out now"),
    ):
        reader.partitions({}, end)
    with place.stream(narrow) as after:
        assert after.latestOffset(end, ALL) is end, "once it is done, the queue is let alone"
    place.tier.add([b"b"])
    with place.stream() as wide:
        assert bodies(wide, end, wide.latestOffset(end, ALL)) == [b"b"]


def test_a_checkpoint_of_another_tier_is_refused(place: Place) -> None:
    place.tier.add([b"a"])
    place.tier.begin_anew()
    place.tier.add([b"b"])
    with place.stream() as reader:
        end = reader.latestOffset(reader.initialOffset(), ALL)
    history, own = end["c"]["b"]["history"], end["c"]["b"]["topics"]["topic-ä"]["3"]

    def document(queues: Any, broker: str = "b") -> Any:
        return {"c": {broker: {"history": history, "topics": queues}}}

    elsewhere = document({"nobody": {"0": own}})
    later = document({"topic-ä": {"3": own | {"incarnation": 7, "from_incarnation": 7}}})
    for strange in (elsewhere, later):
        for rule in ("fail", "skip"):
            with place.stream(on_gap=rule) as reader:
                with pytest.raises(DataError, match="checkpoint is of another tier"):
                    reader.latestOffset(strange, ALL)
                with pytest.raises(DataError, match="checkpoint is of another tier"):
                    reader.partitions({}, strange)
    other_broker = document({"nobody": {"0": own}}, "x")
    with place.stream() as reader:
        kept = reader.latestOffset(other_broker, ALL)
        assert kept["c"]["x"], "of a broker that the options leave out nothing is said"


@pytest.mark.parametrize("seed", range(25))
def test_each_message_is_read_once_or_counted_whatever_dies(
    seed: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier grows, has gaps, expires and begins anew, at any moment of a stream whose processes die at any moment."""
    rng = random.Random(seed)
    place.in_memory(monkeypatch)
    place.tier.add([b"x"], queue=OTHER)
    expires = rng.choice([0.1, 0.4])

    def event() -> None:
        incarnation = place.tier.journal.state.incarnation(QUEUE)
        what = rng.random()
        if incarnation is None or what < 0.3:
            place.tier.add([b"y"] * rng.randrange(1, 6), roll=rng.random() < 0.7)
        elif what < 0.3 + expires and len(incarnation.segments) > 1:
            place.tier.expire(
                incarnation.segments[rng.randrange(1, len(incarnation.segments))].base_queue_offset
            )
        elif what > 0.97:
            place.tier.begin_anew()
        elif what > 0.9:
            place.tier.gap(rng.randrange(1, 4))

    spark = Spark(place, rng, lambda: event() if rng.random() < 0.6 else None)
    spark.run(0)
    for _ in range(12):
        event()
        spark.run(crash=0.15)
    spark.events = lambda: None
    for _ in range(3):
        spark.run(crash=0)
    told = [row for rows in spark.sink.values() for row in rows]
    assert len(set(told)) == len(told)
    incarnations = place.tier.journal.state.queues[QUEUE]
    all_there_was = 1 + sum(incarnation.commit_offset for incarnation in incarnations)
    positions = positions_of(spark.offsets[-1]).values()
    missed = all_there_was - len(told) - sum(at.lost for at in positions)
    assert 0 <= missed <= sum(at.in_doubt for at in positions)
    assert not missed or spark.is_untold


def test_options(place: Place) -> None:
    assert place.reader().getDefaultReadLimit() == ALL
    assert place.reader(max_messages="5").getDefaultReadLimit() == ReadMaxRows(5)
    assert place.reader(max_bytes="6").getDefaultReadLimit() == ReadMaxBytes(6)
    for wrong in (
        {"max_messages": "5", "max_bytes": "6"},
        {"start": "now"},
        {"on_gap": "again"},
        {"on_truncation": "never"},
    ):
        with pytest.raises(InvalidError):
            place.reader(**wrong)


@pytest.mark.parametrize("wrong", [{"on-bad": "Skip"}, {"partition-bytes": "64m"}])
def test_values_are_looked_at_before_a_worker_has_them(wrong: dict[str, str]) -> None:
    """Of files of an archive beside a tier no worker would look at them at all."""
    (name, value), said = *wrong.items(), f"option {next(iter(wrong))} is"
    source = TierSource({"path": "file:///nowhere", **wrong})
    columns = StructType().add("queue_offset", "long")
    for read in (source.reader, source.streamReader):
        with pytest.raises(InvalidError, match=said):
            read(columns)
    options = {name.replace("-", "_"): value}
    for is_stream in (True, False):
        with pytest.raises(InvalidError, match=said):
            tier(None, "file:///nowhere", is_stream=is_stream, **options)
        with pytest.raises(InvalidError, match=said):
            messages(None, "file:///nowhere", archive="file:///no", is_stream=is_stream, **options)


def test_files_that_queues_share(sealed: Callable[[str], Sealed], archive_url: str) -> None:
    """The source of archives as Spark calls it: of a shared file only the rows of the queues that are wanted."""
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    here("archive", tier.url, "--to", archive_url, "--merge").good()
    topic, messages = max(tier.dump.messages.items(), key=lambda pair: len(pair[1]))
    for queue in sorted({message["queue_id"] for message in messages}):
        options = {"path": archive_url, "topic": topic, "queue": str(queue)}
        narrow = pa.schema([("store_ts", schema().field("store_ts").type)])
        for columns in (schema(), narrow):
            reader = ArchiveReader(options, columns, selection_of(options))
            found = [rows for part in reader.partitions() for rows in reader.read(part)]
            times = [value for rows in found for value in rows.column("store_ts").to_pylist()]
            wanted = [m["store_timestamp_ms"] for m in messages if m["queue_id"] == queue]
            assert [round(time.timestamp() * 1000) for time in times] == wanted
            assert all(rows.schema == columns for rows in found)


def test_a_schema_without_columns_is_refused_since_its_rows_would_be_lost() -> None:
    """Spark would count 0 rows of it, whatever there is."""
    archive, tier = (
        ArchiveSource({"path": "file:///nowhere"}),
        TierSource({"path": "file:///nowhere"}),
    )
    for make in (archive.reader, tier.reader, tier.streamReader):
        with pytest.raises(InvalidError, match="no column is asked for"):
            make(StructType([]))
