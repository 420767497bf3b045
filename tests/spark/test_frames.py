"""Frames of ``tiered.spark``: Spark reads an archive by itself, and an archive and its tier as one."""

from __future__ import annotations

import datetime as dt
import random
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import keyed, tiers
from support.archive_merges import merged
from support.archive_rows import files as files_of
from support.archives_made import make_archive
from support.command_line import here
from support.keyed import Mail
from support.streams import ORDERS, Row, Shop

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.selection import Selection
from tiered.archive.tables import open_parquet, plan_files, read_archive
from tiered.errors import DataError, InvalidError
from tiered.keys import broker_prefix
from tiered.spark import archive, frames, messages, report, tier
from tiered.spark.frames import _prove_end, _start_of, _text, covering, require_reach

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backends.base import ObjectStore


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(tiers, "PREFIX", broker_prefix("c", "b"))
    made = Shop(tmp_path)
    for number in range(4):
        made.add(*(b"%d" % (number * 20 + n) for n in range(20)))
    made.run()
    yield made
    for store in made.stores:
        store.close()


def rows_of(frame: Any) -> list[Row]:
    found = frame.select("queue_id", "queue_offset", "body").collect()
    return sorted((row[0], row[1], bytes(row[2])) for row in found)


def read_by(frame: Any) -> list[str]:
    return sorted(unquote(uri).removeprefix("file://") for uri in frame.inputFiles())


def plan_of(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_an_archive_is_read_as_spark_reads_parquet(shop: Shop, session: Any) -> None:
    orders = archive(session, shop.archive, "orders")
    archived = [row for row in shop.wanted() if row[1] < 60]
    assert rows_of(orders) == archived
    narrow = orders.where("tag = 'a' AND queue_offset >= 5").select("queue_offset")
    said = plan_of(narrow)
    assert "Batched: true" in said, "vectors, not rows"
    (schema,) = re.findall(r"ReadSchema: struct<([^>]*)>", said)
    assert schema == "queue_offset:bigint,tag:string", "no other column is read"
    for pushed in ("IsNotNull(tag)", "EqualTo(tag,a)", "GreaterThanOrEqual(queue_offset,5)"):
        assert pushed in said
    assert "Batched: true" in plan_of(orders), "with lists and maps, too"
    assert "ReadSchema: struct<>" in plan_of(orders.groupBy().count())
    assert narrow.count() == sum(row[1] >= 5 for row in archived)
    some = archive(session, shop.archive, queue=1, from_offset=10, until_offset=20)
    assert rows_of(some) == [row for row in archived if row[0] == 1 and 10 <= row[1] < 20]
    day = dt.datetime(2023, 11, 14, tzinfo=dt.UTC)
    until = archive(session, shop.archive, ["orders"], from_=day, until=tiers.TIME_MS + 7)
    assert rows_of(until) == [row for row in archived if row[1] < 7]
    nothing = archive(session, shop.archive, "orders", key="nope")
    assert nothing.count() == 0
    assert nothing.columns == orders.columns
    for wrong, said in (
        ({"topic": "nope"}, "no topic nope"),
        ({"archve": "x"}, "no option archve"),
    ):
        with pytest.raises(InvalidError, match=said):
            archive(session, shop.archive, **wrong)


KEYS = st.sets(
    st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("ef")).map("/".join)
)


