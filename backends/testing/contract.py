"""The contract suite: what every ``ObjectStore`` does, ours and others'.

Use it by a subclass in a test module that gives a fixture ``store``, an empty store of its own for
each test::

    class TestMyStore(ObjectStoreContract):
        @pytest.fixture
        def store(self) -> ObjectStore: ...

Races need threads and take about a second each; a store that is known not to be atomic (its
capabilities say so) is not raced. ``is_atomic`` may be set to False for a server that claims more
than it does, which leaves the races out.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pytest

from backends.base import ByteRange, ObjectStore, Version, get_into
from backends.errors import (
    AlreadyExistsError,
    InvalidKeyError,
    InvalidRangeError,
    ObjectNotFoundError,
    PreconditionFailedError,
    ShortReadError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer


# In byte order of the keys, which is not the order in which a tree is walked by names.
TREE = [
    *("a!", "a-", "a-b/c", "a/a", "a/b-c/d", "a/b.c", "a/b/c0", "a0", "aa/b", "b/%41", "b/A"),
    *("b/a", "b/ß", "b/日", "b/😀", "c/1/2/3", "c/1/2/4", "c/1/3/1"),
]
KEYS_OVER_A_PAGE = 2100
TURNS = 20


class ListContract:
    """How a store lists; see ``ObjectStoreContract``.

    The part of the contract suite that is about listings.
    """

    def test_lists_nothing(self, store: ObjectStore) -> None:
        """An empty store has no objects under any prefix."""
        for prefix in ("", "a", "a/", "a/b"):
            assert list(store.list(prefix)) == []
            assert list(store.list(prefix, start_after="a")) == []

    def test_lists_in_byte_order(self, store: ObjectStore) -> None:
        """Whatever order they came in; sizes are told."""
        tree = _tree(store)
        assert _keys(store, "") == tree
        assert all(found.size_bytes == len(found.key) for found in store.list(""))

    def test_lists_by_plain_prefix(self, store: ObjectStore) -> None:
        """A prefix may end anywhere, not only at a slash."""
        tree = _tree(store)
        prefixes = {key[:end] for key in tree for end in range(len(key) + 1)}
        for prefix in [
            *prefixes,
            "x",
            "a/b/c00",
            "a/b/c/",
            "c/1/2/3/",
            "//",
            "a//",
            "../",
            "/",
            " ",
        ]:
            assert _keys(store, prefix) == [key for key in tree if key.startswith(prefix)]

    def test_lists_after_a_key(self, store: ObjectStore) -> None:
        """Only greater keys, also after a key that is not there."""
        tree = _tree(store)
        places = [*tree, "a", "a/", "a/b/", "a/b/c", "a/c", "b", "b/~", "c/1/2", "c/1/2/", "z", "A"]
        for prefix in ("", "a", "a/b", "a/b/", "b/", "c/1/2/"):
            for after in places:
                wanted = [key for key in tree if key.startswith(prefix) and key > after]
                assert _keys(store, prefix, after) == wanted, (prefix, after)

    def test_lists_more_than_a_page(self, store: ObjectStore) -> None:
        """Nothing is lost or told twice where pages meet."""
        keys = [f"page/{number:05d}" for number in range(KEYS_OVER_A_PAGE)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put_if_absent(key, b"x"), keys))
        assert _keys(store, "page/") == keys
        assert _keys(store, "", keys[998]) == keys[999:]
        assert _keys(store, "page/", keys[-1]) == []
        assert _keys(store, "page/001") == keys[100:200]

    def test_lists_each_write_at_once(self, store: ObjectStore) -> None:
        """A finished put or delete is in the next listing."""
        for number in range(TURNS):
            store.put_if_absent(f"at/once/{number:02d}", b"")
            assert len(_keys(store, "at/")) == number + 1
        for number in range(TURNS):
            store.delete(f"at/once/{number:02d}")
            assert len(_keys(store, "at/")) == TURNS - 1 - number

    def test_listing_may_be_left(self, store: ObjectStore) -> None:
        """Reading only the beginning of a listing is fine, and so is changing the store meanwhile."""
        tree = _tree(store)
        listing = store.list("")
        assert next(listing).key == tree[0]
        store.delete(tree[-1])
        del listing
        assert _keys(store, "") == tree[:-1]


def _tree(store: ObjectStore) -> list[str]:
    for key in reversed(TREE):
        store.put_if_absent(key, b"." * len(key))
    return sorted(TREE, key=str.encode)


def _keys(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    return [found.key for found in store.list(prefix, start_after=start_after)]


_T = TypeVar("_T")
RACERS = 8
YEAR_2017_MS = 1_500_000_000_000
BIG_BYTES = 20 << 20
BAD_KEYS = ["", "/a", "a/", "a//b", ".", "a/../b", "a/./b", "a\nb", "a\x7f", "x" * 256, "y/" * 600]
ODD_KEYS = [
    *("a%b", "a%2Fb", "a|b", "a~b", "a+b", "a b", "a&b#c?d=e", "a'b\"c", "a*b", "a\\b", "a<b>c"),
    *("a^b`{}[]", "b=b;c,d@e:f$g!(h)", " c ", "...", "ü/ß", "日本/😀", "e\u0301", "x" * 255),
    "/".join(["k" * 200] * 5),
]


class ObjectStoreContract(ListContract):
    """Tests that hold a store to ``backends.base.ObjectStore``. Subclass it and give ``store``."""

    is_atomic = True

    def test_is_an_object_store(self, store: ObjectStore) -> None:
        """The protocol is there and the URL is one."""
        assert isinstance(store, ObjectStore)
        assert ":" in store.url

    def test_put_then_get(self, store: ObjectStore) -> None:
        """What was put is what is read, from every kind and number of buffers."""
        kinds: list[Sequence[Buffer] | Buffer] = [
            b"abc",
            bytearray(b"abc"),
            memoryview(b"xabcx")[1:4],
            [b"a", b"", bytearray(b"bc")],
        ]
        for number, data in enumerate(kinds):
            store.put_if_absent(f"kind/{number}", data)
            assert store.get(f"kind/{number}") == b"abc"

    def test_put_takes_many_buffers(self, store: ObjectStore) -> None:
        """More buffers than one system call takes, some of them empty."""
        chunks = [bytes([number % 251]) * (number % 7) for number in range(5000)]
        store.put_if_absent("many", chunks)
        assert store.get("many") == b"".join(chunks)

    def test_empty_object(self, store: ObjectStore) -> None:
        """An object may have no bytes."""
        store.put_if_absent("none", b"")
        store.put_if_absent("none-either", [])
        assert store.get("none") == store.get("none-either") == b""
        assert store.head("none").size_bytes == 0
        with pytest.raises(InvalidRangeError):
            store.get("none", ByteRange(0, 1))

    def test_big_object(self, store: ObjectStore) -> None:
        """20 MiB in chunks, whole or not at all, with ranges out of it."""
        chunk = bytes(range(256)) * 1024
        chunks = [chunk] * (BIG_BYTES // len(chunk)) + [b"end"]
        store.put_if_absent("big", chunks)
        assert store.head("big").size_bytes == BIG_BYTES + 3
        assert store.get("big") == b"".join(chunks)
        assert store.get("big", ByteRange(BIG_BYTES - 1, BIG_BYTES + 2)) == b"\xffen"

    def test_put_refuses_what_exists(self, store: ObjectStore) -> None:
        """The second put changes nothing, also with several buffers."""
        store.put_if_absent("once", b"first")
        for second in (b"second", [b"sec", b"ond"], b"first"):
            with pytest.raises(AlreadyExistsError):
                store.put_if_absent("once", second)
        assert store.get("once") == b"first"

    def test_put_again_after_delete(self, store: ObjectStore) -> None:
        """A deleted key is free again."""
        store.put_if_absent("a/b", b"1")
        store.delete("a/b")
        store.put_if_absent("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_ranges(self, store: ObjectStore) -> None:
        """Half-open; behind the end is an error, never less than asked for."""
        store.put_if_absent("r", b"0123456789")
        assert store.get("r", ByteRange(0, 10)) == b"0123456789"
        assert store.get("r", ByteRange(9, 10)) == b"9"
        with pytest.raises(ShortReadError):
            store.get("r", ByteRange(9, 11))
        for start in (10, 11, 1 << 40):
            with pytest.raises(InvalidRangeError):
                store.get("r", ByteRange(start, start + 5))

    def test_get_ranges(self, store: ObjectStore) -> None:
        """In the order given, overlaps and repeats allowed; one bad range fails all."""
        store.put_if_absent("r", b"0123456789")
        asked = [ByteRange(8, 10), ByteRange(0, 3), ByteRange(2, 9), ByteRange(0, 3)]
        assert store.get_ranges("r", asked) == [b"89", b"012", b"2345678", b"012"]
        assert store.get_ranges("r", []) == []
        with pytest.raises((InvalidRangeError, ShortReadError)):
            store.get_ranges("r", [ByteRange(0, 3), ByteRange(10, 12)])
        with pytest.raises(ObjectNotFoundError):
            store.get_ranges("absent", asked)

    def test_get_into(self, store: ObjectStore) -> None:
        """A range comes into the caller's memory, by whatever way, and fails as `get` does."""
        data = bytes(range(256)) * 1000
        store.put_if_absent("a", data)
        memory = bytearray(b"?" * 70_002)
        get_into(store, "a", ByteRange(300, 70_300), memoryview(memory)[1:-1])
        assert memory == b"?" + data[300:70_300] + b"?"
        with pytest.raises(ShortReadError):
            get_into(store, "a", ByteRange(255_999, 256_001), memoryview(bytearray(2)))
        with pytest.raises(InvalidRangeError):
            get_into(store, "a", ByteRange(256_000, 256_001), memoryview(bytearray(1)))
        with pytest.raises(ObjectNotFoundError):
            get_into(store, "b", ByteRange(0, 1), memoryview(bytearray(1)))

    def test_missing(self, store: ObjectStore) -> None:
        """Reading what is not there says so, and so does reading what is only a folder of keys."""
        store.put_if_absent("folder/a", b"1")
        reads: list[Callable[[str], object]] = [
            *(store.get, store.head, store.get_versioned),
            lambda key: store.get(key, ByteRange(0, 1)),
        ]
        for key in ("absent", "folder", "folder/b", "folder/a/c"):
            for read in reads:
                with pytest.raises(ObjectNotFoundError):
                    read(key)

    def test_delete(self, store: ObjectStore) -> None:
        """Deleting is done when it returns; deleting nothing is not an error."""
        store.put_if_absent("a/b/c", b"1")
        store.put_if_absent("a/b/d", b"2")
        store.delete("a/b/c")
        store.delete("a/b/c")
        store.delete("absent/at/all")
        store.delete("a/b")
        with pytest.raises(ObjectNotFoundError):
            store.get("a/b/c")
        assert [found.key for found in store.list("")] == ["a/b/d"]

    def test_head(self, store: ObjectStore) -> None:
        """Key and size; a version that is told is that of ``get_versioned``."""
        store.put_if_absent("h", b"12345")
        found = store.head("h")
        assert (found.key, found.size_bytes) == ("h", 5)
        assert found.modified_ms == -1 or found.modified_ms > YEAR_2017_MS
        if found.version is not None and store.capabilities.compare_and_set:
            assert found.version == store.get_versioned("h")[1]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, store: ObjectStore, key: str) -> None:
        """Whatever is done with them."""
        calls: list[Callable[[], object]] = [
            lambda: store.put_if_absent(key, b""),
            lambda: store.compare_and_set(key, b"", None),
            *(lambda: store.get(key), lambda: store.head(key), lambda: store.delete(key)),
        ]
        for call in calls:
            with pytest.raises((InvalidKeyError, UnsupportedError)):
                call()
        assert list(store.list("")) == []

    def test_odd_keys_are_kept(self, store: ObjectStore) -> None:
        """Every key that the rules allow comes back as it was."""
        for key in ODD_KEYS:
            store.put_if_absent(key, key.encode())
        for key in ODD_KEYS:
            assert store.get(key) == key.encode()
            assert [found.key for found in store.list(key)][:1] == [key]
        assert [found.key for found in store.list("")] == sorted(ODD_KEYS, key=str.encode)
        for key in ODD_KEYS:
            store.delete(key)
        assert list(store.list("")) == []

    def test_compare_and_set(self, store: ObjectStore) -> None:
        """Only at the expected version; None means absent."""
        self._need_compare_and_set(store)
        first = store.compare_and_set("c", b"1", None)
        assert store.get_versioned("c") == (b"1", first)
        second = store.compare_and_set("c", b"2", first)
        assert second != first
        for stale in (None, first, Version('"00000000000000000000000000000000"')):
            with pytest.raises(PreconditionFailedError):
                store.compare_and_set("c", b"3", stale)
        assert store.get_versioned("c") == (b"2", second)

    def test_compare_and_set_of_what_is_gone(self, store: ObjectStore) -> None:
        """A version of an object that was deleted is stale, and creates nothing."""
        self._need_compare_and_set(store)
        version = store.compare_and_set("c", b"1", None)
        store.delete("c")
        with pytest.raises(PreconditionFailedError):
            store.compare_and_set("c", b"2", version)
        with pytest.raises(ObjectNotFoundError):
            store.get("c")
        store.compare_and_set("c", b"3", None)

    def test_put_and_compare_and_set_meet(self, store: ObjectStore) -> None:
        """Each sees what the other made."""
        self._need_compare_and_set(store)
        store.put_if_absent("p", b"1")
        with pytest.raises(PreconditionFailedError):
            store.compare_and_set("p", b"2", None)
        store.compare_and_set("p", b"2", store.get_versioned("p")[1])
        with pytest.raises(AlreadyExistsError):
            store.put_if_absent("p", b"3")
        assert store.get("p") == b"2"

    def test_one_put_wins(self, store: ObjectStore) -> None:
        """Of threads that create the same key at once exactly one wins, and its bytes stay."""
        self._need_atomic(store.capabilities.put_if_absent)
        for turn in range(20):
            key = f"race/{turn}"
            won = race(partial(_wins, store, key))
            assert won.count(True) == 1
            assert store.get(key) == _body(won.index(True))

    def test_no_update_is_lost(self, store: ObjectStore) -> None:
        """A counter increased by compare-and-set ends at the number of increases."""
        self._need_compare_and_set(store)
        self._need_atomic(store.capabilities.compare_and_set)
        store.compare_and_set("counter", b"0", None)
        done = sum(race(lambda _: _increase(store, "counter", 10)))
        assert int(store.get("counter")) == done == RACERS * 10

    def test_readers_see_whole_objects(self, store: ObjectStore) -> None:
        """While an object is replaced again and again, a reader sees one of its states."""
        self._need_compare_and_set(store)
        version = store.compare_and_set("whole", b"0" * 50_000, None)
        stop = threading.Event()

        def read() -> int:
            torn = 0
            while not stop.is_set():
                try:
                    torn += len(set(store.get("whole"))) != 1
                except (
                    UnavailableError
                ):  # a server of threads may stumble over itself, but must not lie
                    if self.is_atomic:
                        raise
            return torn

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for turn in range(1, 30):
                    body = b"%d" % (turn % 10) * 50_000
                    version = store.compare_and_set("whole", body, version)
            finally:
                stop.set()
            assert [reader.result() for reader in readers] == [0, 0]

    def _need_atomic(self, claimed: bool) -> None:
        if not (self.is_atomic and claimed):
            pytest.skip("this store does not promise to be atomic, so there is no race to win")

    @staticmethod
    def _need_compare_and_set(store: ObjectStore) -> None:
        if not store.capabilities.compare_and_set:
            with pytest.raises(UnsupportedError):
                store.compare_and_set("c", b"1", None)
            pytest.skip("this store offers no compare-and-set; that it says so was checked")


def race(work: Callable[[int], _T]) -> list[_T]:
    """Run ``work(racer)`` in ``RACERS`` threads that start together; what they return."""
    barrier = threading.Barrier(RACERS)

    def run(racer: int) -> _T:
        barrier.wait(30)
        return work(racer)

    with ThreadPoolExecutor(RACERS) as pool:
        return list(pool.map(run, range(RACERS)))


def _body(racer: int) -> bytes:
    return bytes([racer]) * 10_000


def _wins(store: ObjectStore, key: str, racer: int) -> bool:
    try:
        store.put_if_absent(key, [_body(racer)[:5000], _body(racer)[5000:]])
    except AlreadyExistsError:
        return False
    return True


def _increase(store: ObjectStore, key: str, times: int) -> int:
    """Increase a counter; how often it was done."""
    done = 0
    while done < times:
        value, version = store.get_versioned(key)
        with suppress(PreconditionFailedError):
            store.compare_and_set(key, b"%d" % (int(value) + 1), version)
            done += 1
    return done
