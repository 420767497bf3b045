"""The readers as Spark calls them, without Spark: what a stream pins and tells, options, files that queues share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from backends.registry import open_store
from backends.s3_options import S3Options
from tests.archive.test_stream_plan import Broker
from tests.e2e.harness import here
from tiered.archive.columns import schema
from tiered.archive.selection import Selection, selection_of
from tiered.archive.source.readers import ArchiveReader
from tiered.archive.source.streaming import TierStreamReader
from tiered.errors import DataError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.archive.conftest import Sealed

ALL = ReadAllAvailable()


class Place:
    """A tier in a folder, which grows, and readers of it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}/tier"
        self.store = open_store(self.url, S3Options())
        self.tier = Broker(self.store)

    def reader(self, **options: str) -> TierStreamReader:
        named = {name.replace("_", "-"): text for name, text in options.items()}
        chosen = {"path": self.url, "cluster": "c", "broker": "b", **named}
        return TierStreamReader(chosen, schema(), Selection())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    from support.journals import PREFIX

    from tiered.plugin import place as places

    monkeypatch.setattr(places, "broker_prefix", lambda _cluster, _broker: PREFIX)
    made = Place(tmp_path)
    yield made
    made.store.close()


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
    assert told["c"]["b"]["topic-ä"]["3"]["offset"] == 2
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


def test_options(place: Place) -> None:
    assert place.reader().getDefaultReadLimit() == ALL
    assert place.reader(max_messages="5").getDefaultReadLimit() == ReadMaxRows(5)
    assert place.reader(max_bytes="6").getDefaultReadLimit() == ReadMaxBytes(6)
    for wrong in (
        {"max_messages": "5", "max_bytes": "6"},
        {"start": "now"},
        {"on_gap": "again"},
        {"on_take_back": "never"},
    ):
        with pytest.raises(InvalidError):
            place.reader(**wrong)


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