@given(KEYS, KEYS)
def test_paths_cover_exactly_what_is_wanted(wanted: set[str], others: set[str]) -> None:
    paths = covering(wanted | others, sorted(wanted))
    found = {key for key in wanted | others if any(key.startswith(path) for path in paths)}
    assert found == wanted
    assert len(set(paths)) == len(paths)
    assert covering(wanted, sorted(wanted)) == ([""] if wanted else [])


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_many_files_are_looked_at_by_their_folders(tmp_path: Path, session: Any) -> None:
    """A task for each file is what a list of them costs; and what the log does not name is not read."""
    folder = tmp_path / "a {b} 100%"
    url = folder.as_uri()
    store = open_store(url, S3Options())
    make_archive(store, files=frames._PATHS_MAX + 1, rows=2, rng=random.Random(2))
    jobs = session.sparkContext.statusTracker()
    before = len(jobs.getJobIdsForGroup())
    orders = archive(session, url, "orders")
    files = sorted(folder.glob("**/*.parquet"))
    named = [str(path) for path in files]
    assert len(jobs.getJobIdsForGroup()) == before
    assert read_by(orders) == named
    assert orders.count() == 2 * len(named)
    one = files[0]
    (one.parent / "killed.parquet").write_bytes(one.read_bytes())
    beside = one.parent.with_name("date=2031-01-01") / "unfinished.parquet"
    beside.parent.mkdir()
    beside.write_bytes(b"")
    again = archive(session, url, "orders")
    assert read_by(again) == named
    assert sorted(again.columns) == sorted(orders.columns)
    assert again.count() == 2 * len(named)
    store.close()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_both_as_one_frame(shop: Shop, session: Any) -> None:
    every = messages(session, shop.url, "orders", archive=shop.archive)
    assert rows_of(every) == shop.wanted()
    assert every.count() == len(shop.truth)
    narrow = messages(session, shop.url, archive=shop.archive, columns=["queue_offset", "queue_id"])
    assert narrow.columns == ["queue_offset", "queue_id"]
    said = plan_of(every.where("queue_id = 1").select("queue_offset"))
    assert "EqualTo(queue_id,1)" in said
    assert re.findall(r"ReadSchema: struct<([^>]*)>", said) == ["queue_id:int,queue_offset:bigint"]
    before, recent = shop.wanted(), tier(session, shop.url, "orders")
    shop.add(b"later")
    shop.run()
    assert rows_of(every) == before, (
        "a frame is fixed; what it reads in the tier may be archived since"
    )
    assert rows_of(recent) == before, "as it was made, not as it was first read"
    shop.add(b"still later")
    assert rows_of(recent.where("queue_offset >= 0")) == before
    again = messages(session, shop.url, "orders", archive=shop.archive)
    assert rows_of(again) == shop.wanted()
    assert rows_of(tier(session, shop.url, "orders")) == shop.wanted()
    with pytest.raises(InvalidError, match="an archive, and no tier"):
        messages(session, shop.archive, archive=shop.archive)
    with pytest.raises(InvalidError, match="an archive, and no tier"):
        tier(session, shop.archive)
    for name in ("archive", "pinned"):
        with pytest.raises(InvalidError, match=f"no option {name}"):
            tier(session, shop.url, **{name: shop.archive})
    for topics in ("orders,nope", "nope"):
        with pytest.raises(InvalidError, match="no topic nope"):
            messages(session, shop.url, topics, archive=shop.archive)
    with pytest.raises(InvalidError, match="did you mean queue_offset"):
        messages(session, shop.url, archive=shop.archive, columns=["queue_ofset"])


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_rows_that_do_not_count_of_a_file_that_queues_share(shop: Shop, session: Any) -> None:
    """The broker took an end of one queue back; its rows lie between those of the other."""
    (file,) = files_of(shop.archive)
    shop.truncate(1, 30)
    shop.add(b"new", b"newer")
    every = messages(session, shop.url, "orders", archive=shop.archive)
    assert rows_of(every) == shop.wanted()
    shop.run()
    assert rows_of(messages(session, shop.url, archive=shop.archive)) == shop.wanted()
    assert file.exists(), "until `--clean`, for those who read it"


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_brokers_of_one_name_in_two_clusters(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has truncated of its archived messages costs the other none."""
    shops = []
    for cluster, end in (("c", 30), ("d", 45)):
        monkeypatch.setattr(tiers, "PREFIX", broker_prefix(cluster, "b"))
        shops.append(one := Shop(tmp_path, cluster))
        for number in range(4):
            one.add(*(b"%s%d" % (cluster.encode(), number * 20 + n) for n in range(20)))
        one.run()
        one.truncate(1, end)
    every = messages(session, shops[0].url, archive=shops[0].archive)
    assert rows_of(every) == sorted(row for one in shops for row in one.wanted())
    for store in (store for one in shops for store in one.stores):
        store.close()


def streamed(shop: Shop, session: Any, folder: Path) -> list[int]:
    """Start a stream of both, and run it until it has read what is there; rows of each batch."""
    frame = messages(
        session, shop.url, archive=shop.archive, is_stream=True, maxOffsetsPerTrigger=50
    )
    query = (
        frame.writeStream.option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start(f"{folder}/out", "parquet")
    )
    query.awaitTermination()
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_a_stream_of_both_beside_compaction(
    shop: Shop, tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over restarts: what is gone before it comes by has no rows, what is left comes once, and nothing twice."""
    monkeypatch.setattr(keyed, "PREFIX", broker_prefix("c", "b"))
    broker, queue = keyed.KeyedTier(shop.stores[0], writer="0badbeef"), ORDERS[0]

    def post(*names: str) -> None:
        for name in names:
            mails = [Mail((key,), body=f"{name}{key}".encode()) for key in "abcab"]
            broker.post(queue, mails, roll=True)
        broker.post(queue, [Mail(("c",), body=f"{name}-open".encode())], roll=True)

    def compact() -> int:
        words = ("compact", shop.url, "--topic", "orders", "--dirty-ratio", "0", "--apply", "-")
        here(*words).good()
        broker.journal.catch_up()
        return sum(incarnation.parts().holes for incarnation in broker.journal.state.queues[queue])

    post("A", "B")
    assert sum(streamed(shop, session, tmp_path)) == 160 + 11
    post("D", "E")
    gone = compact()
    assert gone > 0
    told = streamed(shop, session, tmp_path)
    assert 0 < sum(told) < 11, "of D and E that is told which is left"
    compact()
    assert streamed(shop, session, tmp_path) == []
    found = rows_of(session.read.parquet(f"{tmp_path}/out"))
    assert len({row[:2] for row in found}) == len(found)
    left = rows_of(tier(session, shop.url, "orders"))
    assert set(left) <= set(found)
    texts = [body.decode() for _, _, body in found]
    assert [text for text in texts if text[0] in "AB"] == [
        *("Aa", "Ab", "Ac", "Aa", "Ab", "Ba", "Bb", "Bc", "Ba", "Bb", "B-open"),
    ]
    assert [text for text in texts if text[0] in "DE"] == ["Ec", "Ea", "Eb", "E-open"]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_a_stream_of_both_over_restarts(shop: Shop, tmp_path: Path, session: Any) -> None:
    """What is archived, then the tier, then what comes; between the runs all that is read moves."""

    def run() -> list[int]:
        return streamed(shop, session, tmp_path)

    for queue in ORDERS:
        shop.tier.expire(40, queue)
    assert run() == [50, 50, 50, 10], "160 messages, 80 of them in the archive alone"
    shop.add(b"later")
    shop.run()
    for queue in ORDERS:
        shop.tier.expire(80, queue)
    shop.add(b"last")
    merged(shop.at)
    assert sum(run()) == 4
    assert run() == []
    assert rows_of(session.read.parquet(f"{tmp_path}/out")) == shop.wanted()


def test_what_is_no_page_is_proven_before_spark_reads_it(shop: Shop) -> None:
    """Footer, indexes of pages, filters of keys: of each byte behind the pages."""
    store = shop.stores[1]
    (file,) = plan_files(read_archive(store), Selection()).files
    (path,) = files_of(shop.archive)
    whole, rng = path.read_bytes(), random.Random(1)
    metadata = open_parquet(ObjectFile(store, file.key, file.size_bytes)).metadata
    last = metadata.row_group(metadata.num_row_groups - 1)
    chunks = [last.column(at) for at in range(last.num_columns)]
    end = max(_start_of(chunk) + chunk.total_compressed_size for chunk in chunks)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    filters = [g.column(at).bloom_filter_offset for g in groups for at in range(g.num_columns)]
    assert min(place for place in filters if place) >= end, "filters lie behind the pages"
    for _ in range(40):
        data, at = bytearray(whole), rng.randrange(end, len(whole))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(DataError):
            _prove_end(store, file)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="shorter than the archive's log says"):
        _prove_end(store, file)
    path.unlink()
    with pytest.raises(DataError, match="is gone"):
        _prove_end(store, file)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_a_flipped_bit_in_a_page_is_damage(tmp_path: Path, session: Any) -> None:
    url = f"file://{tmp_path}/parquet"
    store = open_store(url, S3Options())
    make_archive(store, files=1, rows=8000, rng=random.Random(2))
    (path,) = files_of(url)
    whole = path.read_bytes()
    wanted = archive(session, url).orderBy("queue_offset").toArrow()
    column = open_parquet(ObjectFile(store, *key_of(store))).metadata.row_group(0)
    ids = next(
        chunk
        for chunk in (column.column(at) for at in range(column.num_columns))
        if chunk.path_in_schema == "uniq_key"
    )
    data = bytearray(whole)
    data[_start_of(ids) + ids.total_compressed_size // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(Exception, match="CRC checksum verification failed"):
        archive(session, url).toArrow()
    with pytest.raises(DataError, match="other bytes than the archive's log says"):
        archive(session, url, is_proved=True)
    path.write_bytes(whole)
    assert archive(session, url, is_proved=True).orderBy("queue_offset").toArrow().equals(wanted)
    store.close()


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["Missing", "Corrupt"])
def test_a_session_that_passes_over_files_does_not_pass_over_ours(
    shop: Shop, session: Any, what: str
) -> None:
    """Settings that people have for other tables; a file is gone, or damaged, after a frame was made."""
    name = f"spark.sql.files.ignore{what}Files"
    session.conf.set(name, "true")
    try:
        frames = [
            archive(session, shop.archive, "orders"),
            messages(session, shop.url, "orders", archive=shop.archive),
        ]
        (path,) = files_of(shop.archive)
        if what == "Missing":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
        for frame in frames:
            with pytest.raises(Exception, match=r"FAILED_READ_FILE|does not exist"):
                frame.select("body").collect()
    finally:
        session.conf.unset(name)


def test_times_and_names_as_python_has_them(shop: Shop) -> None:
    """Times of a broker are whole milliseconds: those behind half of one begin with the next."""
    half = dt.datetime.fromtimestamp(tiers.TIME_MS / 1000, dt.UTC) + dt.timedelta(microseconds=500)
    assert _text(half) == str(tiers.TIME_MS + 1)
    assert _text(half - dt.timedelta(microseconds=500)) == str(tiers.TIME_MS)
    assert _text(half.replace(tzinfo=None)) == _text(half.astimezone(ZoneInfo("Asia/Tokyo")))
    with pytest.raises(InvalidError, match="no topic nope"):
        report(shop.archive, Topic="nope")


def key_of(store: ObjectStore) -> tuple[str, int]:
    (file,) = plan_files(read_archive(store), Selection()).files
    return file.key, file.size_bytes


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_a_place_that_spark_cannot_read_by_itself(session: Any) -> None:
    class Bucket:
        url = "s3://bucket/parquet"

    with pytest.raises(InvalidError, match=r"cannot read s3a:// by itself .*hadoop-aws"):
        require_reach(session, Bucket(), "s3a")  # type: ignore[arg-type]
