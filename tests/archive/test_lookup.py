"""Lookup by key or unique id in an archive: what Python finds, by as few row groups and requests as filters allow."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.archive_jobs import Counting
from support.archives_made import make_archive
from support.command_line import here
from support.shop import DAY_MS, HOUR_MS

from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive import lookup as module
from tiered.archive import parquet
from tiered.archive.checked_ranges import ObjectFile
from tiered.archive.lookup import lookup
from tiered.archive.parquet import filters_of
from tiered.archive.selection import Selection
from tiered.archive.tables import open_parquet
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.archive_fixtures import Sealed
    from support.shop import Shop

    from backends.base import ObjectStore
    from tiered.archive.lookup import FoundRow


@pytest.fixture(scope="module")
def archive(shop: Shop) -> Iterator[ObjectStore]:
    store = open_store(shop.archive, S3Options())
    yield store
    store.close()


def places(found: FoundRow) -> list[tuple[str, int]]:
    return [
        (row["topic"], round(row["store_ts"].timestamp() * 1000)) for row in found.rows.to_pylist()
    ]


def sent(shop: Shop, key: str) -> list[tuple[str, int]]:
    found = [(one.message.topic, one.store_ms) for one in shop.sent if key in one.keys]
    return sorted(found, key=lambda place: -place[1])


@pytest.mark.parametrize("key", ["order-11", "customer-2", "order-399", "order", "", "é"])
def test_the_messages_of_a_key_newest_first(key: str, shop: Shop, archive: ObjectStore) -> None:
    found = lookup(archive, Selection(key=key), count=1000)
    assert [at for _, at in places(found)] == [at for _, at in sent(shop, key)]
    assert sorted(places(found)) == sorted(sent(shop, key))


def test_narrower_by_topic_time_and_count(shop: Shop, archive: ObjectStore) -> None:
    of_key = sent(shop, "customer-2")
    of_orders = [place for place in of_key if place[0] == "orders"]
    wanted = Selection(key="customer-2").among("topic", ["orders"])
    assert places(lookup(archive, wanted, count=5)) == of_orders[:5]
    late = wanted.within("store_ts", (DAY_MS + 12 * HOUR_MS) * 1000, (1 << 63) - 1)
    noon = [place for place in of_orders if place[1] >= DAY_MS + 12 * HOUR_MS]
    assert places(lookup(archive, late, count=1000)) == noon
    assert 0 < len(noon) < len(of_orders)


def test_by_unique_id(archive: ObjectStore) -> None:
    row = lookup(archive, Selection(key="order-11"), count=1).rows.to_pylist()[0]
    found = lookup(archive, Selection(key=row["uniq_key"]))
    assert row in found.rows.to_pylist()
    assert {one["uniq_key"] for one in found.rows.to_pylist()} == {row["uniq_key"]}
    assert found.rows.num_rows < 4


def test_what_cannot_be_asked(archive: ObjectStore) -> None:
    with pytest.raises(InvalidError, match="no key"):
        lookup(archive, Selection())
    with pytest.raises(InvalidError, match="no topic nope"):
        lookup(archive, Selection(key="a").among("topic", ["nope"]))
    with pytest.raises(InvalidError, match="no archive"):
        lookup(MemoryStore("empty"), Selection(key="a"))


# -- what is read ---------------------------------------------------------------------------------


FILES, GROUPS, ROWS = 6, 3, 400


@pytest.fixture(scope="module")
def made() -> tuple[Counting, list[str]]:
    """Files of several small row groups, and every unique id in order."""
    store = MemoryStore("archive")
    ids = make_archive(
        store, files=FILES, rows=ROWS * GROUPS, group_rows=ROWS, rng=random.Random(3)
    )
    return Counting(store), ids


def test_of_files_without_the_key_footer_and_filters_are_read(
    made: tuple[Counting, list[str]],
) -> None:
    store, _ = made
    store.requests = store.size_bytes = 0
    found = lookup(store, Selection(key="nowhere"))
    assert (found.files, found.files_opened, found.groups) == (FILES, FILES, FILES * GROUPS)
    assert found.groups_read <= 2
    assert store.requests <= 2 * FILES + 3 * found.groups_read


def test_nearly_all_row_groups_are_left_out(made: tuple[Counting, list[str]]) -> None:
    store, ids = made
    rng, read, hits = random.Random(5), 0, 0
    for number in (rng.randrange(len(ids)) for _ in range(40)):
        found = lookup(store, Selection(key=ids[number]))
        assert found.rows["uniq_key"].to_pylist() == [ids[number]]
        assert found.rows["queue_offset"].to_pylist() == [number]
        read += found.groups_read
        hits += 1
    assert hits <= read <= hits * 1.5


def test_several_at_once_give_the_same(made: tuple[Counting, list[str]]) -> None:
    store, ids = made
    with ThreadPoolExecutor(4) as pool:
        for text in ids[::300]:
            alone, together = (
                lookup(store, Selection(key=text)),
                lookup(store, Selection(key=text), spread=pool.map),
            )
            assert alone.rows.equals(together.rows)


def test_a_file_without_filters_is_read(
    monkeypatch: pytest.MonkeyPatch, made: tuple[Counting, list[str]]
) -> None:
    store, ids = made
    monkeypatch.setattr(parquet, "bits_of", lambda _chunk: None)
    found = lookup(store, Selection(key=ids[7]))
    assert found.rows["queue_offset"].to_pylist() == [7]
    assert found.groups_read == FILES * GROUPS


def test_foreign_shapes_of_filters_are_not_asked() -> None:
    class Chunk:
        bloom_filter_offset = 1000
        bloom_filter_length = 0

    chunk = Chunk()
    for length, bits in ((47, (1015, 32)), (32, None), (16, None), (65, (1001, 64)), (0, None)):
        chunk.bloom_filter_length = length
        assert parquet.bits_of(chunk) == bits
    chunk.bloom_filter_length = 40_000  # 32,768 and much more than a header
    assert parquet.bits_of(chunk) is None


def test_the_blocks_are_where_the_filters_say(made: tuple[Counting, list[str]]) -> None:
    store, _ = made
    key = next(info.key for info in store.list("data/"))
    data = store.get(key)
    file = open_parquet(ObjectFile(store, key, len(data)))
    group = file.metadata.row_group(0)
    for name, place in zip(parquet.COLUMNS, filters_of(group), strict=True):
        assert place
        (chunk,) = [
            group.column(n)
            for n in range(group.num_columns)
            if group.column(n).path_in_schema == name
        ]
        assert sum(place) == chunk.bloom_filter_offset + chunk.bloom_filter_length


def test_files_of_different_columns_come_together() -> None:
    one = pa.table(
        {"store_ts": [1, 3], "queue_offset": [0, 1], "queue_id": [0, 0], "more": ["a", "b"]}
    )
    two = pa.table({"store_ts": [2, 3], "queue_offset": [5, 6], "queue_id": [0, 0]})
    found = module.newest([one, two], 3).to_pylist()
    assert [(row["queue_offset"], row["more"]) for row in found] == [(6, None), (1, "b"), (5, None)]
    assert module.newest([], 3).num_rows == 0
    assert pq
    assert replace


# -- tiered query ---------------------------------------------------------------------------------

UNKNOWN = ("stored_sys_flag", "size", "log_offset")


def test_query_of_an_archive_is_that_of_its_tier(shop: Shop) -> None:
    noon = str(DAY_MS + 12 * HOUR_MS)
    for key, *options in (
        ("order-11",),
        ("customer-2", "--count", "7"),
        ("customer-2", "--from", noon),
        ("customer-2", "--until", noon),
        ("nothing",),
    ):
        words = ("orders", "--key", key, *options)
        of_tier = here("query", shop.tier, *words).good().rows
        of_archive = here("query", shop.archive, *words).good().rows
        assert of_archive == [row | dict.fromkeys(UNKNOWN) for row in of_tier]
        assert bool(of_tier) == (key != "nothing")
    found = here("query", shop.archive, "orders", "--key", "order-11", "--json").good()
    assert (found.document["is_complete"], len(found.document["messages"])) == (True, 3)
    assert "read 1 row group of 1 file," in found.err


def test_query_of_an_archive_says_what_is_wrong(shop: Shop) -> None:
    ran = here("query", shop.archive, "ordres", "--key", "order-11")
    assert (ran.code, "no topic ordres; did you mean orders?" in ran.error) == (2, True)
    for words in (["--raw-body"], ["--scan", "1MiB"]):
        ran = here("query", shop.archive, "orders", "--key", "order-11", *words)
        assert (ran.code, f"leave out {words[0]}" in ran.error) == (2, True)


def test_batches_and_compressed_bodies_are_told_alike(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    keyed = [
        (topic, message["keys"].split()[0])
        for topic, messages in tier.dump.messages.items()
        for message in messages
        if message["keys"]
    ]
    assert keyed
    for topic, key in keyed[:: max(len(keyed) // 8, 1)]:
        of_tier = here("query", tier.url, topic, "--key", key).good().rows
        found = here("query", archive_url, topic, "--key", key).good().rows
        assert found == [row | dict.fromkeys(UNKNOWN) for row in of_tier]
