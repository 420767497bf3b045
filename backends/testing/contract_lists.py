"""The part of the contract suite that is about listings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.base import ObjectStore

# In byte order of the keys, which is not the order in which a tree is walked by names.
TREE = [
    *("a!", "a-", "a-b/c", "a/a", "a/b-c/d", "a/b.c", "a/b/c0", "a0", "aa/b", "b/%41", "b/A"),
    *("b/a", "b/ß", "b/日", "b/😀", "c/1/2/3", "c/1/2/4", "c/1/3/1"),
]
KEYS_OVER_A_PAGE = 2100
TURNS = 20


class ListContract:
    """How a store lists; see ``ObjectStoreContract``."""

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
