"""The index of an archive's keys: the same answers with far fewer requests, and damage that is named."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.archive_jobs import Counting, alone, index
from support.archives_made import make_archive
from support.command_line import here

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive import lookup as key_filters
from tiered.archive.lookup import (
    PREFIX,
    build,
    damage_of_index,
    files_without,
    groups_with,
    lookup,
    read_index,
)
from tiered.archive.selection import Selection
from tiered.archive.tables import read_archive
from tiered.errors import DataError, OtherVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.archive_fixtures import Sealed
    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.archive.lookup import FoundRow

FILES, GROUPS, ROWS = 6, 3, 300


@pytest.fixture(scope="module")
def made() -> tuple[MemoryStore, list[str]]:
    """Files of row groups of two sizes, so that filters are of several sizes too."""
    store = MemoryStore("archive")
    ids = make_archive(
        store, files=FILES, rows=ROWS * GROUPS - 250, group_rows=ROWS, rng=random.Random(3)
    )
    return store, ids


@pytest.fixture
def archive(made: tuple[MemoryStore, list[str]]) -> MemoryStore:
    """A copy without an index."""
    store = MemoryStore("copy")
    for info in made[0].list(""):
        store.put_if_absent(info.key, made[0].get(info.key))
    return store


def same(one: FoundRow, two: FoundRow) -> bool:
    return (one.rows, one.files, one.groups, one.groups_read) == (
        two.rows, two.files, two.groups, two.groups_read,
    )  # fmt: skip


def test_the_same_answers_with_and_without(
    archive: MemoryStore, made: tuple[MemoryStore, list[str]]
) -> None:
    ids = made[1]
    keys = [*ids[::97], ids[-1], "nowhere", ""]
    keys += [row["keys"][0] for row in lookup(archive, Selection(key=ids[8])).rows.to_pylist()]
    before = [lookup(archive, Selection(key=key)) for key in keys]
    built = index(archive)
    assert (built.objects, built.files) == (1, FILES)
    (part,) = read_index(archive)
    assert len(part.classes) > 1
    for key, found in zip(keys, before, strict=True):
        assert same(lookup(archive, Selection(key=key)), found)


def test_a_miss_takes_one_request_and_a_hit_few(
    archive: MemoryStore, made: tuple[MemoryStore, list[str]]
) -> None:
    index(archive)
    counting = Counting(archive)
    state, parts = read_archive(counting), read_index(counting)
    counting.requests = 0
    missing = "nowhere"
    found = lookup(counting, Selection(key=missing), state=state, index=parts)
    assert (found.files_opened, found.groups) == (found.files_read, FILES * GROUPS)
    assert counting.requests <= 1 + 3 * found.files_read
    rng, requests = random.Random(4), 0
    for text in rng.sample(made[1], 30):
        counting.requests = 0
        found = lookup(counting, Selection(key=text), state=state, index=parts)
        assert found.rows["uniq_key"].to_pylist() == [text]
        requests += counting.requests
    assert requests / 30 < 1 + 3 * 1.5


def test_later_files_are_covered_by_another_object(
    archive: MemoryStore, made: tuple[MemoryStore, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    index(archive)
    assert index(archive).objects == 0
    (old,) = list(archive.list(PREFIX))
    archive.delete(old.key)
    monkeypatch.setattr(key_filters, "OBJECT_BYTES", 1)
    assert index(archive).objects == FILES
    parts = read_index(archive)
    assert sorted(key for part in parts for key in part.files) == [
        info.key for info in archive.list("data/")
    ]
    archive.delete(parts[2].key)
    found = lookup(archive, Selection(key=made[1][1500]), index=parts)
    assert found.rows["queue_offset"].to_pylist() == [1500]
    assert found.groups == FILES * GROUPS


def test_a_file_without_filters_may_have_everything(
    archive: MemoryStore, made: tuple[MemoryStore, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_filters, "filters_of", lambda _group: [None, None])
    index(archive)
    (part,) = read_index(archive)
    assert part.classes == ()
    assert set(map(tuple, groups_with(archive, part, "x").values())) == {(0, 1, 2)}
    assert lookup(archive, Selection(key=made[1][3])).rows["queue_offset"].to_pylist() == [3]


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_harmed_file_is_named_and_all_others_are_covered(
    how: str, archive: MemoryStore, made: tuple[MemoryStore, list[str]]
) -> None:
    harmed = sorted(info.key for info in archive.list("data/"))[2]
    data = archive.get(harmed)
    archive.delete(harmed)
    if how == "cut":
        archive.put_if_absent(harmed, data[:-100])
    state = read_archive(archive)
    for _ in range(2):
        built = build(archive, state, alone(archive))
        assert [(key, type(error)) for key, error in built.failed] == [(harmed, DataError)]
    assert (built.objects, built.files) == (0, 0), "all others were covered before"
    (part,) = read_index(archive)
    assert len(part.files) == FILES - 1
    if how == "cut":
        archive.delete(harmed)
    archive.put_if_absent(harmed, data)
    assert index(archive).files == 1
    found = lookup(archive, Selection(key=made[1][1500]))
    assert found.rows["queue_offset"].to_pylist() == [1500]


def test_what_the_store_refuses_is_said_of_each_file(archive: MemoryStore) -> None:
    class Refusing(WrappingStore):
        def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
            raise UnavailableError(key)

    built = build(archive, read_archive(archive), alone(Refusing(archive)))
    assert {type(error) for _, error in built.failed} == {UnavailableError}
    assert (len(built.failed), built.files) == (FILES, 0)


def damaged(store: ObjectStore, at: int) -> None:
    (info,) = list(store.list(PREFIX))
    data = bytearray(store.get(info.key))
    data[at] ^= 1
    store.delete(info.key)
    store.put_if_absent(info.key, bytes(data))


@pytest.mark.parametrize("at", [-1, -10, -16, -40])
def test_an_object_with_a_damaged_head_is_as_good_as_none(
    at: int,
    archive: MemoryStore,
    made: tuple[MemoryStore, list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An index only makes lookups faster; damaged it stopped each of them, and its own command."""
    before = index(archive)
    (whole,) = [archive.get(info.key) for info in archive.list(PREFIX)]
    damaged(archive, at)
    assert read_index(archive) == []
    assert "key index is passed over" in caplog.text
    found = lookup(archive, Selection(key=made[1][1500]))
    assert found.rows["queue_offset"].to_pylist() == [1500]
    assert [type(error) for error in damage_of_index(archive).values()] == [DataError]
    assert index(archive) == before, "made again, under the same name"
    assert [archive.get(info.key) for info in archive.list(PREFIX)] == [whole]
    assert damage_of_index(archive) == {}


def test_a_damaged_row_is_named_and_stops_no_lookup(
    archive: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    index(archive)
    (part,) = read_index(archive)
    blocks, filters, start = part.classes[0]
    key = next(
        text
        for text in map(str, range(99))
        if key_filters.block_number(key_filters.text_hash(text), blocks) == 0
    )
    damaged(archive, start + 32 * filters // 2)
    with pytest.raises(DataError, match="a row of the key index"):
        groups_with(archive, part, key)
    assert lookup(archive, Selection(key=key)).rows.num_rows == 0
    assert "a row of the key index" in caplog.text
    assert files_without(archive, [part], key) == set()
    (damage,) = damage_of_index(archive).values()
    assert "a row of the key index" in str(damage)


def test_heads_that_lie_are_of_another_version_and_passed_over(archive: MemoryStore) -> None:
    index(archive)
    (info,) = list(archive.list(PREFIX))
    data = archive.get(info.key)
    for text in (
        b"[]", b"{}", b'{"format": 2, "classes": [], "files": []}',
        b'{"format": 1, "classes": [[1, 1, 0]], "files": []}',
        b'{"format": 1, "classes": [], "files": [["a", [[0]]]]}',
        b'{"format": 1, "classes": [[99, 1, 9999999]], "files": [["a", [[0]]]]}',
    ):  # fmt: skip
        head = key_filters.zstandard.ZstdCompressor().compress(text)
        footer = key_filters._FOOTER.pack(
            len(head), key_filters.zlib_ng.crc32(head), key_filters._MAGIC
        )
        archive.delete(info.key)
        archive.put_if_absent(info.key, data[:100] + head + footer)
        assert read_index(archive) == []
        (error,) = damage_of_index(archive).values()
        assert isinstance(error, OtherVersionError), "its checksum holds, so it was written so"
    archive.delete(info.key)
    archive.put_if_absent(info.key, b"short")
    assert read_index(archive) == []
    (error,) = damage_of_index(archive).values()
    assert "not an object of a key index" in str(error)


def test_the_command_makes_it_and_query_uses_it(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s01-basic")
    here("archive", tier.url, "--to", archive_url).good()
    key = next(m["keys"].split()[0] for m in tier.dump.messages["orders"] if m["keys"])
    words = ("query", archive_url, "orders", "--key", key)
    before = here(*words).good()
    made = here("archive", tier.url, "--to", archive_url, "--key-index", "--json").good().document
    assert (made["objects"], made["files"] > 0, made["size_bytes"] > 0) == (1, True, True)
    assert here(*words).good().rows == before.rows != []
    again = here("archive", tier.url, "--to", archive_url, "--key-index", "--json").good().document
    assert (again["objects"], again["files"]) == (0, 0)
    assert here("archive", tier.url, "--to", archive_url, "--verify").good()
